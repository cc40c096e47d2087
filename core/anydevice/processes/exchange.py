"""Exchanges: all ranks compare what they are about to do, in the collective that carries the data.

Each call is one all-gather of small packets between the hosts, in a gloo group of its own, so that
other collectives of the program do not mix with it. A packet starts with a head of fixed size: a
digest of what the rank is about to do, its line of code, and a few bytes to tell the others. Host
tensors that are gathered follow in the same packet.

[Note: why ranks stay together] Every rank sends a packet of the same size, or gloo fails. The size
depends only on what all ranks know: the heads of earlier packets. A call is expected to bring as
many bytes as the call before it. A rank that brings another number sends the expected number
without content. Each rank then sees the heads of all. Where a digest differs, all ranks go to a
meeting at the store, which raises an error on each. Where the digests agree, the sizes agree too,
since the digest covers shapes and dtypes; all ranks see whether the data has come along, or needs
a second collective. No rank decides by what it alone knows.

The first call meets at the store, since making the group needs all ranks.
"""

from __future__ import annotations

import atexit
import datetime
import math
import struct
import time
from collections.abc import Sequence
from typing import Any, Final, NoReturn

import torch
import torch.distributed as dist

from anydevice.errors import MissingRankError, ProcessGroupError
from anydevice.processes.meeting import LOOK, Meetings
from anydevice.processes.saying import DIGEST, Said, digest_of

__all__ = ["Exchange"]

#: What torch's own type hints do not show of it.
_c10d: Any = dist
#: Bytes of a packet's head; a multiple of any dtype's size.
_HEAD: Final = 512
#: Its beginning: the digest, and how long the payload and the line are.
_FORM: Final = struct.Struct(f"<{DIGEST}sQH")
#: Bytes of a line of code; of a longer path the end is kept.
_LINE: Final = 160
#: Bytes of a payload that fit into the head.
_INSIDE: Final = _HEAD - _FORM.size - _LINE
#: Data travels along with the heads up to so many bytes of all ranks together.
_TOGETHER: Final = 4 << 20
#: Seconds to wait for what a rank that is gone has sent, and for a sign of which rank is gone.
_GRACE: Final = datetime.timedelta(seconds=1)
_SIGN: Final = 5.0
_LOOK: Final = datetime.timedelta(seconds=LOOK)
#: gloo's own limit must not come before ours, whose error names the ranks.
_LATER: Final = datetime.timedelta(minutes=1)


class Exchange:
    """The exchanges of one process group.

    Args:
        store: the group's.
        rank: of this process.
        size: of the group.
        limit: how long a rank waits for the others.
    """

    def __init__(self, store: Any, rank: int, size: int, limit: datetime.timedelta) -> None:
        # Before the interpreter ends, and after the meetings have told that this rank leaves: what
        # runs last was registered first.
        atexit.register(self._drop)
        self._meetings = Meetings(store, rank, size, limit)
        self._store, self._rank, self._size, self._limit = store, rank, size, limit
        self._group: Any = None
        self._expected = 0
        self._packets = _Packets(size, 0)

    def meet(
        self, call: str, description: Any = None, payload: bytes = b"", hint: str = ""
    ) -> list[bytes]:
        """Wait for all ranks, and see that they are here for the same; see `Meetings.meet`."""
        return self._call(call, description, payload, None, hint)[0]

    def gather(self, call: str, description: Any, data: torch.Tensor) -> torch.Tensor:
        """`meet`, and collect ``data`` of all ranks: in the same collective where it can be.

        Args:
            call: what this rank is about to do, such as ``"gather"``.
            description: must be equal on all ranks; equal ones have equally much data.
            data: bytes of this rank: one dimension of uint8 on the host.

        Returns:
            The bytes of each rank in a row, until the next call; rows need not stand side by side.

        Raises:
            CollectiveMismatchError: another rank does something else, or brings something else.
            MissingRankError: a rank did not come in time, has ended or died.
        """
        return self._call(call, description, b"", data)[1]

    def set_limit(self, limit: datetime.timedelta) -> None:
        """Wait so long for the others from here on."""
        self._limit = limit
        self._meetings.set_limit(limit)

    def lines(self) -> str:
        """What each rank did last: a line for each."""
        return self._meetings.lines()

    def leave(self) -> None:
        """Tell the others that this rank makes no more calls."""
        self._meetings.leave()
        self._drop()

    def _drop(self) -> None:
        """End the group, and the threads that work for it."""
        atexit.unregister(self._drop)
        self._group = None

    def _call(
        self,
        call: str,
        description: Any,
        payload: bytes,
        data: torch.Tensor | None,
        hint: str = "",
    ) -> tuple[list[bytes], torch.Tensor]:
        said = self._meetings.say(call, description, hint=hint)
        digest = digest_of(call, description)
        if self._group is None:
            self._meetings.hold(said, digest)
            self._group = self._join()
        if self._packets.room != self._expected:  # memory is kept: fresh pages cost time
            self._packets = _Packets(self._size, self._expected)
        packets, self._expected = self._packets, 0
        came_along = data is not None and data.numel() == packets.room
        line = said["line"].encode()[-_LINE:]
        inside = payload if len(payload) <= _INSIDE else b""
        head = _FORM.pack(digest, len(payload), len(line)) + line + inside
        packets.head[: len(head)] = head
        if data is not None and came_along:
            packets.body.copy_(data)
        self._all_gather(packets.mine, packets.everyone, said)
        if all(other[: len(head)] == head for other in packets.heads) and inside == payload:
            told = [payload] * self._size
            self._meetings.hear(said, [line] * self._size)
        else:
            told = self._compare(said, digest, payload)
        if data is None:
            return told, packets.bodies
        if data.numel() * self._size <= _TOGETHER:
            self._expected = data.numel()
        if came_along:
            return told, packets.bodies
        return told, self._all_gather(data, _empty(self._size, data.numel()), said)

    def _compare(self, said: Said, digest: bytes, payload: bytes) -> list[bytes]:
        """What each rank told, where heads differ."""
        heads = [bytes(head) for head in self._packets.heads]
        if any(other[:DIGEST] != digest for other in heads):
            self._meetings.hold(said, digest)
            raise ProcessGroupError(
                f"rank {self._rank}: packets of {said['call']} differ, and calls agree"
            )
        found = [_FORM.unpack_from(each) for each in heads]
        ends = [_FORM.size + length for _, _, length in found]
        self._meetings.hear(said, [h[_FORM.size : e] for h, e in zip(heads, ends, strict=True)])
        sizes = [size for _, size, _ in found]
        if max(sizes) > _INSIDE:
            return self._long(payload, sizes, said)
        return [h[e : e + s] for h, e, s in zip(heads, ends, sizes, strict=True)]

    def _long(self, payload: bytes, sizes: list[int], said: Said) -> list[bytes]:
        """Payloads that do not fit into the heads: equally many bytes from each rank."""
        padded = _empty(max(sizes))
        _memory(padded)[: len(payload)] = payload
        everyone = self._all_gather(padded, _empty(self._size, max(sizes)), said)
        return [everyone[rank, :size].numpy().tobytes() for rank, size in enumerate(sizes)]

    def _join(self) -> Any:
        store = _c10d.PrefixStore("exchange", self._store)
        try:
            return _c10d.ProcessGroupGloo(store, self._rank, self._size, self._limit + _LATER)
        except (AttributeError, RuntimeError) as error:
            raise ProcessGroupError(
                f"rank {self._rank}: the host's collectives (gloo) do not start: {error!s:.300}. "
                "Use a torch that has gloo; where the host has several networks, name the one "
                "between the ranks in GLOO_SOCKET_IFNAME"
            ) from error

    def _all_gather(self, mine: torch.Tensor, everyone: torch.Tensor, said: Said) -> torch.Tensor:
        if not mine.numel():
            return everyone
        try:
            work = self._group._allgather_base(everyone.view(-1), mine)
            if not _is_done(work, _LOOK):
                self._wait(work, said)
        except RuntimeError as error:
            if isinstance(error, ProcessGroupError):
                raise
            self._lost(said, error)
        return everyone

    def _wait(self, work: Any, said: Said) -> None:
        start = time.monotonic()
        notice = start + self._meetings.notice_after
        with self._meetings.served(said):
            while True:
                missing = self._meetings.wait_here(said)
                gone = self._gone(said)
                late = time.monotonic() - start > self._limit.total_seconds()
                if _is_done(work, _GRACE if gone else _LOOK):
                    return
                if gone or late:
                    self._stop(sorted({*gone} if gone else missing), gone, said)
                if time.monotonic() > notice:
                    notice = math.inf
                    self._meetings.notice(missing, said)

    def _gone(self, said: Said) -> dict[int, str]:
        others = (rank for rank in range(self._size) if rank != self._rank)
        reasons = {rank: self._meetings.why_gone(rank, said["number"]) for rank in others}
        return {rank: why for rank, why in reasons.items() if why}

    def _lost(self, said: Said, error: RuntimeError) -> NoReturn:
        """Say who has ended, where gloo says only that a connection has."""
        deadline = time.monotonic() + _SIGN
        with self._meetings.served(said):
            gone = self._gone(said)
            while not gone and time.monotonic() < deadline:
                time.sleep(0.05)
                gone = self._gone(said)
            if gone:
                self._stop(sorted(gone), gone, said, error)
            lines = self.lines()
            self._meetings.stop(said)
        raise MissingRankError(
            f"{said['call']} on rank {self._rank} of {self._size} lost the connection to another "
            f"rank: {error!s:.300}\n{lines}"
        ) from error

    def _stop(
        self,
        missing: Sequence[int],
        gone: dict[int, str],
        said: Said,
        cause: Exception | None = None,
    ) -> NoReturn:
        # The store may end as soon as all have stopped: what the message needs of it comes first.
        error = self._meetings.missing(missing, gone, said)
        self._meetings.stop(said)
        raise error from cause


class _Packets:
    """The memory of packets with room for so many bytes of data, and views of its parts."""

    def __init__(self, size: int, room: int) -> None:
        self.room = room
        self.mine = _empty(_HEAD + room)
        self.head = _memory(self.mine)[:_HEAD]
        self.body = self.mine[_HEAD:]
        self.everyone = _empty(size, _HEAD + room)
        self.heads = [_memory(row)[:_HEAD] for row in self.everyone.unbind()]
        self.bodies = self.everyone[:, _HEAD:]


def _empty(*shape: int) -> torch.Tensor:
    with torch.inference_mode(False):  # what is made within it cannot be written to outside
        return torch.empty(shape, dtype=torch.uint8, device="cpu")


def _memory(tensor: torch.Tensor) -> memoryview:
    array: Any = tensor.numpy()
    return memoryview(array)


def _is_done(work: Any, limit: datetime.timedelta) -> bool:
    """Wait so long at most. Raises the error of work that has failed."""
    try:
        work.wait(limit)
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()
    return True
