"""Trainings by given gradients, on a device as on the host."""

from __future__ import annotations

import copy
import io
from typing import Any, Final

import torch

from anydevice_conformance.situations import run_in
from anydevice_conformance.subject import Subject
from anydevice_conformance.trainings import ELSEWHERE, Step, Training

__all__ = ["check_training"]

_RATE: Final = 0.125
_MANY: Final = 131
_BIG: Final = 100_003
_INTERVAL: Final = 2
#: Numbers of the steps after which parameters and states are compared: the scale after each.
_LOOKED_AT: Final = (1, 4, 5)
#: Of a dtype, how far a step may be from the host's, also relatively.
_ALLOWED: Final = {torch.float32: 1e-4, torch.bfloat16: 8e-2}


def check_training(subject: Subject, training: Training) -> None:
    """Do a training on the host and on the device, and compare them after steps.

    Raises:
        AssertionError: parameters, the optimizer's state, a norm or the scale differ.
        NotImplementedError: the device lacks what the training needs.
    """
    host = _Run(None, torch.device("cpu"), training)
    expected = [host.step(step, n in _LOOKED_AT) for n, step in enumerate(training.steps)]
    run_in(subject, training.situation, lambda: _follow(subject, training, expected))


def _follow(subject: Subject, training: Training, expected: list[dict[str, Any]]) -> None:
    index = training.situation.index
    run = _Run(subject, subject.device(index), training)
    for number, (step, wanted) in enumerate(zip(training.steps, expected, strict=True)):
        if number == training.stop_after and training.stop is not None:
            run.interrupt(training.stop)
        found = run.step(step, number in _LOOKED_AT)
        _compare(f"after step {number + 1} ({step})", found, wanted)


def _compare(when: str, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name, value in wanted.items():
        if not isinstance(value, torch.Tensor):
            assert found[name] == value, f"{when} {name} is {found[name]}, and {value} on the host"
            continue
        other = found.get(name)
        assert other is not None, f"{when} there is no {name}"
        allowed = _ALLOWED.get(value.dtype, 1e-4)
        if not torch.equal(other, value) and not torch.allclose(
            other.double(), value.double(), rtol=allowed, atol=allowed
        ):
            gap = (other.double() - value.double()).abs().max().item()
            raise AssertionError(f"{when} {name} differs from the host's by {gap:.3g}")
    for name in found.keys() - wanted.keys():  # made by a step that was not taken
        assert not found[name].any(), f"{when} {name} is not what it was"


class _Run:
    """One training on one device: its parameters, optimizers and scaler."""

    def __init__(self, subject: Subject | None, device: torch.device, training: Training) -> None:
        self.subject, self.device, self.training = subject, device, training
        self.taken = 0
        self.dice = torch.Generator().manual_seed(training.seed)
        other = torch.bfloat16 if training.mixed else torch.float32
        self.parameters = []
        for number, shape in enumerate(_shapes(training.many)):
            dtype = other if number % 7 == 3 else torch.float32
            values = self._values(shape, dtype).to(device)
            if len(shape) == 4:  # a convolution's, as they are for channels-last images
                values = values.contiguous(memory_format=torch.channels_last)
            self.parameters.append(torch.nn.Parameter(values))
        self.optimizers = self._optimizers()
        self.scaler = self._scaler() if training.scaled else None

    def _values(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=self.dice).to(dtype)

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        training = self.training
        kind = getattr(torch.optim, training.optimizer)
        options = dict(training.options)
        form = "plain" if self.subject is None else training.form
        options["foreach"] = form == "foreach"
        if form == "fused":
            options["fused"] = True
        parts = [self.parameters[::2], self.parameters[1::2]] if training.two else [self.parameters]
        return [kind(part, lr=_RATE, **options) for part in parts]

    def _scaler(self) -> Any:
        options: dict[str, Any] = {"init_scale": 256.0, "growth_interval": _INTERVAL}
        if self.subject is None:
            return torch.amp.GradScaler("cpu", **options)
        return self.subject.backend.new_grad_scaler(**options)

    def step(self, step: Step, looked_at: bool) -> dict[str, Any]:
        """Take a step; returns norm and scale, and all that it may have changed, on the host."""
        parts = 2 if step.extra == "accumulated" else 1
        size = 2.0**-self.taken  # they become smaller, as in life
        self.taken += 1
        late = self.training.form != "fused"  # torch's own SGD fails there
        for number, parameter in enumerate(self.parameters):
            parameter.grad = None
            for _ in range(parts):
                given = size * self._values(tuple(parameter.shape), parameter.dtype)
                if number % 5 != 4 or (step.extra == "value" and late):  # else it has no gradient
                    self._add(parameter, torch.empty_like(parameter).copy_(given))
        if step.overflow is not None:
            place, share, value = step.overflow
            gradient = self.parameters[place].grad
            if gradient is not None:
                flat = gradient.view(-1)
                flat[round(share * (flat.numel() - 1))] = value
        norms = self._clip(step)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:  # as a scheduler does
                group["lr"] = _RATE / (1 + self.taken % 3)
            if self.scaler is None:
                optimizer.step()
            else:
                self.scaler.step(optimizer)
        if self.scaler is not None:
            self.scaler.update(*([64.0] if step.extra == "new scale" else []))
        scale = {} if self.scaler is None else {"the scale": self.scaler.get_scale()}
        return {**norms, **scale, **(self._state() if looked_at else {})}

    def _add(self, parameter: torch.nn.Parameter, given: torch.Tensor) -> None:
        scaled = given if self.scaler is None else self.scaler.scale(given).to(given.dtype)
        parameter.grad = scaled if parameter.grad is None else parameter.grad + scaled

    def _clip(self, step: Step) -> dict[str, Any]:
        word, _, order = step.extra.partition(" ")
        if word not in ("norm", "value"):
            return {}
        if self.scaler is not None:
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
        if word == "value":
            torch.nn.utils.clip_grad_value_(self.parameters, 0.5)
            return {}
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, 0.5, norm_type=float(order))
        # Of 16 bits among the gradients, a norm has the rounding, relative to its own size.
        return {"the logarithm of the gradients' norm": norm.detach().cpu().double().log()}

    def _state(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for number, parameter in enumerate(self.parameters):
            found[f"parameter {number}"] = _kept(parameter)
        for which, optimizer in enumerate(self.optimizers):
            for number, values in optimizer.state_dict()["state"].items():
                for name, value in values.items():
                    if value is not None:
                        key = f"{name} of parameter {number} of optimizer {which}"
                        found[key] = _kept(torch.as_tensor(value))
        return found

    def interrupt(self, stop: str) -> None:
        """Go on with what was saved or copied, and spoil what there was."""
        assert self.subject is not None
        old = self.parameters
        if stop == "copied":
            self.parameters, self.optimizers = copy.deepcopy((old, self.optimizers))
        else:
            self._load(stop)
        with torch.no_grad():
            for parameter in old:
                parameter.fill_(7.0)

    def _load(self, stop: str) -> None:
        subject = self.subject
        assert subject is not None
        saved = {"parameters": [p.detach() for p in self.parameters]}
        states: dict[str, Any] = {"optimizers": [o.state_dict() for o in self.optimizers]}
        if self.scaler is not None:
            states["scaler"] = self.scaler.state_dict()
        file, target = io.BytesIO(), None
        torch.save({**saved, **states}, file)
        file.seek(0)
        if stop == "saved to the host":
            target = torch.device("cpu")
        elif stop == ELSEWHERE:
            target = subject.device(subject.indices[subject.indices.index(self._index()) - 1])
            self.device = target
        loaded = torch.load(file, map_location=None if target is None else str(target))
        place = self.device if target is None else target
        for tensor in loaded["parameters"]:
            assert tensor.device == place, f"torch.load to {place} gave a tensor on {tensor.device}"
        self.parameters = [torch.nn.Parameter(t.to(self.device)) for t in loaded["parameters"]]
        self.optimizers = self._optimizers()
        for optimizer, state in zip(self.optimizers, loaded["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        if self.scaler is not None:
            self.scaler = self._scaler()
            self.scaler.load_state_dict(loaded["scaler"])

    def _index(self) -> int:
        return self.device.index or 0


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _shapes(many: bool) -> list[tuple[int, ...]]:
    if not many:
        return [(_BIG,), (3, 5), (), (1,), (4, 3, 3, 3)]
    small: list[tuple[int, ...]] = [(3,), (2, 3), (), (1, 1, 5), (1,), (2, 3, 2, 2)]
    return [small[number % len(small)] for number in range(_MANY)]
