"""Generated collectives in each of the processes: all do the same ones, and judge them."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from anydevice_conformance.data import same_bits, short_name
from anydevice_conformance.rank_kinds import KINDS
from anydevice_conformance.rank_values import difference, says_unsupported, values

__all__ = ["Collective", "collectives", "try_all"]

#: Odd ones, ones next to powers of two, and one above 4 MiB in every dtype of 4 bytes: by turns a
#: large one and a small one, so that each kind is tried with both.
_COUNTS: Final = (
    (65_537, 300_001, 1_048_583, 150_001),
    (1, 2, 3, 7, 64, 65, 1000, 4096, 4097, 20_001),
)
#: So many times an element of 8 bytes is there at once, in the widest of them.
_COPIES: Final = 20
#: What a collective must leave alone, before and behind its tensors.
_MARGIN: Final = 5


@dataclasses.dataclass(frozen=True)
class Collective:
    """One generated collective.

    Attributes:
        kind: a key of `KINDS`.
        dtype: of its tensors.
        count: elements of a rank's tensor.
        offset: elements before it in its storage.
        side_stream: whether it is called on another stream than the default one.
        slow: the rank that comes late; None for none.
        twice: whether it is called twice in a row on the same memory.
        waited: whether it is started with ``async_op`` and waited for.
        seed: of the values.
    """

    kind: str
    dtype: torch.dtype
    count: int
    offset: int
    side_stream: bool
    slow: int | None
    twice: bool
    waited: bool
    seed: int

    def __repr__(self) -> str:
        words = [f"{self.kind} of {self.count} {short_name(self.dtype)}"]
        if self.offset:
            words.append(f"{self.offset} elements into its storage")
        if self.side_stream:
            words.append("on a side stream")
        if self.slow is not None:
            words.append(f"rank {self.slow} comes late")
        if self.twice:
            words.append("twice in a row")
        if self.waited:
            words.append("with async_op")
        return f"<{', '.join(words)}>"


def collectives(
    supports: Callable[[torch.dtype], bool], count: int, seed: int, room: int
) -> list[Collective]:
    """Each kind in each dtype, and so many more, each kind in turn.

    They are the same ones for the same seed and room.
    """
    dice = random.Random(seed)
    names = list(KINDS)
    most = room // (8 * _COPIES)

    def one(number: int) -> Collective:
        turn, place = divmod(number, len(names))
        kind = names[place]
        return Collective(
            kind=kind,
            dtype=dice.choice([d for d in KINDS[kind].dtypes if supports(d)]),
            count=min(dice.choice(KINDS[kind].counts or _COUNTS[turn % 2]), most),
            offset=dice.choice((0, 0, 1, 3, 8)),
            side_stream=dice.random() < 0.4,
            slow=dice.choice((None, None, 0, 1)),
            twice=turn % 2 == 1 or dice.random() < 0.2,  # small ones always
            waited=dice.random() < 0.3 and kind != "send",
            seed=dice.randrange(1 << 30),
        )

    return [*_each(supports), *(one(number) for number in range(count))]


def _each(supports: Callable[[torch.dtype], bool]) -> Iterator[Collective]:
    """Each kind in each dtype, of few elements."""
    pairs = [(name, kind, dtype) for name, kind in KINDS.items() for dtype in kind.dtypes]
    for number, (name, kind, dtype) in enumerate(pairs):
        counts = kind.counts or (33, 8)
        if supports(dtype):
            yield Collective(
                kind=name,
                dtype=dtype,
                count=counts[number % len(counts)],
                offset=number % 2,
                side_stream=False,
                slow=None,
                twice=number % 3 == 0,
                waited=number % 4 == 1 and name != "send",
                seed=number,
            )


def try_all(
    backend: Any,
    device: torch.device,
    rank: int,
    world: int,
    count: int,
    seed: int,
    room: int,
) -> dict[str, str]:
    """Do them all; returns by paragraph what went wrong with the smallest that did, or nothing.

    An exception ends it: the ranks are no longer in step.
    """
    failed: dict[str, tuple[int, str]] = {}
    stream = None
    if device.type != "cpu" and backend.capabilities.streams:
        stream = backend.new_stream(device.index)
    for collective in collectives(backend.supports_dtype, count, seed, room):
        paragraph = KINDS[collective.kind].paragraph
        try:
            wrong = _try(backend, device, stream, rank, world, collective)
        except Exception as error:  # noqa: BLE001 - reported
            if not KINDS[collective.kind].needed and says_unsupported(error):
                continue
            failed[paragraph] = (0, f"{type(error).__name__}: {error!s:.300}\n{_shown(collective)}")
            break
        if wrong and failed.get(paragraph, (collective.count + 1, ""))[0] > collective.count:
            failed[paragraph] = (collective.count, f"{wrong}\n{_shown(collective)}")
    return {paragraph: text for paragraph, (_, text) in failed.items()}


def _shown(collective: Collective) -> str:
    return f"counterexample: {collective!r}"


def _try(
    backend: Any, device: torch.device, stream: Any, rank: int, world: int, collective: Collective
) -> str:
    kind = KINDS[collective.kind]
    rounds = 2 if collective.twice else 1
    inputs = [
        [
            values(
                collective.dtype,
                collective.count,
                KINDS[collective.kind].summed,
                collective.seed + 7 * r + n,
            )
            for r in range(world)
        ]
        for n in range(rounds)
    ]
    if collective.slow == rank:
        time.sleep(0.01 if collective.seed % 4 else 0.1)
    on_side = collective.side_stream and stream is not None
    with backend.use_stream(stream) if on_side else contextlib.nullcontext():
        size = collective.offset + collective.count + _MARGIN
        storage = torch.zeros(size, dtype=collective.dtype).to(device)
        tensor = storage[collective.offset : collective.offset + collective.count]
        results = []
        for number in range(rounds):
            # Queued work makes the input, and the output is used by work queued next.
            tensor.copy_(inputs[number][rank].to(device).clone())
            work, result = kind.call(tensor, rank, world, collective.waited)
            if collective.waited and work is not None:
                work.wait()
            results.append(result.clone())
        found = [result.cpu() for result in results]
        around = torch.cat([storage[: collective.offset], storage[-_MARGIN:]]).cpu()
    for number, one in enumerate(found):
        wanted = kind.expected(inputs[number], rank)
        if not same_bits(one, wanted):
            return f"rank {rank} has {difference(one, wanted)}"
    if around.any():
        return f"rank {rank}: memory next to the tensor was written to"
    return ""
