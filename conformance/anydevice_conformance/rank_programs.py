"""Generated programs of collectives: groups that come and go, several calls at once, any handle."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import random
from collections.abc import Iterator
from typing import Any, Final

import torch

from anydevice_conformance.data import short_name
from anydevice_conformance.rank_form import by_group_number
from anydevice_conformance.rank_forms_rarer import ALL_FORMS
from anydevice_conformance.rank_forms_sums import SUMS
from anydevice_conformance.rank_layouts import DENSE, LAYOUTS
from anydevice_conformance.rank_operations import OPERATIONS

__all__ = ["MODES", "TEAMS", "Call", "Turn", "programs"]

_SHAPES: Final = (
    (3,),
    (1,),
    (5, 7),
    (2, 3, 4),
    (1001,),
    (2, 1, 2, 3),
    (1, 64),
    (4097,),
    (128, 32),
    (20_001,),
    (65_537,),
)
_LONG: Final = ((4097,), (8, 513))
#: Of several dimensions, none of which may change places with another unseen.
_LAID: Final = ((5, 7), (2, 3, 4), (3, 2, 4, 5), (8, 513))
#: Where a program takes place: the default group, one of all ranks or of this one that stays, and
#: one that is made for one turn.
TEAMS: Final = ("default", "all", "fresh", "alone", "default", "fresh", "fresh alone")
#: How a handle is waited for.
_WAITS: Final = ("wait", "future", "then", "completed")
#: So many calls are under way at once in one of so many turns, and of which forms they are.
_CROWD: Final = 70
_CROWDS: Final = 30
_SMALL: Final = ((), (1,), (0,), (2, 3), (7,), (64,))
#: Calls of a turn that its text shows.
_SHOWN: Final = 5
_MANY: Final = (
    *SUMS,
    "broadcast",
    "all_gather",
    "gather",
    "all_to_all",
    "all_to_all_single",
    "all_to_all_single, uneven",
    "all_to_all, uneven",
)
MODES: Final = ("enable_grad", "no_grad", "inference_mode")


@dataclasses.dataclass(frozen=True)
class Call:
    """One collective of a turn.

    Attributes:
        form: a key of `ALL_FORMS`.
        dtype: of its tensors.
        shape: of each of a rank's tensors.
        operation: how values are combined.
        unusual: values that stand among them.
        layouts: of each rank's tensors, by its number in the group.
        layouts_out: of each rank's results.
        offset: elements before them in their storage.
        root: the number of the rank that sends to all or gets from all.
        by_group: whether it is its number in the group.
        wait: one of `_WAITS`; None without ``async_op``.
        refused: whether a wrong call goes before it, which each rank refuses.
        reused: whether the memory of what was given holds other values before the result is used.
        seed: of the values.
    """

    form: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    operation: str
    unusual: tuple[float, ...]
    layouts: tuple[str, ...]
    layouts_out: tuple[str, ...]
    offset: int
    root: int
    by_group: bool
    wait: str | None
    refused: bool
    reused: bool
    seed: int

    def __repr__(self) -> str:
        words = [f"{self.form} of {self.shape} {short_name(self.dtype)}, rank {self.root} first"]
        if ALL_FORMS[self.form].operations:
            words.append(self.operation)
        if self.unusual:
            words.append(f"with {self.unusual}")
        for name, layouts in (("given", self.layouts), ("results", self.layouts_out)):
            if set(layouts) != {"plain"}:
                words.append(f"{name} {', '.join(layouts)}")
        if self.by_group:
            words.append("by its number in the group")
        if self.offset:
            words.append(f"{self.offset} elements into its storage")
        if self.wait is not None:
            words.append(f"with async_op ({self.wait})")
        if self.refused:
            words.append("after a call that is refused")
        if self.reused:
            words.append("whose inputs are overwritten then")
        return f"<{', '.join(words)}>"


@dataclasses.dataclass(frozen=True)
class Turn:
    """Collectives that are under way at once.

    Attributes:
        team: one of `TEAMS`.
        calls: in the order in which each rank begins them.
        begun: the stream on which they begin, 0 for the default one.
        waited: the stream on which they are waited for.
        thread: whether it is done in a thread of its own.
        mode: the gradient mode.
        slow: the rank that comes late; None for none.
        seed: of the order in which each rank waits.
    """

    team: str
    calls: tuple[Call, ...]
    begun: int
    waited: int
    thread: bool
    mode: str
    slow: int | None
    seed: int

    def __repr__(self) -> str:
        more = f" and {len(self.calls) - _SHOWN} more" if len(self.calls) > _SHOWN else ""
        calls = ", ".join(map(repr, self.calls[:_SHOWN]))
        words = [f"in the group {self.team!r}: {calls}{more}"]
        if self.begun or self.waited:
            words.append(f"begun on stream {self.begun}, waited for on stream {self.waited}")
        if self.thread:
            words.append("in a thread")
        if self.mode != MODES[0]:
            words.append(self.mode)
        if self.slow is not None:
            words.append(f"rank {self.slow} comes late")
        return f"<{'; '.join(words)}>"


def programs(backend: Any, count: int, seed: int, world: int, infers: bool) -> Iterator[Turn]:
    """So many turns: each form in a group of all and in one of one, before it comes again there.

    They are the same ones for the same seed.
    """
    dice = random.Random(seed)
    host = backend.device_type == "cpu"
    forms = [name for name, form in ALL_FORMS.items() if form.hosts or not host]
    queues: dict[int, list[str]] = {1: [], world: []}
    uses: collections.Counter[str] = collections.Counter()
    small = {size: _small_calls(dice, size, backend, host) for size in (1, world)}
    for number in range(count):
        team = TEAMS[number % len(TEAMS)]
        size = 1 if "alone" in team else world
        crowd = number % _CROWDS in (1, 3)  # of all, and of one
        calls = []
        for _ in range(_CROWD if crowd else dice.choice((2, 3, 3, 4))):
            if not queues[size]:
                able = [name for name in forms if size > 1 or not ALL_FORMS[name].paired]
                queues[size] = dice.sample(able, len(able))
            if crowd:
                calls.append(next(small[size]))
                continue
            name = queues[size].pop()
            calls.append(_call(dice, name, size, uses[name], backend, host))
            uses[name] += size > 1
        begun = dice.choice((0, 0, 1))
        yield Turn(
            team=team,
            calls=tuple(calls),
            begun=begun,
            waited=dice.choice((begun, 2 - begun)),
            thread=dice.random() < 0.2,
            mode=dice.choice(MODES if infers else MODES[:2]),
            slow=dice.choice((None, None, 0, 1)) if size > 1 else None,
            seed=dice.randrange(1 << 30),
        )


def _small_calls(dice: random.Random, size: int, backend: Any, host: bool) -> Iterator[Call]:
    """Small calls with handles: each operation in each dtype, by turns `all_reduce` and others."""
    pairs = [(o, d) for o, one in OPERATIONS.items() for d in one.dtypes]
    able = [pair for pair in pairs if backend.supports_dtype(pair[1])]
    pairs = dice.sample(able, len(able))
    able_forms = [name for name in _MANY if ALL_FORMS[name].hosts or not host]
    others = [name for name in able_forms if name != "all_reduce"]
    deck, rest = itertools.cycle(pairs), itertools.cycle(pairs[::-1])
    for name in itertools.cycle(one for other in others for one in ("all_reduce", other)):
        form = ALL_FORMS[name]
        shapes = [shape for shape in _SMALL if form.any_shape or shape]
        shapes = [shape for shape in shapes if form.any_shape or form.empty or 0 not in shape]
        call = _call(dice, name, size, 9, backend, host)
        call = dataclasses.replace(call, shape=dice.choice(shapes), wait="wait", refused=False)
        if form.operations:
            operation, dtype = next(deck if name == "all_reduce" else rest)
            unusual = _unusual(operation) if dtype.is_floating_point else ()
            call = dataclasses.replace(call, operation=operation, dtype=dtype, unusual=unusual)
        yield call


def _call(dice: random.Random, name: str, size: int, used: int, backend: Any, host: bool) -> Call:
    """A call of a form; at first of a tensor of some size, with the last rank as its root."""
    form = ALL_FORMS[name]
    operation, dtypes = "sum", [*form.dtypes, *form.rare]
    if form.operations:
        first = OPERATIONS["sum"] if not used else None
        operation = "sum" if first else dice.choice(form.operations)
        dtypes = list(first.needed if first else OPERATIONS[operation].dtypes)
    laid = (used in (1, 2) or (used > 2 and dice.random() < 0.4)) and (form.hosts_laid or not host)
    shapes: tuple[tuple[int, ...], ...]
    shapes = _LONG if not used else _LAID if laid and (form.laid or form.laid_out) else _SHAPES
    if used > 1 and shapes is _SHAPES and (form.any_shape or form.empty):
        shapes = (*_SHAPES, (0,), (2, 0), *[()] * form.any_shape)
    dtype = dice.choice([d for d in dtypes if backend.supports_dtype(d)])
    reduces = bool(form.operations) and dtype.is_floating_point
    return Call(
        form=name,
        dtype=dtype,
        shape=dice.choice(shapes),
        operation=operation,
        unusual=_unusual(operation) if reduces and used and dice.random() < 0.5 else (),
        layouts=_layouts(dice, form.laid and laid and used != 2, size, host),
        layouts_out=_layouts(dice, form.laid_out and laid and used != 1 and not host, size, host),
        offset=dice.choice((0, 0, 1, 3, 11, 59)),
        root=dice.randrange(size) if used > 1 else size - 1,
        by_group=(dice.random() < 0.5 if used > 1 else used == 0) and by_group_number(),
        wait=dice.choice(
            ("future", "then") if form.future and not used else (None, None, None, *_WAITS)
        ),
        refused=used == 0 or dice.random() < 0.2,
        reused=dice.random() < 0.5,
        seed=dice.randrange(1 << 30),
    )


def _unusual(operation: str) -> tuple[float, ...]:
    """Infinities where values are added or compared, and what is not a number where it counts."""
    if OPERATIONS[operation].high is not None:
        return ()
    infinities = (math.inf, -math.inf)
    return (*infinities, math.nan) if OPERATIONS[operation].unordered else infinities


def _layouts(dice: random.Random, laid: bool, size: int, host: bool) -> tuple[str, ...]:
    """One for all ranks, or another one for each; the host's own take the same dense one."""
    if not laid:
        return ("plain",) * size
    one = dice.choice(DENSE if host else LAYOUTS)
    if host or dice.random() < 0.3:
        return (one,) * size
    mixed = [one, *(dice.choice(("plain", *LAYOUTS)) for _ in range(size - 1))]
    return tuple(dice.sample(mixed, size))
