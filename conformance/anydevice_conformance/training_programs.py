"""Generated trainings of whole models: how forward, backward and step are taken, as on the host."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
from collections.abc import Iterator
from typing import Any, Final

import torch

from anydevice_conformance.data import short_name
from anydevice_conformance.situations import Situation, run_in
from anydevice_conformance.subject import Subject
from anydevice_conformance.training_models import NETS, arguments_of, built, loss_of

__all__ = ["Program", "check_program", "programs"]

#: How a model may be trained, besides plainly.
_WAYS: Final = (
    "computed again",
    "computed again, reentrant",
    "kept on the host",
    "own function",
    "hooks",
    "penalty",
    "kept graph",
    "accumulated",
    "kept gradients",
    "anomaly mode",
    "inference between",
    "frozen",
    "clipped",
    "scheduled",
    "without autocast inside",
    "channels-last",
    "LBFGS",
    "spread",
)
#: Of a dtype that is computed in, how far a tensor may be from the host's, by its size.
_ALLOWED: Final = {torch.float32: 2e-3, torch.float16: 0.1, torch.bfloat16: 0.25}
_STEPS: Final = 3


@dataclasses.dataclass(frozen=True)
class Program:
    """A training of a model.

    Attributes:
        net: a key of `NETS`.
        dtype: that is computed in, under autocast where it is not float32.
        ways: how it is trained.
        situation: in which it is done.
    """

    net: str
    dtype: torch.dtype
    ways: tuple[str, ...]
    situation: Situation

    def __repr__(self) -> str:
        words = ", ".join(self.ways) or "plainly"
        return f"<{self.net} in {short_name(self.dtype)}, {words}, {self.situation!r}>"


def programs(subject: Subject, count: int) -> Iterator[Program]:
    """So many programs: each way by turns, with two or three others that chance chooses."""
    dice = random.Random(subject.seed)
    ways = [w for w in _WAYS if w != "spread" or _may_spread(subject)]
    dtypes = [torch.float32, *sorted(subject.backend.autocast_dtypes(), key=str)]
    turns = itertools.cycle(ways)
    for number in range(count):
        dtype = dtypes[number % len(dtypes)]
        chosen = {next(turns), *dice.sample(ways, 2)}
        if "spread" in chosen:
            chosen -= {"LBFGS"}  # which makes one tensor of all parameters
        if dtype is not torch.float32:  # what goes twice through few bits says little
            chosen -= {"LBFGS", "penalty"}
        yield Program(
            net=NETS[number // len(dtypes) % len(NETS)],
            dtype=dtype,
            ways=tuple(way for way in ways if way in chosen),
            situation=Situation(
                dice.choice(subject.indices),
                current=dice.choice(subject.indices),
                side_stream=subject.capabilities.streams and dice.random() < 0.4,
                thread=dice.random() < 0.3,
            ),
        )


def _may_spread(subject: Subject) -> bool:
    return len(subject.indices) > 1 and subject.capabilities.streams


def check_program(subject: Subject, program: Program) -> None:
    """Train on the host, in float32, and on the device, and compare all.

    Raises:
        AssertionError: a loss, a parameter, a gradient, a buffer or what hooks saw differs.
        NotImplementedError: the device lacks what it needs.
        RuntimeError: as above, or it fails.
    """
    host = torch.device("cpu")
    try:
        wanted = _train(None, program, [host, host])
    except RuntimeError:
        return  # torch itself does not have these ways together

    def follow() -> dict[str, torch.Tensor]:
        index = program.situation.index
        other = subject.indices[subject.indices.index(index) - 1]
        places = [subject.device(index)] * 2
        if "spread" in program.ways:
            places[1] = subject.device(other)
        return _train(subject, program, places)

    found = run_in(subject, program.situation, follow)
    allowed = _ALLOWED[program.dtype]
    assert found.keys() == wanted.keys(), f"there are {sorted(found)}, not {sorted(wanted)}"
    for name, value in wanted.items():
        other = found[name]
        assert other.dtype is value.dtype, f"{name} is of {other.dtype}, not {value.dtype}"
        assert other.shape == value.shape, f"{name} has the shape {tuple(other.shape)}"
        one, two = other.double(), value.double()
        gap = (one - two).norm().item()
        most = allowed * (two.norm().item() + 0.02)
        assert gap <= most, f"{name} differs from the host's by {gap:.3g}, of {two.norm():.3g}"


def _train(
    subject: Subject | None, program: Program, places: list[torch.device]
) -> dict[str, torch.Tensor]:
    ways = program.ways
    model = built(program.net, ways, places)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer: Any = torch.optim.SGD(trained, lr=0.1)
    several = "LBFGS" in ways
    if several:
        optimizer = torch.optim.LBFGS(trained, lr=0.1, max_iter=3, history_size=2)
    rates: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    scaler = None
    scales = subject is not None and subject.capabilities.grad_scaling
    # What hooks see is scaled, too.
    if subject is not None and scales and program.dtype is torch.float16 and "hooks" not in ways:
        scaler = subject.backend.new_grad_scaler(init_scale=16.0, growth_interval=2)
    if "hooks" in ways:
        _hook(model, trained)
    noted: list[torch.Tensor] = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad(set_to_none="kept gradients" not in ways)
        for turn in range(2 if "accumulated" in ways else 1):
            loss = _backward(subject, program, model, trained, scaler, turn)
            noted.append(loss.detach())
        return loss

    for number in range(_STEPS):
        with contextlib.ExitStack() as stack:
            if "anomaly mode" in ways and number == 1:
                stack.enter_context(torch.autograd.set_detect_anomaly(True))
            if several:
                optimizer.step(closure)
                continue
            closure()
            if scaler is not None:
                scaler.unscale_(optimizer)
            if "clipped" in ways:
                norm = torch.nn.utils.clip_grad_norm_(trained, 0.3, error_if_nonfinite=True)
                noted.append(norm.detach())
            if scaler is not None:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
        if "scheduled" in ways:
            rates.step()
    return _found(model, [*noted, *model.noted])


def _hook(model: Any, trained: list[torch.nn.Parameter]) -> None:
    def seen(block: Any, given: Any, gradients: Any) -> None:
        model.noted.append(gradients[0].detach().float().abs().sum())

    model.blocks[2].register_full_backward_hook(seen)
    model.blocks[-1].register_forward_hook(lambda block, given, found: found * 1.5)

    def halve(parameter: Any) -> None:
        parameter.grad.mul_(0.5)

    last: Any = trained[-2:]
    for parameter in last:
        parameter.register_post_accumulate_grad_hook(halve)


def _backward(
    subject: Subject | None,
    program: Program,
    model: Any,
    trained: list[torch.nn.Parameter],
    scaler: Any,
    turn: int,
) -> torch.Tensor:
    ways = program.ways
    given, targets = (value.to(model.places[0]) for value in arguments_of(program.net, turn))
    if "channels-last" in ways and given.dim() == 4:
        given = given.contiguous(memory_format=torch.channels_last)
    low = subject is not None and program.dtype is not torch.float32

    def cast() -> Any:
        kind = model.places[0].type
        return torch.autocast(kind, dtype=program.dtype) if low else contextlib.nullcontext()

    with cast():
        found = model(given)
        loss = loss_of(program.net, found, targets.to(found.device))
    if low and "hooks" not in ways:
        assert found.dtype is program.dtype, f"under autocast the last layer gave {found.dtype}"
    if "inference between" in ways:
        model.eval()
        infers = subject is None or subject.infers
        with torch.inference_mode() if infers else torch.no_grad(), cast():
            model(given)
        model.train()
    if "penalty" in ways:
        grads = torch.autograd.grad(loss, trained, create_graph=True, allow_unused=True)
        kept = [g.square().sum().to(loss.device) for g in grads if g is not None]
        loss = loss + 0.1 * torch.stack(kept).sum()
    scaled = loss if scaler is None else scaler.scale(loss)
    if "kept graph" in ways:
        scaled.backward(retain_graph=True)
    scaled.backward()
    return loss


def _found(model: torch.nn.Module, noted: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {f"number {n} that was noted": value.cpu() for n, value in enumerate(noted)}
    for name, parameter in model.named_parameters():
        found[f"parameter {name}"] = parameter.detach().cpu()
        if parameter.grad is not None:
            found[f"the gradient of {name}"] = parameter.grad.detach().cpu()
    for name, buffer in model.named_buffers():
        found[f"buffer {name}"] = buffer.cpu()
    return found
