"""Meetings: before a collective, all ranks compare what each is about to do.

A collective that not every rank makes, or that ranks make with different shapes, hangs or crashes
in most libraries. Here each rank first puts a few bytes into the store that the group shares, and
reads those of the others: no work on the device. What differs is an error on every rank, which
names each rank's line of code. A rank that does not come within the time allowed, has ended or has
died is an error on all that wait for it. `Exchange` is the quick way; it comes here where ranks
differ, and for what a rank that waits can learn of the others.

The host polls rather than waits at the store: a wait that ends without an answer is logged by torch
as a fault, and a rank that is a second late is none.

[Note: what stays in the store] Each meeting has a number, the same on all ranks, and one key a
rank. A rank at meeting n has seen all keys of n-1, so every rank has finished reading those of
n-2: each deletes its own then. What a rank is doing, for messages, is two keys a rank, written in
turn: while one rank still reads of meeting n, another is at n+1, and not farther.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import json
import logging
import math
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Final, NoReturn

import torch.distributed as dist

from anydevice.errors import CollectiveMismatchError, MissingRankError
from anydevice.processes.living import has_died, this_process
from anydevice.processes.saying import DIGEST, Said, calling_line, digest_of, show

__all__ = ["LOOK", "Meetings"]

#: What torch's own type hints do not show of it.
_c10d: Any = dist
#: How often, in seconds, a waiting rank looks whether the missing ones are alive.
LOOK: Final = 0.5
#: A waiting rank sleeps for this part of the time waited, and for so many seconds at most.
_PART: Final = 0.05
_LONGEST: Final = 0.02
#: How long, in seconds, a rank that leaves waits for the others to have read what it said last.
_LEAVE_LIMIT: Final = 5.0
_LEFT: Final = "left"
_SAME_CALLS: Final = (
    "Each rank must make the same calls in the same order: look for a call inside an `if` "
    "that is true on some ranks only, such as `if is_main_process`."
)
_logger: Final = logging.getLogger(__name__)


class Meetings:
    """The meetings of one process group.

    Args:
        store: the group's.
        rank: of this process.
        size: of the group.
        limit: how long a rank waits for the others.
    """

    #: After how many seconds a waiting rank says for whom it waits.
    notice_after: ClassVar[float] = 30.0

    def __init__(self, store: Any, rank: int, size: int, limit: datetime.timedelta) -> None:
        self._store = _c10d.PrefixStore("meetings", _own_connection(store))
        self._rank, self._size, self._limit = rank, size, limit
        self._number = self._calls = 0
        self._has_stopped = False
        self._heard: tuple[Said, Sequence[bytes]] = ({}, [b""] * size)
        self._store.set(f"host/{rank}", this_process())
        atexit.register(self.leave)

    def set_limit(self, limit: datetime.timedelta) -> None:
        """Wait so long for the others from here on."""
        self._limit = limit

    def meet(
        self,
        call: str,
        description: Any = None,
        payload: bytes = b"",
        line: str | None = None,
        hint: str = "",
    ) -> list[bytes]:
        """Wait for all ranks, and see that they are here for the same.

        Args:
            call: what this rank is about to do, such as ``"gather"``.
            description: plain data that must be equal on all ranks, such as shapes.
            payload: a few bytes to tell the others, such as sizes that may differ.
            line: of the user's code, for messages; None: the caller's.
            hint: what else helps where not all ranks make this call; every rank's error says it.

        Returns:
            What each rank told, in order.

        Raises:
            CollectiveMismatchError: another rank does something else, or brings something else.
            MissingRankError: a rank did not come in time, has ended or died.
        """
        said = self.say(call, description, line, hint)
        return self.hold(said, digest_of(call, description), payload)

    def say(
        self, call: str, description: Any = None, line: str | None = None, hint: str = ""
    ) -> Said:
        """What this rank does next, in words; counts it."""
        self._calls += 1
        said = {"number": self._calls, "call": call, "line": line or calling_line()}
        return {**said, "brings": description, **({"hint": hint} if hint else {})}

    def hold(self, said: Said, digest: bytes, payload: bytes = b"") -> list[bytes]:
        """`meet`, for what `say` gave."""
        self._number += 1
        number, store = self._number, self._store
        with self.served(said):
            store.set(f"at/{self._rank}/{number % 2}", json.dumps(said, default=repr))
            store.set(f"{number}/{self._rank}", digest + payload)
            if number > 2:
                store.delete_key(f"{number - 2}/{self._rank}")
            found = self._wait([f"{number}/{rank}" for rank in range(self._size)], said)
            store.set(f"read/{self._rank}", str(number))
        if any(other[:DIGEST] != digest for other in found):
            self._disagree(said)
        return [other[DIGEST:] for other in found]

    def hear(self, said: Said, lines: Sequence[bytes]) -> None:
        """All ranks did the same without a meeting: keep their lines, for messages."""
        self._heard = (said, lines)

    def leave(self) -> None:
        """Tell the others that this rank makes no more calls.

        The store may end with this process, so it first waits for the others to have read what
        was said at the last meeting, or to have stopped too where this rank has: for those that
        live, and 5 seconds at most.
        """
        atexit.unregister(self.leave)
        with contextlib.suppress(RuntimeError):  # the store is gone already, and so all know
            self._store.set(f"{_LEFT}/{self._rank}", f"{self._calls} has left the group")
            deadline = time.monotonic() + _LEAVE_LIMIT
            for rank in range(self._size):
                while not self._has_read(rank) and time.monotonic() < deadline:
                    time.sleep(_LONGEST)

    def _has_read(self, rank: int) -> bool:
        """Whether a rank needs nothing more of what was said here; also one that is gone."""
        if rank == self._rank or self._number == 0:
            return True
        return bool(self.why_gone(rank)) or (
            not self._has_stopped
            and self._store.check([f"read/{rank}"])
            and int(self._store.get(f"read/{rank}")) >= self._number
        )

    def _wait(self, keys: list[str], said: Said) -> list[bytes]:
        start = look = time.monotonic()
        notice = start + self.notice_after
        while not self._store.check(keys):
            now = time.monotonic()
            if now > notice:
                notice = math.inf
                self.notice([r for r, key in enumerate(keys) if not self._store.check([key])], said)
            if now - look > LOOK or now - start > self._limit.total_seconds():
                look = now
                self._look(keys, said, late=now - start > self._limit.total_seconds())
            time.sleep(min(_LONGEST, _PART * (now - start)))
        found: list[bytes] = self._store.multi_get(keys)
        return found

    @contextlib.contextmanager
    def served(self, said: Said) -> Iterator[None]:
        """Say who has ended where the store is gone."""
        try:
            yield
        except dist.DistNetworkError as error:
            by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
            raise MissingRankError(
                f"rank {self._rank} at {said['line']} ({said['call']}): the store that the ranks "
                f"share is gone: {'the launcher' if by_agent else 'rank 0'}, which served it, has "
                f"ended: {error!s:.200}"
            ) from error

    def notice(self, missing: Sequence[int], said: Said) -> None:
        """Say for whom this rank waits: long before the error, which comes at the group's limit."""
        _logger.warning(
            "rank %d has waited %g s in %s for rank %s, and goes on waiting for %g s.\n%s\n%s",
            self._rank,
            self.notice_after,
            said["call"],
            ", ".join(map(str, missing)),
            max(0.0, self._limit.total_seconds() - self.notice_after),
            self.lines(),
            _SAME_CALLS + self._hints(),
        )

    def _look(self, keys: list[str], said: Said, *, late: bool) -> None:
        missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        gone = {rank: why for rank in missing if (why := self.why_gone(rank))}
        missing = [rank for rank in missing if not self._store.check([keys[rank]])]
        gone = {rank: why for rank, why in gone.items() if rank in missing}  # it came, then left
        if missing and (gone or late):
            # Whoever comes later must not believe that this rank takes part.
            self._store.set(keys[self._rank], b"gave up")
            raise self.missing(missing, gone, said)

    def why_gone(self, rank: int, number: int | None = None) -> str:
        """Why a rank will never come, to call ``number``; empty while it may, or has come."""
        if self._store.check([f"{_LEFT}/{rank}"]):
            last, _, why = self._store.get(f"{_LEFT}/{rank}").decode().partition(" ")
            return why if number is None or int(last) < number else ""
        if not self._store.check([f"host/{rank}"]):
            return ""
        return "has died" if has_died(self._store.get(f"host/{rank}").decode()) else ""

    def wait_here(self, said: Said) -> list[int]:
        """Tell those who ask that this rank waits at a call. Returns who does not."""
        self._store.set(f"waits/{self._rank}", json.dumps(said, default=repr))
        waiting = (self._read(f"waits/{rank}").get("number") for rank in range(self._size))
        return [rank for rank, number in enumerate(waiting) if number != said["number"]]

    def stop(self, said: Said) -> None:
        """Tell the others that this rank waits no more, and makes no call together with them."""
        self._has_stopped = True
        self._store.set(f"{_LEFT}/{self._rank}", f"{said['number'] - 1} gave up waiting")

    def missing(self, missing: Sequence[int], gone: dict[int, str], said: Said) -> MissingRankError:
        """The error that names those who are missing, and why."""
        late = f"did not come within {self._limit.total_seconds():g} s"
        who = ", ".join(f"rank {rank} {gone.get(rank, late)}" for rank in missing)
        return MissingRankError(
            f"{said['call']} needs all {self._size} ranks, and {who}.\n{self.lines()}\n"
            f"{_SAME_CALLS}{self._hints()}"
        )

    def _disagree(self, said: Said) -> NoReturn:
        number = said["number"]
        calls = {self._doing(rank, number).get("call") for rank in range(self._size)}
        what = (
            "the ranks make different calls"
            if len(calls) > 1
            else f"the ranks call {said['call']} with different data"
        )
        raise CollectiveMismatchError(
            f"{what} (this is rank {self._rank}):\n{self.lines(number)}\n"
            "Each rank must make the same calls with the same structure, shapes and dtypes. "
            "Tensors that differ in length: pad_across_processes first, or gather_object."
            f"{self._hints(number)}"
        )

    def lines(self, number: int | None = None) -> str:
        """What each rank did at a meeting, or did last: a line for each."""
        return "\n".join(
            f"  rank {rank}: {show(self._doing(rank, number))}" for rank in range(self._size)
        )

    def _hints(self, number: int | None = None) -> str:
        """What else helps, as the ranks say it: a line for each that is different."""
        said = [self._doing(rank, number).get("hint", "") for rank in range(self._size)]
        return "".join(f"\n{hint}" for hint in dict.fromkeys(said) if hint)

    def _doing(self, rank: int, number: int | None = None) -> Said:
        keys = (f"at/{rank}/0", f"at/{rank}/1", f"waits/{rank}")
        heard, lines = self._heard
        together = heard and {**heard, "line": lines[rank].decode(errors="replace")}
        found = [together, *map(self._read, keys)]
        known = [doing for doing in found if doing and number in (None, doing["number"])]
        return max(known, key=lambda doing: doing["number"], default={})

    def _read(self, key: str) -> Said:
        said: Said = json.loads(self._store.get(key)) if self._store.check([key]) else {}
        return said


def _own_connection(store: Any) -> Any:
    """A connection of our own: one that waits blocks all other users."""
    with contextlib.suppress(Exception):  # older versions of torch, and files, have no clone
        return store.clone()
    return store
