"""RNG: seeds and states."""
# ruff: noqa: N802 - a check's name carries its paragraph's id

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.utils.checkpoint

from anydevice_conformance.marks import needs, two_devices
from anydevice_conformance.situations import Situation, run_in
from anydevice_conformance.subject import Subject

pytestmark = needs("device_rng")


def _draw(subject: Subject, index: int, count: int = 64) -> torch.Tensor:
    return subject.fetch(torch.rand(count, device=subject.device(index)))


def test_RNG_001_seed_repeats(subject: Subject) -> None:
    """A seed makes each device draw the same numbers again.

    Found: after the same seed other numbers came.
    Fix: `manual_seed_all` seeds the generator of every device, which the device's kernels must use.
    """
    backend = subject.backend
    for seed in (0, 1234, 2**40 + 7, -1, -(2**63), 2**64 - 1):
        backend.manual_seed_all(seed)
        first = [_draw(subject, index) for index in subject.indices]
        backend.manual_seed_all(seed)
        second = [_draw(subject, index) for index in subject.indices]
        for index, (one, other) in enumerate(zip(first, second, strict=True)):
            assert torch.equal(one, other), f"device {index} drew other numbers after seed {seed}"


def test_RNG_002_seeds_differ(subject: Subject, index: int) -> None:
    """Other seeds and later draws give other numbers.

    Found: two seeds, or two draws, gave the same numbers.
    Fix: pass the seed on, all of it, and do not reset the generator at each draw.
    """
    draws = []
    for seed in (1, 2, 2**31 + 1, 2**16 + 1, 2**24 + 1, 2**30, -1, -2):
        subject.backend.manual_seed_all(seed)
        draws += [_draw(subject, index), _draw(subject, index)]
    for number, draw in enumerate(draws):
        assert not any(torch.equal(draw, other) for other in draws[:number]), "numbers repeat"


def test_RNG_003_state(subject: Subject, index: int) -> None:
    """A state that is put back makes the draws since then repeat.

    Found: the state is no uint8 host tensor, or does not bring the numbers back.
    Fix: return the generator's whole state, a copy of it, and set all of it.
    """
    backend = subject.backend
    backend.manual_seed_all(5)
    _draw(subject, index, 7)
    state = backend.rng_state(index)
    assert isinstance(state, torch.Tensor), f"the state is a {type(state).__name__}"
    assert state.dtype is torch.uint8, f"the state is {state.dtype}"
    assert state.device.type == "cpu", f"the state is on {state.device}"
    kept = state.clone()
    first = _draw(subject, index)
    assert torch.equal(state, kept), "the state that was given out changes with later draws"
    for _ in range(2):
        backend.set_rng_state(kept, index)
        assert torch.equal(_draw(subject, index), first), "the draws do not repeat"
    backend.manual_seed_all(6)
    backend.set_rng_state(kept, index)
    assert torch.equal(_draw(subject, index), first), "after another seed the state is not whole"


def test_RNG_003_forked(subject: Subject) -> None:
    """`torch.manual_seed` seeds each device, and `torch.random.fork_rng` puts their states back.

    Found: other numbers after the same seed, or numbers that went on, or a device that was not
    named and did not go on.
    Fix: have ``torch.<type>`` give and set its generators' states, and seed them, for each index.
    """
    if subject.module is None or not hasattr(subject.module, "manual_seed_all"):
        return  # without a module torch cannot ask
    devices = list(subject.indices)
    for seed in (3, -4):
        turns = []
        for _ in range(2):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                turns.append([_draw(subject, index) for index in devices])
        for index, one, other in zip(devices, *turns, strict=True):
            assert torch.equal(one, other), f"device {index} is not seeded by torch.manual_seed"
    for place, index in enumerate(devices):
        _draw(subject, index, 1 + place)  # no two are in one state
    for named in (devices, devices[-1:]):
        before = {index: subject.backend.rng_state(index) for index in devices}
        with (
            contextlib.suppress(KeyError),
            torch.random.fork_rng(devices=named, device_type=subject.type),
        ):
            for index in devices:
                _draw(subject, index)
            raise KeyError
        for index, state in before.items():
            stays = torch.equal(subject.backend.rng_state(index), state)
            assert stays == (index in named), (
                f"device {index} {'goes on' if index in named else 'is put back'} "
                f"after fork_rng of devices {named}"
            )


def test_RNG_003_recomputed_blocks(subject: Subject, index: int) -> None:
    """A block that `torch.utils.checkpoint` computes again drops the same elements.

    Found: the gradient is that of another mask.
    Fix: have ``torch.<type>`` give and set its generators' states, as torch asks of device modules:
    ``get_rng_state``, ``set_rng_state``, ``device`` and, where it is set late, ``_initialized``.
    """
    if subject.module is None:
        return  # the host's is torch's own; without a module torch cannot ask
    other = subject.indices[-1 - subject.indices.index(index)]
    for current in sorted({index, other}):
        situation = Situation(index, current)
        found = run_in(subject, situation, lambda: _recomputed(subject.device(index)))
        if found is not None:
            dropped, gradient = found
            assert torch.equal(gradient, dropped), f"recomputed with another mask in {situation!r}"
            assert 0 < dropped.count_nonzero() < dropped.numel(), "dropout dropped none or all"


def _recomputed(device: torch.device) -> tuple[torch.Tensor, torch.Tensor] | None:
    """What dropout in a recomputed block gave, and its gradient; None without dropout."""

    def block(given: torch.Tensor) -> Any:
        return torch.nn.functional.dropout(given, 0.5, training=True)

    values: Any = torch.ones(300, device=device).requires_grad_()
    try:
        block(values).sum().backward()
    except (NotImplementedError, RuntimeError):
        return None
    values.grad = None
    result: Any = torch.utils.checkpoint.checkpoint(block, values, use_reentrant=False)
    torch.rand(5, device=device)  # what is drawn meanwhile is drawn by others
    result.sum().backward()
    return result.detach().cpu(), values.grad.cpu()


@two_devices
def test_RNG_004_index_obeyed(subject: Subject) -> None:
    """One device's state is its own.

    Found: the index was ignored.
    Fix: use the generator of the device asked for.
    """
    backend = subject.backend
    for here, there in subject.both_ways():
        backend.manual_seed_all(3)
        _draw(subject, here, 5)
        state = backend.rng_state(here)
        expected_here = _draw(subject, here)
        before = backend.rng_state(there)
        expected_there = _draw(subject, there)
        backend.set_rng_state(before, there)
        backend.set_rng_state(state, here)
        assert torch.equal(_draw(subject, there), expected_there), (
            f"setting the state of device {here} changed device {there}"
        )
        assert torch.equal(_draw(subject, here), expected_here), f"state of {here} is not its own"


def test_RNG_005_host_left_alone(subject: Subject, index: int) -> None:
    """The host's generator does not change.

    Found: seeding or setting the device changed the host's numbers.
    Fix: do not call ``torch.manual_seed``, which seeds all.
    """
    if subject.is_host:
        return
    backend = subject.backend
    before = torch.get_rng_state()
    backend.manual_seed_all(99)
    backend.set_rng_state(backend.rng_state(index), index)
    _draw(subject, index)
    assert torch.equal(torch.get_rng_state(), before), "the host's generator changed"
