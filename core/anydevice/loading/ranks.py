"""The ranks of the default process group: they tell each other how each step of a load went."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any, Final

import torch
import torch.distributed as dist

from anydevice.devices import CPU, Device
from anydevice.errors import AnyDeviceError, CheckpointError, ModelError, ProcessGroupError
from anydevice.interrupts import Interrupted, check
from anydevice.processes.meeting import Meetings

__all__ = ["Ranks", "connected", "pending_interrupt"]

#: What torch's own type hints do not show of it.
_c10d: Any = dist
#: Characters of an error that the other ranks get.
_LONGEST_REASON: Final = 2000
#: In place of a reason: the fault is another rank's.
_LOST: Final = "lost"


class Ranks:
    """The default process group, as loading uses it.

    Raises:
        ModelError: there is none.
    """

    #: The meetings of each group; their numbers go on from one load to the next.
    _meetings: Final[weakref.WeakKeyDictionary[Any, Meetings]] = weakref.WeakKeyDictionary()

    def __init__(self, line: str) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ModelError(
                "broadcast_from_rank0 needs a process group: call "
                "torch.distributed.init_process_group on every rank first, or load without it"
            )
        self.rank = dist.get_rank()
        self.device = _message_device()
        self._line = line
        group: Any = dist.group.WORLD
        if group not in self._meetings:
            store = _c10d.distributed_c10d._get_default_store()
            store = _c10d.PrefixStore("anydevice-load", store)
            size = dist.get_world_size()
            self._meetings[group] = Meetings(store, self.rank, size, store.timeout)
        self._meeting = self._meetings[group]

    @contextlib.contextmanager
    def step(self, what: str) -> Iterator[None]:
        """A step that may fail on some ranks. At its end all ranks know.

        Raises:
            CheckpointError: it failed on another rank.
            MissingRankError: another rank did not come in time, or has ended.
        """
        try:
            yield
        except BaseException as error:
            self._conclude(what, error)
            raise
        self._conclude(what, None)

    def _conclude(self, what: str, error: BaseException | None) -> None:
        """Tell the other ranks how a step went here, and hear how it went there."""
        interrupt = None if error is not None else pending_interrupt()
        mine = error or interrupt
        reason = "" if mine is None else f"{type(mine).__name__}: {mine}"
        if isinstance(mine, Interrupted):
            reason = "it was interrupted"
        is_lost = isinstance(mine, _ConnectionLostError)
        try:
            answers = self.tell(what, _LOST if is_lost else reason)
        except (ProcessGroupError, _ConnectionLostError):
            if mine is None or is_lost:
                raise
            answers = []
        if interrupt is not None:
            raise interrupt
        if mine is None or is_lost:
            for rank, answer in enumerate(answers):
                if answer not in ("", _LOST):
                    raise CheckpointError(
                        f"rank {rank} could not {what}: {answer}. The models of all ranks are "
                        "unchanged."
                    )

    def tell(self, what: str, reason: str) -> list[str]:
        """Tell all ranks why this one failed (empty: it did not), and hear the same of them."""
        with connected():
            found = self._meeting.meet(
                f"load_checkpoint_in_model: {what}",
                payload=reason[:_LONGEST_REASON].encode(errors="replace"),
                line=self._line,
            )
        return [answer.decode() for answer in found]

    def any(self, flags: torch.Tensor) -> torch.Tensor:
        """Flags (uint8) that are set on any rank."""
        flags = flags.to(self.device.torch)
        with connected():
            dist.all_reduce(flags, dist.ReduceOp.MAX)
        return flags.cpu()

    def send(self, tensor: torch.Tensor) -> None:
        """Send rank 0's contiguous tensor into those of the others, of any dtype."""
        with connected():
            dist.broadcast(tensor.view(-1).view(torch.uint8), src=0)


class _ConnectionLostError(CheckpointError):
    """A collective failed, since a rank has ended or the network failed."""


@contextlib.contextmanager
def connected() -> Iterator[None]:
    """Give errors of torch's collectives, made inside, words of our own."""
    try:
        yield
    except AnyDeviceError:
        raise
    except RuntimeError as error:
        raise _ConnectionLostError(
            f"load_checkpoint_in_model lost the connection to another rank: {error!s:.300}"
        ) from error


def pending_interrupt() -> BaseException | None:
    """What to raise when the caller was interrupted; None when it was not."""
    try:
        check()
    except Interrupted as error:
        return error
    return None


def _message_device() -> Device:
    """The host, where the group's backend can send from it; else its own device."""
    config = str(dist.get_backend_config())
    kinds = [pair.partition(":")[0] for pair in config.split(",")]
    if CPU.type in kinds or not kinds:
        return CPU
    module: Any = torch.get_device_module(kinds[0])
    return Device(kinds[0], int(module.current_device()))
