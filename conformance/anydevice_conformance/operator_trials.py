"""Which calls of torch's operators are tried: in each way and situation."""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch

from anydevice_conformance.data import DTYPES, short_name
from anydevice_conformance.operator_calls import WAYS, mapped, placed
from anydevice_conformance.operator_layouts import Deck, Layouts, possible
from anydevice_conformance.situations import Situation
from anydevice_conformance.subject import Subject
from anydevice_conformance.torch_operators import descriptions, name_of, samples_of
from anydevice_conformance.usual_operator import Usual
from anydevice_conformance.usual_operators import USUAL

__all__ = ["Trial", "trials", "usual_trials"]

#: Most models that are only used run so.
_INFERS: Final = ("inference_mode",) * 3
_OFFSETS: Final = (0, 1, 3, 5, 35)
#: Torch's functions for layers are not meant to be called otherwise.
_PLAIN_ONLY: Final = re.compile(r"nn\.")
#: Into an ``out=`` whose dimensions are permuted torch 2.13 writes beside the host's own memory.
_NOT_INTO_OUT: Final = re.compile(r"tri[lu]$|fft\.ihfft")
#: Of weights that are not dense it leaves part of the gradient unwritten.
_DENSE: Final = re.compile(r"nn\.functional\.(batch|instance)_norm")
#: In place torch 2.13 resizes what it adds to, which it says nowhere.
_NOT_IN_PLACE: Final = re.compile("addbmm")
#: What an operator of one element at a time is given as many elements of.
_SIZES: Final = (1, 33, 1025, 4099, 66_001)
_ONE_BY_ONE: Final = ("UnaryUfuncInfo", "BinaryUfuncInfo")
#: Ids and masks are tried in each run.
_ALWAYS: Final = (torch.int64, torch.bool)
#: In a quick run of the usual operators so many dtypes of each, and half of them where it is more.
_FEW: Final = 3
_FEW_OF_MANY: Final = 3
#: So often a usual operator's gradient is taken in a round; quickly once.
_GRADIENTS: Final = 2


@dataclasses.dataclass(frozen=True)
class Trial:
    """Calls of an operator with the same arguments.

    Attributes:
        description: torch's, of the operator.
        sample: its arguments, on the host.
        dtype: that it is tried in.
        ways: some of `WAYS`, in their order.
        layouts: of its tensors in memory, one after the other, and of what is written into.
        offset: elements before them in their storages.
        size: elements of its tensors, which are repeated; 0 for as they are.
        situation: where it is called, and for which device.
    """

    description: Any
    sample: Any
    dtype: torch.dtype
    ways: tuple[str, ...]
    layouts: tuple[str, ...]
    offset: int
    size: int
    situation: Situation

    @property
    def name(self) -> str:
        """Of the operator."""
        return name_of(self.description)

    def arguments(self, device: torch.device) -> tuple[list[Any], dict[str, Any]]:
        """New arguments on a device."""
        layouts = itertools.cycle(self.layouts)

        def there(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                tensor, layout = _sized(value.detach(), self.size), next(layouts)
                return placed(tensor, device, possible(layout, tensor), self.offset)
            return device if isinstance(value, torch.device) or value == "cpu" else value

        kept = [self.sample.input, *self.sample.args], self.sample.kwargs
        return mapped(there, kept)  # type: ignore[no-any-return]

    def plainly(self) -> Trial:
        """The same values, contiguous, in the plainest situation."""
        plainest = Situation(mode=self.situation.mode, ambient=self.situation.ambient)
        return dataclasses.replace(self, layouts=("contiguous",), offset=0, situation=plainest)

    def __repr__(self) -> str:
        arguments, options = self.arguments(torch.device("cpu"))
        words = f"{self.name} of {_shown([*arguments, *options.items()])}"
        if set(self.layouts) != {"contiguous"} or self.offset:
            words += f", {' and '.join(self.layouts)} in memory, {self.offset} elements in"
        return f"<{words}, {', '.join(self.ways)}, {self.situation!r}>"


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
    hands = {one.name: _Hands(subject, dice, name_of(one)) for one, _ in pairs}
    for description, dtype in pairs:
        ways = [way for way in WAYS if _has(description, dtype, way)]
        enlarges = type(description).__name__ in _ONE_BY_ONE
        for sample in samples_of(description, dtype, rounds, dice.randrange(1 << 30)):
            size = dice.choice(_SIZES) if enlarges and dice.random() < 0.5 else 0
            chosen = [dice.choice(ways)]
            dealt = hands[description.name]
            yield _trial(subject, dice, dealt, description, sample, dtype, chosen, size)


def usual_trials(subject: Subject, rounds: int) -> Iterator[Trial]:
    """The usual operators, each in all dtypes and all ways; quickly in half of the dtypes."""
    dice = random.Random(subject.seed)
    claimed = subject.supported(*DTYPES)
    for usual in [one for one in USUAL if not (one.slow and subject.quick)]:
        hands = _Hands(subject, dice, usual.name)
        dtypes = [dtype for dtype in usual.dtypes if dtype in claimed]
        floats = [dtype for dtype in dtypes if dtype.is_floating_point] if usual.trained else []
        dice.shuffle(dtypes)
        dtypes.sort(key=lambda dtype: dtype not in _ALWAYS)
        dtypes.sort(key=lambda dtype: dtype is torch.float64)  # in which the fewest models are
        dice.shuffle(floats)
        few = subject.quick and not usual.every
        count = _quickly(usual, len(dtypes)) if few else len(dtypes)
        ways = ["plain", "into out"] if usual.supports_out else ["plain"]
        if usual.inplace_variant is not None:
            ways.append("in place")
        plan = [
            (dtype, ways) for dtype in itertools.islice(itertools.cycle(dtypes), rounds * count)
        ]
        graded = itertools.islice(
            itertools.cycle(floats), 1 if subject.quick else rounds * _GRADIENTS
        )
        plan += [(dtype, ["gradient"]) for dtype in graded]
        for dtype, some in plan:
            special = some is ways and dice.random() < 0.4  # which the seed chooses
            sample = usual.sample(dtype, dice.randrange(1 << 30), special, tuple(claimed))
            more = ["once more"] if "gradient" not in some and dice.random() < 0.2 else []
            yield _trial(subject, dice, hands, usual, sample, dtype, [*some, *more])


def _quickly(usual: Usual, dtypes: int) -> int:
    """How many dtypes a quick run tries; of what makes many calls fewer."""
    return max(_FEW, dtypes // 2) if usual.calls == 1 else _FEW_OF_MANY


class _Hands:
    """What is dealt to the trials of one operator: layouts, and gradient modes."""

    def __init__(self, subject: Subject, dice: random.Random, name: str) -> None:
        self.layouts = Layouts(dice, name)
        self.modes = Deck(dice, ("enable_grad", "no_grad", *_INFERS * subject.infers))


def _trial(
    subject: Subject,
    dice: random.Random,
    hands: _Hands,
    description: Any,
    sample: Any,
    dtype: torch.dtype,
    ways: Sequence[str],
    size: int = 0,
) -> Trial:
    indices, name = subject.indices, name_of(description)
    strided = subject.strided and not _DENSE.match(name) and dice.random() < 0.9
    return Trial(
        description,
        sample,
        dtype,
        tuple(way for way in WAYS if way in ways),
        hands.layouts.deal(ways) if strided else ("contiguous",),
        dice.choice(_OFFSETS) if strided else 0,
        size,
        Situation(
            dice.choice(indices),
            dice.choice(indices),
            side_stream=subject.capabilities.streams and dice.random() < 0.2,
            thread=dice.random() < 0.06,
            mode="enable_grad" if "gradient" in ways else hands.modes.deal(),
            ambient=_ambient(subject, dice, dtype) if isinstance(description, Usual) else "",
        ),
    )


def _ambient(subject: Subject, dice: random.Random, dtype: torch.dtype) -> str:
    """Of what floating results are made of integers."""
    whole = not (dtype.is_floating_point or dtype.is_complex)
    other = whole and dice.random() < 0.25 and subject.backend.supports_dtype(torch.float64)
    return "default dtype float64" if other else ""


def _has(description: Any, dtype: torch.dtype, way: str) -> bool:
    if way in ("in place", "into out", "once more") and _PLAIN_ONLY.match(name_of(description)):
        return False
    if way == "in place":
        inplace = description.inplace_variant is not None
        return inplace and not _NOT_IN_PLACE.match(name_of(description))
    if way == "into out":
        return bool(description.supports_out) and not _NOT_INTO_OUT.match(name_of(description))
    if way == "gradient":
        trained = description.supported_backward_dtypes("cpu")
        return bool(description.supports_autograd) and dtype in trained and not dtype.is_complex
    return True


def _sized(tensor: torch.Tensor, size: int) -> torch.Tensor:
    if not size or not tensor.numel():
        return tensor
    return tensor.flatten().repeat(-(-size // tensor.numel()))[:size]


def _shown(values: Sequence[Any]) -> str:
    def word(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return f"{short_name(value.dtype)} {tuple(value.shape)}"
        return getattr(value, "__name__", None) or str(value)[:60]

    return ", ".join(map(str, mapped(word, values)))
