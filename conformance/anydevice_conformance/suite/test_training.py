"""TRN: what training asks of a device."""
# ruff: noqa: N802 - a check's name carries its paragraph's id

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import nn

from anydevice.backend import DeviceBackend
from anydevice.devices import CPU
from anydevice.engines.fsdp2 import why_not_shardable
from anydevice_conformance.marks import needs, since
from anydevice_conformance.outcomes import not_claimed
from anydevice_conformance.rank_starts import rank_step
from anydevice_conformance.subject import Subject

_SCALE: Final = 1024.0


def test_TRN_001_autocast(subject: Subject, backend: DeviceBackend) -> None:
    """Autocast computes in each dtype of `autocast_dtypes`.

    Found: the answer is no frozenset of supported floating dtypes, or a linear layer under
    ``torch.autocast`` gives another dtype.
    Fix: name the dtypes that your autocast kernels are registered for; none without autocast.
    """
    found = backend.autocast_dtypes()
    assert isinstance(found, frozenset), f"autocast_dtypes() returned {found!r}"
    layer = nn.Linear(4, 4).to(subject.device(subject.indices[0]))
    shapes = {n: torch.ones(n, device=layer.weight.device) for n in ((2, 4), (4,), (2, 3, 4))}
    plain = layer(shapes[2, 3, 4]).detach().cpu()
    for dtype in found:
        for shape, values in shapes.items():
            with torch.autocast(subject.type, dtype=dtype):
                results = {"a linear layer": layer(values), "matmul": values @ layer.weight.t()}
            for what, result in results.items():
                assert result.dtype is dtype, (
                    f"under autocast to {dtype} {what} of {shape} gave {result.dtype}"
                )
            assert torch.allclose(
                results["a linear layer"].float().cpu(), plain[0, 0], atol=0.05
            ), f"under autocast to {dtype} a linear layer of {shape} is wrong"
    values = shapes[2, 4]
    for dtype in found:
        assert dtype.is_floating_point, f"{dtype} is not floating"
        assert backend.supports_dtype(dtype), f"{dtype} is named, and supports_dtype refuses it"
        with torch.autocast(subject.type, dtype=dtype):
            inside = layer(values)
            with torch.autocast(subject.type, enabled=False):
                nested = layer(values)
        assert inside.dtype == dtype, (
            f"under autocast to {dtype} a linear layer gave {inside.dtype}"
        )
        assert nested.dtype == torch.float32, f"disabled inside, it gave {nested.dtype}"


@needs("grad_scaling")
def test_TRN_002_overflow(subject: Subject) -> None:
    """A step that overflowed changes no parameter and lowers the scale.

    Found: a parameter changed, or the scale did not fall.
    Fix: have `new_grad_scaler` return a scaler that skips the step where a gradient is not finite.
    """
    for name, model, optimizer in _trainings(subject):
        before = [p.detach().cpu().clone() for p in model.parameters()]
        scaler = _scaler(subject.backend)
        _backward(scaler, model, subject, poison=True)
        scaler.step(optimizer)
        scaler.update()
        for old, new in zip(before, model.parameters(), strict=True):
            assert torch.equal(old, subject.fetch(new.detach())), f"{name}: a parameter changed"
        assert scaler.get_scale() < _SCALE, f"{name}: the scale is {scaler.get_scale()}"
        for value in (float("nan"), float("-inf")):
            for number in range(len(before)):
                _assert_skipped(subject, name, model, optimizer, number, value)


def _assert_skipped(
    subject: Subject,
    name: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    number: int,
    value: float,
) -> None:
    """One gradient of one parameter is no number: nothing may change."""
    parameters = list(model.parameters())
    before = [p.detach().cpu().clone() for p in parameters]
    optimizer.zero_grad()
    scaler = _scaler(subject.backend)
    _backward(scaler, model, subject)
    gradient = parameters[number].grad
    assert gradient is not None
    gradient.view(-1)[-1:].fill_(value)
    scaler.step(optimizer)
    scaler.update()
    what = f"{name}, {value} in the gradient of parameter {number}"
    for old, new in zip(before, parameters, strict=True):
        assert torch.equal(old, subject.fetch(new.detach())), f"{what}: a parameter changed"
    assert scaler.get_scale() < _SCALE, f"{what}: the scale is {scaler.get_scale()}"


@needs("grad_scaling")
def test_TRN_003_finite_step(subject: Subject) -> None:
    """A scaled step without overflow equals the unscaled one.

    Found: other parameters, or another scale.
    Fix: divide the gradients by the scale before the step, in float32.
    """
    scaled, plain = _trainings(subject), _trainings(subject)
    for (name, model, optimizer), (_, other, other_optimizer) in zip(scaled, plain, strict=True):
        scaler = _scaler(subject.backend)
        for _ in range(2):
            _backward(scaler, model, subject)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            _backward(None, other, subject)
            other_optimizer.step()
            other_optimizer.zero_grad()
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(
                subject.fetch(one.detach()), subject.fetch(two.detach()), msg=f"{name} differs"
            )
        assert scaler.get_scale() == _SCALE, f"{name}: the scale is {scaler.get_scale()}"
    _assert_options(subject)


def _assert_options(subject: Subject) -> None:
    """The scaler takes the options of torch's: growth, state, and being switched off."""
    backend = subject.backend
    for _, model, optimizer in _trainings(subject):
        scaler = backend.new_grad_scaler(init_scale=8.0, growth_interval=2, growth_factor=4.0)
        for _ in range(2):
            assert scaler.get_scale() == 8.0, f"with init_scale=8 it is {scaler.get_scale()}"
            _backward(scaler, model, subject)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 32.0, (
            f"after two steps it grew to {scaler.get_scale()}, not 32"
        )
        other = backend.new_grad_scaler()
        other.load_state_dict(scaler.state_dict())
        assert other.get_scale() == 32.0, f"of a saved scale of 32 came {other.get_scale()}"
        off = backend.new_grad_scaler(enabled=False)
        loss = torch.ones((), device=subject.device(subject.indices[0]))
        assert not off.is_enabled(), "enabled=False does not switch it off"
        assert subject.fetch(off.scale(loss)).item() == 1.0, "a scaler that is off scales"


@needs("collectives")
def test_TRN_004_distributed(subject: Subject) -> None:
    """`DistributedDataParallel` on two processes trains as one process does.

    Found: other parameters than one process has with the whole batch.
    Fix: see to `all_reduce` and its order with the device's work (COL-002, COL-006).
    """
    _trained_alike(subject, "TRN-004", "ddp")


@needs("collectives")
def test_TRN_005_sharded(subject: Subject) -> None:
    """`fully_shard` on two processes trains as one process does.

    Found: other parameters than one process has with the whole batch.
    Fix: see to COL-007, COL-008 and their order with the device's work.
    """
    _require_shardable(subject)
    _trained_alike(subject, "TRN-005", "sharded")


@needs("collectives")
def test_TRN_006_checkpoint(subject: Subject) -> None:
    """A sharded model's checkpoint loads into a plain one.

    Found: other weights, or an error of ``torch.distributed.checkpoint``.
    Fix: see that copies to the host wait for the device's work (MOV), and COL-010.
    """
    _require_shardable(subject)
    since(subject, "TRN-006")
    for answer in rank_step(subject, "checkpoint", part="training"):
        assert answer == [], f"these weights differ: {answer}"


@needs("collectives")
def test_TRN_007_resumed(subject: Subject) -> None:
    """Saving and loading between two steps changes nothing.

    Found: another second step.
    Fix: see that what is copied to the host and back is bit-equal (MOV).
    """
    since(subject, "TRN-007")
    for answer in rank_step(subject, "resumed", part="training"):
        assert answer == [], f"these weights differ: {answer}"


def _require_shardable(subject: Subject) -> None:
    """On the host torch itself may lack what sharding needs; elsewhere it is the device's fault."""
    device_type = subject.backend.device_type
    reason = why_not_shardable(device_type)
    if reason and device_type == CPU.type:
        not_claimed(reason)


def _trained_alike(subject: Subject, paragraph: str, step: str) -> None:
    since(subject, paragraph)
    for answer in rank_step(subject, step, part="training"):
        assert not isinstance(answer, list), "; ".join(answer)
        assert answer < 1e-4, f"parameters differ by {answer:.2g} from one process's"


def _scaler(backend: DeviceBackend) -> Any:
    return backend.new_grad_scaler(init_scale=_SCALE, growth_interval=1000)


def _trainings(subject: Subject) -> Iterator[tuple[str, nn.Module, torch.optim.Optimizer]]:
    """A small model with each kind of optimizer that the device has."""
    made = 0
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "SGD": functools.partial(torch.optim.SGD, lr=0.5),
        "fused SGD": functools.partial(torch.optim.SGD, lr=0.5, fused=True),
    }
    for name, kind in kinds.items():
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
        model.to(subject.device(subject.indices[0]))
        try:
            optimizer = kind(model.parameters())
        except RuntimeError:  # no fused optimizer for this device
            continue
        made += 1
        yield name, model, optimizer
    if not made:
        not_claimed("no optimizer can be made")


def _backward(scaler: Any, model: nn.Module, subject: Subject, poison: bool = False) -> None:
    values = torch.linspace(-1, 1, 12).reshape(3, 4).to(subject.device(subject.indices[0]))
    loss = model(values).square().mean()
    if poison:
        loss = loss * float("inf")
    (loss if scaler is None else scaler.scale(loss)).backward()
