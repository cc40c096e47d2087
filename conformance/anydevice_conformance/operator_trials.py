"""Torch's operators on the device and on the host: in each way and situation."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

from anydevice_conformance.data import DTYPES, short_name
from anydevice_conformance.operator_calls import called, in_double, placed
from anydevice_conformance.operator_results import are_equal, assert_alike
from anydevice_conformance.situations import Situation, run_in
from anydevice_conformance.subject import Subject
from anydevice_conformance.torch_operators import descriptions, name_of, samples_of
from anydevice_conformance.usual_operator import Usual
from anydevice_conformance.usual_operators import USUAL

__all__ = ["Trial", "check_trial", "trials", "usual_trials"]

#: How an operator is called.
_WAYS: Final = ("plain", "in place", "into out", "gradient")
#: How its arguments lie in memory; contiguous ones are not among them.
_LAYOUTS: Final[tuple[str, ...]] = ("transposed", "stepped", "narrowed")
_OFFSETS: Final = (0, 1, 3, 5, 35)
#: Of what the memory may be channels-last.
_IMAGES: Final = re.compile("conv|pool|pad|group_norm|batch_norm|resize|interpolate|upsample")
#: Torch's functions for layers are not meant to be called otherwise.
_PLAIN_ONLY: Final = re.compile(r"nn\.")
#: Into an ``out=`` whose dimensions are permuted torch 2.13 writes beside the host's own memory.
_NOT_INTO_OUT: Final = re.compile(r"tri[lu]$")
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
        mixed: whether only each second one has it, and the others are contiguous.
        offset: elements before them in their storages.
        size: elements of its tensors, which are repeated; 0 for as they are.
        only: which of its arguments a gradient is taken for; negative for all.
        situation: where it is called, and for which device.
    """

    description: Any
    sample: Any
    way: str
    layout: str
    mixed: bool
    offset: int
    size: int
    only: int
    situation: Situation

    def arguments(self, device: torch.device) -> tuple[list[Any], dict[str, Any]]:
        """New arguments on a device."""
        layouts = itertools.cycle([self.layout, "contiguous"] if self.mixed else [self.layout])

        def there(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                layout, tensor = next(layouts), _sized(value.detach(), self.size)
                return placed(tensor, device, layout, self.offset)
            return device if isinstance(value, torch.device) or value == "cpu" else value

        kept = [self.sample.input, *self.sample.args], self.sample.kwargs
        return pytree.tree_map(there, kept)  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        arguments, options = self.arguments(torch.device("cpu"))
        words = f"{name_of(self.description)} of {_shown([*arguments, *options.items()])}"
        if self.layout != "contiguous" or self.offset:
            words += f", {self.layout} in memory, {self.offset} elements in"
            words += " (each second one)" if self.mixed else ""
        if self.way != "plain":
            words += f", {self.way}"
        if self.way == "gradient" and self.only >= 0:
            words += " of one argument alone"
        return f"<{words}, {self.situation!r}>"


def trials(subject: Subject, rounds: int) -> Iterator[Trial]:
    """Each operator of torch's in each dtype that the backend and the host have, in some ways.

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
        enlarges = type(description).__name__ in _ONE_BY_ONE
        for sample in samples_of(description, dtype, rounds, dice.randrange(1 << 30)):
            size = dice.choice(_SIZES) if enlarges and dice.random() < 0.5 else 0
            strided = dice.random() < 0.6
            yield _trial(subject, dice, description, sample, dice.choice(ways), strided, size)


def usual_trials(subject: Subject, rounds: int) -> Iterator[Trial]:
    """The usual operators, each in all dtypes and all ways."""
    dice = random.Random(subject.seed)
    claimed = set(subject.supported(*DTYPES))
    for usual in USUAL:
        dtypes = [dtype for dtype in usual.dtypes if dtype in claimed]
        dice.shuffle(dtypes)
        ways = [way for way in (*_WAYS[1:], "gradient") if _is_called(usual, way)]
        # In a quick run half of the dtypes, which the seed chooses.
        plain = ["plain"] * (-(-len(dtypes) // 2) if subject.quick else len(dtypes))
        for number, way in enumerate(rounds * (plain + ways)):
            fitting = [d for d in dtypes if d.is_floating_point] if way == "gradient" else dtypes
            if fitting:
                sample = usual.sample(fitting[number % len(fitting)], dice.randrange(1 << 30))
                yield _trial(subject, dice, usual, sample, way, (number + subject.seed) % 2 == 1)


def _trial(
    subject: Subject,
    dice: random.Random,
    description: Any,
    sample: Any,
    way: str,
    strided: bool,
    size: int = 0,
) -> Trial:
    indices = subject.indices
    modes = ["enable_grad", "no_grad", *["inference_mode"] * subject.infers]
    layouts: tuple[str, ...] = _LAYOUTS
    if _IMAGES.search(name_of(description)):
        layouts = (*_LAYOUTS, "channels-last", "channels-last")
    layout = dice.choice(layouts) if (strided or way == "into out") else "contiguous"
    return Trial(
        description,
        sample,
        way,
        layout if subject.strided else "contiguous",
        dice.random() < 0.4,
        dice.choice(_OFFSETS) if subject.strided and strided else 0,
        size,
        dice.randrange(4) if dice.random() < 0.5 else -1,
        Situation(
            dice.choice(indices),
            dice.choice(indices),
            side_stream=subject.capabilities.streams and dice.random() < 0.2,
            thread=dice.random() < 0.1,
            mode="enable_grad" if way == "gradient" else dice.choice(modes),
        ),
    )


def _is_called(usual: Usual, way: str) -> bool:
    """Whether a usual operator is called in a way."""
    return {
        "plain": True,
        "in place": usual.inplace_variant is not None,
        "into out": usual.supports_out,
        "gradient": usual.trained and any(d.is_floating_point for d in usual.dtypes),
    }[way]


def _has(description: Any, dtype: torch.dtype, way: str) -> bool:
    if way in ("in place", "into out") and _PLAIN_ONLY.match(name_of(description)):
        return False
    if way == "in place":
        return description.inplace_variant is not None
    if way == "into out":
        return bool(description.supports_out) and not _NOT_INTO_OUT.match(name_of(description))
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
        results = run_in(subject, trial.situation, lambda: _results(subject, trial))
        if results is None or are_equal(*results):
            return
        wide = run_in(subject, trial.situation, lambda: _in_double(trial))
    assert_alike(name_of(trial.description), *results, wide, trial.way == "gradient")


def _results(subject: Subject, trial: Trial) -> tuple[Any, Any] | None:
    """The device's and the host's; None where there is nothing to compare.

    That is where it draws random numbers, of which the checks of RNG speak, or where the device or
    the host does not have it: a device need not have all that torch has.
    """
    here, host = subject.device(trial.situation.index), torch.device("cpu")
    before = torch.random.get_rng_state()
    try:
        plain = _call(trial, trial.arguments(host))
        given = trial.arguments(here)
        places = (isinstance(a, torch.Tensor | torch.device) for a in pytree.tree_leaves(given))
        if not any(places) or not torch.equal(before, torch.random.get_rng_state()):
            return None
        found = _call(trial, given)
        return pytree.tree_map_only(torch.Tensor, _fetched(subject, trial), found), plain
    except AssertionError:
        raise
    except Exception:  # noqa: BLE001 - as above
        return None


def _in_double(trial: Trial) -> Any:
    """The host's with twice the digits; None where it has none, or torch cannot."""
    with contextlib.suppress(Exception):
        wide = in_double(trial.arguments(torch.device("cpu")))
        return None if wide is None else _call(trial, wide)
    return None


def _call(trial: Trial, given: Any) -> Any:
    return called(trial.description, trial.sample, trial.way, trial.layout, trial.only, given)


def _fetched(subject: Subject, trial: Trial) -> Callable[[torch.Tensor], torch.Tensor]:
    def fetched(result: torch.Tensor) -> torch.Tensor:
        assert subject.is_on(result, trial.situation.index), (
            f"{name_of(trial.description)} gave a result on {result.device}"
        )
        return result.cpu()

    return fetched


def _sized(tensor: torch.Tensor, size: int) -> torch.Tensor:
    if not size or not tensor.numel():
        return tensor
    return tensor.flatten().repeat(-(-size // tensor.numel()))[:size]


def _shown(values: Any) -> str:
    """Values in a few words, tensors by dtype and shape."""
    words = []
    for value in pytree.tree_leaves(values):
        if isinstance(value, torch.Tensor):
            words.append(f"{short_name(value.dtype)} {tuple(value.shape)}")
        else:
            words.append(str(value)[:40])
    return ", ".join(words)
