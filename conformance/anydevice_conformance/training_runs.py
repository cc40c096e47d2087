"""Trainings by given gradients, on a device as on the host."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, Final

import torch

from anydevice_conformance.situations import Situation, run_in
from anydevice_conformance.subject import Subject
from anydevice_conformance.training_stops import interrupt
from anydevice_conformance.training_tensors import average, dtype_of, kept
from anydevice_conformance.trainings import Part, Step, Training

__all__ = ["Run", "check_training", "refuses"]

_RATE: Final = 0.125
#: Numbers of the steps after which parameters and states are compared: the scale after each.
_LOOKED_AT: Final = (1, 5)
#: After this step the optimizers are told that they have taken so many.
_LONG_AFTER, _LONG = 2, 70_000
#: Of a dtype, how far a step may be from the host's, also relatively.
_ALLOWED: Final = {torch.float32: 1e-4, torch.bfloat16: 8e-2}


def check_training(subject: Subject, training: Training) -> None:
    """Do a training on the host and on the device, and compare them after steps.

    Raises:
        AssertionError: parameters, an optimizer's state, a norm or the scale differ.
        NotImplementedError: the device lacks what the training needs.
    """
    host = Run(None, [torch.device("cpu")] * 2, training)
    expected = [host.step(step, n in _LOOKED_AT) for n, step in enumerate(training.steps)]
    run_in(subject, training.situation, lambda: _follow(subject, training, expected))


def refuses(subject: Subject, part: Part) -> bool:
    """Whether the device says that it does not have an optimizer in a form."""
    small = dataclasses.replace(part, shapes=((3,),) * len(part.groups))
    training = Training(
        parts=(small,),
        spread=False,
        wide=False,
        scaled=None,
        steps=(),
        stop=None,
        stop_after=0,
        situation=Situation(),
        seed=0,
    )
    try:
        Run(subject, [subject.device(subject.indices[0])] * 2, training).step(Step("plain"), False)
    except NotImplementedError:
        return True
    except RuntimeError as error:
        return part.form != "plain" and part.form in str(error)
    return False


def _follow(subject: Subject, training: Training, expected: list[dict[str, Any]]) -> None:
    index = training.situation.index
    other = subject.indices[(subject.indices.index(index) + 1) % len(subject.indices)]
    places = [subject.device(index), subject.device(other if training.spread else index)]
    run = Run(subject, places, training)
    for number, (step, wanted) in enumerate(zip(training.steps, expected, strict=True)):
        if number == training.stop_after and training.stop is not None:
            interrupt(run, training.stop)
        found = run.step(step, number in _LOOKED_AT)
        _compare(training, f"after step {number + 1} ({step})", found, wanted)


def _compare(training: Training, when: str, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name, value in wanted.items():
        if not isinstance(value, torch.Tensor):
            assert found[name] == value, f"{when} {name} is {found[name]}, and {value} on the host"
            continue
        other = found.get(name)
        assert other is not None, f"{when} there is no {_words(training, name)}"
        allowed = _ALLOWED.get(value.dtype, 1e-4)
        if not torch.equal(other, value) and not torch.allclose(
            other.double(), value.double(), rtol=allowed, atol=allowed
        ):
            gap = (other.double() - value.double()).abs().max().item()
            raise AssertionError(
                f"{when} {_words(training, name)} differs from the host's by {gap:.3g}"
            )
    for name in found.keys() - wanted.keys():  # made by a step that was not taken
        assert not found[name].any(), f"{when} {_words(training, name)} is not what it was"


def _words(training: Training, name: str) -> str:
    """A name, with what its optimizer is; it ends with the optimizer's number."""
    number = name.rpartition(" ")[2]
    return f"{name}, {training.parts[int(number)]!r}," if number.isdigit() else name


class Run:
    """One training on one or two devices: its parameters, optimizers and scaler.

    Attributes:
        subject: whose devices; None on the host.
        places: where even and odd parameters are.
    """

    def __init__(
        self, subject: Subject | None, places: list[torch.device], training: Training
    ) -> None:
        self.subject, self.places, self.training = subject, places, training
        self.taken = 0
        self.dice = torch.Generator().manual_seed(training.seed)
        self.parameters = [self._parameters(part) for part in training.parts]
        self.optimizers = self.new_optimizers()
        self.scaler = self.new_scaler() if training.scaled is not None else None
        self.means = [[p.detach().clone() for p in group] for group in self.parameters]

    def _parameters(self, part: Part) -> list[torch.nn.Parameter]:
        made = []
        for number, shape in enumerate(part.shapes):
            dtype = dtype_of(part, self.training, number)
            values = torch.randn(shape, generator=self.dice).to(dtype)
            values = values.to(self.places[number % 2])
            if len(shape) == 4:  # a convolution's, as they are for channels-last images
                values = values.contiguous(memory_format=torch.channels_last)
            elif len(shape) == 2 and number % 4 == 1:
                values = values.t().contiguous().t()
            made.append(torch.nn.Parameter(values))
        return made

    def new_optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers of the parameters that there are now."""
        return [
            self._optimizer(part, parameters)
            for part, parameters in zip(self.training.parts, self.parameters, strict=True)
        ]

    def _optimizer(self, part: Part, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        kind: Any = getattr(torch.optim, part.optimizer)
        known = inspect.signature(kind).parameters  # older versions of torch have fewer
        form = "plain" if self.subject is None else part.form
        options: dict[str, Any] = {"foreach": form == "foreach"}
        options |= {} if self.subject is None else part.own
        if form == "fused":
            options["fused"] = True
        count = len(part.groups)
        groups: list[dict[str, Any]] = [
            {"params": parameters[n::count], **{k: v for k, v in given.items() if k in known}}
            for n, given in enumerate(part.groups)
        ]
        if part.rate == "a tensor" and self.subject is not None:
            for group in groups:  # they would share one
                group["lr"] = torch.tensor(_RATE)
        optimizer: torch.optim.Optimizer = kind(groups, lr=_RATE, **options)
        return optimizer

    def new_scaler(self) -> Any:
        """A scaler that has taken no step."""
        options = self.training.scaled or {}
        if self.subject is None:
            return torch.amp.GradScaler("cpu", **options)
        return self.subject.backend.new_grad_scaler(**options)

    def step(self, step: Step, looked_at: bool) -> dict[str, Any]:
        """Take a step; returns norm and scale, and all that it may have changed, on the host."""
        if step.extra == "kept":
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=False)
        else:
            for parameter in self.all():
                parameter.grad = None
        for _ in range(2 if step.extra == "accumulated" else 1):
            for part, parameters in zip(self.training.parts, self.parameters, strict=True):
                self._give(part, parameters, step)
        self.taken += 1
        if step.overflow is not None:
            which, place, share, value = step.overflow
            gradient = self.parameters[which][place].grad
            if gradient is not None:
                flat = gradient.view(-1) if gradient.is_contiguous() else gradient.select(0, 0)
                flat[..., round(share * (flat.shape[-1] - 1))] = value
        norms = self._clip(step)
        self._change_rates()
        for optimizer in self.optimizers:
            if self.scaler is None:
                optimizer.step()
            else:
                self.scaler.step(optimizer)
        if self.scaler is not None:
            self.scaler.update(*([64.0] if step.extra == "new scale" else []))
        for means, parameters in zip(self.means, self.parameters, strict=True):
            average(means, parameters)
        if self.taken == _LONG_AFTER:
            self._age()
        scale = {} if self.scaler is None else {"the scale": self.scaler.get_scale()}
        return {**norms, **scale, **(self._state() if looked_at else {})}

    def all(self) -> list[torch.nn.Parameter]:
        """Of all optimizers."""
        return [parameter for group in self.parameters for parameter in group]

    def _give(self, part: Part, parameters: list[torch.nn.Parameter], step: Step) -> None:
        """Add to the gradients, each a view of a buffer for all of its dtype and device."""
        late = part.form != "fused"
        # torch's own fused SGD fails where a first gradient comes late
        joins = self.taken > 1 and (late or part.optimizer != "SGD")
        size = 2.0**-self.taken  # they become smaller, as in life
        queues: dict[tuple[int, str], list[torch.nn.Parameter]] = {}
        for number, parameter in enumerate(parameters):
            if number % 6 != 5 or (joins and step.extra != "norm 2"):  # else it has none
                queues.setdefault((number % 2, str(parameter.dtype)), []).append(parameter)
        for _, queue in sorted(queues.items()):
            device, dtype = queue[0].device, queue[0].dtype
            count = sum(p.numel() for p in queue)
            values = size * torch.randn(count + 1, generator=self.dice)
            buffer = values.to(dtype).to(device)
            if self.scaler is not None:
                buffer = self.scaler.scale(buffer).to(dtype)
            start = 1
            for number, parameter in enumerate(queue):
                given = buffer[start : start + parameter.numel()]
                start += parameter.numel()
                given = self._laid(given, parameter, late and (number + self.taken) % 2 == 1)
                if parameter.grad is None:
                    parameter.grad = given
                else:
                    parameter.grad.add_(given)

    def _laid(
        self, given: torch.Tensor, parameter: torch.nn.Parameter, otherwise: bool
    ) -> torch.Tensor:
        """Elements as a gradient: dense as its parameter, or the other way round."""
        shape = tuple(parameter.shape)
        if self.subject is not None and not self.subject.strided:
            return given.reshape(shape)
        if otherwise and parameter.is_contiguous():
            return given.view(shape[::-1]).permute(tuple(range(len(shape)))[::-1])
        if otherwise:
            return given.view(shape)
        return given.as_strided(shape, parameter.stride(), given.storage_offset())

    def _change_rates(self) -> None:
        """As a scheduler does."""
        rate = _RATE / (1 + self.taken % 3)
        for optimizer in self.optimizers:
            for number, group in enumerate(optimizer.param_groups):
                given = rate / (1 + number)
                if not isinstance(group["lr"], torch.Tensor):
                    group["lr"] = given
                elif group["lr"].device.type == "cpu":
                    group["lr"].fill_(given)
                else:  # put there by `torch.load`, as it was told
                    group["lr"] = torch.tensor(given)

    def _age(self) -> None:
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                if isinstance(state.get("step"), torch.Tensor):
                    state["step"].fill_(_LONG)

    def _clip(self, step: Step) -> dict[str, Any]:
        word, _, order = step.extra.partition(" ")
        if word not in ("norm", "value"):
            return {}
        if self.scaler is not None:
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
        parameters = [p for p in self.all() if p.numel()]  # of nothing there is no largest
        foreach = None if self.subject is None or self.taken % 2 else False
        if word == "value":
            torch.nn.utils.clip_grad_value_(parameters, 0.5, foreach=foreach)
            return {}
        norm = torch.nn.utils.clip_grad_norm_(
            parameters, step.limit, norm_type=float(order), foreach=foreach
        )
        # Of 16 bits among the gradients, a norm has the rounding, relative to its own size.
        return {"the logarithm of the gradients' norm": norm.detach().cpu().double().log()}

    def _state(self) -> dict[str, Any]:
        found: dict[str, torch.Tensor] = {}
        for which, parameters in enumerate(self.parameters):
            for number, parameter in enumerate(parameters):
                found[f"parameter {number} of optimizer {which}"] = parameter.detach()
                found[f"mean of parameter {number} of optimizer {which}"] = self.means[which][
                    number
                ]
        for which, optimizer in enumerate(self.optimizers):
            for number, values in optimizer.state_dict()["state"].items():
                for name, value in values.items():
                    if value is not None:
                        key = f"{name} of parameter {number} of optimizer {which}"
                        found[key] = torch.as_tensor(value)
        return kept(found)
