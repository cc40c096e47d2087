"""Torch's operators on the device and on the host: in each way that they are called."""

from __future__ import annotations

import dataclasses
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

from anydevice_conformance.data import DTYPES, short_name
from anydevice_conformance.operator_results import assert_alike
from anydevice_conformance.subject import Subject
from anydevice_conformance.torch_operators import descriptions, name_of, samples_of

__all__ = ["Trial", "check_trial", "trials"]

#: How an operator is called.
_WAYS: Final = ("plain", "in place", "into out", "gradient")
#: How its arguments lie in memory.
_LAYOUTS: Final = ("contiguous", "transposed", "stepped", "offset")
#: What an operator of one element at a time is given as many elements of.
_SIZES: Final = (1, 33, 1025, 4099, 66_001)
_ONE_BY_ONE: Final = ("UnaryUfuncInfo", "BinaryUfuncInfo")


@dataclasses.dataclass(frozen=True)
class Trial:
    """One call of an operator.

    Attributes:
        description: torch's, of the operator.
        sample: its arguments, on the host.
        way: one of plain, in place, into out, gradient.
        layout: of its tensors in memory.
        size: elements of its tensors, which are repeated; 0 for as they are.
        index: of the device.
    """

    description: Any
    sample: Any
    way: str
    layout: str
    size: int
    index: int

    def arguments(self, device: torch.device) -> tuple[list[Any], dict[str, Any]]:
        """New arguments on a device."""

        def placed(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return _placed(_sized(value.detach(), self.size), device, self.layout)
            return device if isinstance(value, torch.device) or value == "cpu" else value

        kept = [self.sample.input, *self.sample.args], self.sample.kwargs
        return pytree.tree_map(placed, kept)  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        arguments, options = self.arguments(torch.device("cpu"))
        words = f"<{name_of(self.description)} of {_shown([*arguments, *options.items()])}"
        if self.layout != "contiguous":
            words += f", {self.layout} in memory"
        words += "" if self.way == "plain" else f", {self.way}"
        return f"{words}, on device {self.index}>"


def trials(subject: Subject, rounds: int) -> Iterator[Trial]:
    """Each operator in each dtype that the backend and the host have, in some ways.

    Raises:
        ImportError: torch's descriptions cannot be had.
    """
    dice = random.Random(subject.seed)
    claimed = subject.supported(*DTYPES)
    pairs = [
        (one, dtype)
        for one in descriptions()
        for dtype in claimed
        if dtype in one.supported_dtypes("cpu")
    ]
    dice.shuffle(pairs)
    for description, dtype in pairs:
        ways = [way for way in _WAYS if _has(description, dtype, way)]
        seed = dice.randrange(1 << 30)
        for sample in samples_of(description, dtype, rounds, seed):
            enlarged = type(description).__name__ in _ONE_BY_ONE and dice.random() < 0.5
            yield Trial(
                description,
                sample,
                dice.choice(ways),
                dice.choice(_LAYOUTS) if subject.strided and dice.random() < 0.6 else "contiguous",
                dice.choice(_SIZES) if enlarged else 0,
                dice.choice(subject.indices),
            )


def _has(description: Any, dtype: torch.dtype, way: str) -> bool:
    if way == "in place":
        return description.inplace_variant is not None
    if way == "into out":
        return bool(description.supports_out)
    if way == "gradient":
        trained = description.supported_backward_dtypes("cpu")
        return bool(description.supports_autograd) and dtype in trained and not dtype.is_complex
    return True


def check_trial(subject: Subject, trial: Trial) -> None:
    """Call an operator on the device, and compare.

    Raises:
        AssertionError: it is wrong.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        host = torch.device("cpu")
        before = torch.random.get_rng_state()
        arguments = trial.arguments(subject.device(trial.index))
        if not any(
            isinstance(a, torch.Tensor | torch.device) for a in pytree.tree_leaves(arguments)
        ):
            return  # it is for whatever device is the default one
        try:
            plain = _called(trial, *trial.arguments(host))
            if not torch.equal(before, torch.random.get_rng_state()):
                return  # how random numbers are drawn the checks of RNG say
            wide = _in_double(trial, *trial.arguments(host))
            found = _called(trial, *arguments)
            found = pytree.tree_map_only(torch.Tensor, _fetched(subject, trial), found)
        except AssertionError:
            raise
        except Exception:  # noqa: BLE001 - a device need not have all that torch has
            return
    assert_alike(name_of(trial.description), found, plain, wide, trial.way == "gradient")


def _fetched(subject: Subject, trial: Trial) -> Callable[[torch.Tensor], torch.Tensor]:
    def fetched(result: torch.Tensor) -> torch.Tensor:
        assert subject.is_on(result, trial.index), (
            f"{name_of(trial.description)} gave a result on {result.device}"
        )
        return result.cpu()

    return fetched


def _called(trial: Trial, arguments: list[Any], options: dict[str, Any]) -> Any:
    """What an operator gives, and what its arguments are then."""
    description = trial.description
    if trial.way == "gradient":
        return _gradients(trial, arguments, options)
    if trial.way == "in place":
        result = description.inplace_variant(*arguments, **options)
    elif trial.way == "into out":
        result = description(*arguments, **options)
        out = pytree.tree_map_only(torch.Tensor, _filled, result)
        description(*arguments, **options, out=out)
        return out
    else:
        result = description(*arguments, **options)
    return result, arguments


def _filled(result: torch.Tensor) -> torch.Tensor:
    """A tensor to write a result into: it lies in memory as nobody's result does by itself."""
    out = torch.full_like(result, 1).mT.contiguous().mT if result.dim() > 1 else result.clone()
    return out.fill_(float("nan") if out.is_floating_point() else 1)


def _gradients(trial: Trial, arguments: list[Any], options: dict[str, Any]) -> list[Any]:
    """Of a weighted sum of the results, for the floating arguments."""
    leaves: list[torch.Tensor] = []

    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        leaves.append(tensor.requires_grad_())
        return leaves[-1]

    arguments, options = pytree.tree_map_only(torch.Tensor, leaf, (arguments, options))
    result = trial.sample.output_process_fn_grad(trial.description(*arguments, **options))
    outputs = [r for r in pytree.tree_leaves(result) if isinstance(r, torch.Tensor)]
    outputs = [r for r in outputs if r.requires_grad and not r.is_complex()]
    weights = [_weights(r).to(r.dtype).to(r.device) for r in outputs]
    return list(torch.autograd.grad(outputs, leaves, weights, allow_unused=True))


def _weights(result: torch.Tensor) -> torch.Tensor:
    values = torch.linspace(-1.0, 1.5, max(1, result.numel()), dtype=torch.float64)
    return values[: result.numel()].reshape(result.shape)


def _in_double(trial: Trial, arguments: list[Any], options: dict[str, Any]) -> Any:
    """The operator on the host with twice the digits; None where it is not done so."""

    def doubled(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_complex():
            return tensor.to(torch.complex128)
        return tensor.double() if tensor.is_floating_point() else tensor

    try:
        return _called(trial, *pytree.tree_map_only(torch.Tensor, doubled, (arguments, options)))
    except Exception:  # noqa: BLE001 - torch has some in few dtypes
        return None


def _sized(tensor: torch.Tensor, size: int) -> torch.Tensor:
    if not size or not tensor.numel():
        return tensor
    return tensor.flatten().repeat(-(-size // tensor.numel()))[:size]


def _placed(tensor: torch.Tensor, device: torch.device, layout: str) -> torch.Tensor:
    """A copy on the device, of the layout."""
    if layout == "transposed" and tensor.dim() > 1:
        return tensor.mT.contiguous().to(device, copy=True).mT
    if layout == "stepped" and tensor.dim():
        return torch.stack([tensor, torch.zeros_like(tensor)], -1).to(device)[..., 0]
    if layout == "offset" and tensor.dim():
        flat = torch.cat([tensor.new_zeros(3), tensor.flatten()]).to(device)
        return flat[3:].view(tensor.shape)
    return tensor.clone(memory_format=torch.contiguous_format).to(device)


def _shown(values: Any) -> str:
    """Values in a few words, tensors by dtype and shape."""
    words = []
    for value in pytree.tree_leaves(values):
        if isinstance(value, torch.Tensor):
            words.append(f"{short_name(value.dtype)} {tuple(value.shape)}")
        else:
            words.append(str(value)[:40])
    return ", ".join(words)
