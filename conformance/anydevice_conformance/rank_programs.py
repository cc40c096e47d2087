"""Generated programs of collectives: groups that come and go, several calls at once, any handle."""

from __future__ import annotations

import collections
import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from anydevice_conformance.data import short_name
from anydevice_conformance.rank_form import by_group_number
from anydevice_conformance.rank_forms_rarer import ALL_FORMS

__all__ = ["MODES", "TEAMS", "Call", "Turn", "programs"]

_SHAPES: Final = ((3,), (1,), (5, 7), (2, 3, 4), (1001,), (2, 1, 2, 3), (4097,), (20_001,))
_LONG: Final = ((4097,), (8, 513))
#: Where a program takes place: the default group, one of all ranks or of this one that stays, and
#: one that is made for one turn.
TEAMS: Final = ("default", "all", "alone", "fresh", "fresh alone")
#: How a handle is waited for.
_WAITS: Final = ("wait", "future", "then", "completed")
MODES: Final = ("enable_grad", "no_grad", "inference_mode")


@dataclasses.dataclass(frozen=True)
class Call:
    """One collective of a turn.

    Attributes:
        form: a key of `ALL_FORMS`.
        dtype: of its tensors.
        shape: of each of a rank's tensors.
        transposed: whether its tensors are dense, and not contiguous.
        offset: elements before them in their storage.
        root: the number of the rank that sends to all or gets from all.
        by_group: whether it is its number in the group.
        wait: one of `_WAITS`; None without ``async_op``.
        refused: whether a wrong call goes before it, which each rank refuses.
        seed: of the values.
    """

    form: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    transposed: bool
    offset: int
    root: int
    by_group: bool
    wait: str | None
    refused: bool
    seed: int

    def __repr__(self) -> str:
        words = [f"{self.form} of {self.shape} {short_name(self.dtype)}, rank {self.root} first"]
        if self.transposed:
            words.append("transposed")
        if self.by_group:
            words.append("by its number in the group")
        if self.offset:
            words.append(f"{self.offset} elements into its storage")
        if self.wait is not None:
            words.append(f"with async_op ({self.wait})")
        if self.refused:
            words.append("after a call that is refused")
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
        words = [f"in the group {self.team!r}: {', '.join(map(repr, self.calls))}"]
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
    for number in range(count):
        team = TEAMS[number % len(TEAMS)]
        size = 1 if "alone" in team else world
        calls = []
        for _ in range(dice.choice((2, 3, 3, 4))):
            if not queues[size]:
                able = [name for name in forms if size > 1 or not ALL_FORMS[name].paired]
                queues[size] = dice.sample(able, len(able))
            name = queues[size].pop()
            calls.append(_call(dice, name, size, uses[name], backend.supports_dtype))
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


def _call(
    dice: random.Random,
    name: str,
    size: int,
    used: int,
    supports: Callable[[torch.dtype], bool],
) -> Call:
    """A call of a form; at first of a tensor of some size, with the last rank as its root."""
    form = ALL_FORMS[name]
    shapes = (*_SHAPES, (), (0,)) if form.any_shape else _SHAPES
    return Call(
        form=name,
        dtype=dice.choice([d for d in form.dtypes if supports(d)]),
        shape=dice.choice(shapes if used > 1 else _LONG),
        transposed=form.laid and (size == 1 or used == 1),
        offset=dice.choice((0, 0, 1, 3, 8)),
        root=dice.randrange(size) if used > 1 else size - 1,
        by_group=(dice.random() < 0.5 if used > 1 else used == 0) and by_group_number(),
        wait=dice.choice(("future", "then") if form.future and not used else (None, *_WAITS)),
        refused=used == 0 or dice.random() < 0.2,
        seed=dice.randrange(1 << 30),
    )
