"""Faults of collectives: of the host's, since it has some."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from mutants.gallery import Fault, mutant, patched


class _Collective(Fault):
    """Changes one function of torch.distributed, in the processes of the check."""

    function = ""

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Do it wrong."""
        raise NotImplementedError

    def patches(self) -> list[Any]:
        def change(real: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args, **kwargs: self.changed(real, *args, **kwargs)

        return [patched(dist, self.function, change)]


@mutant("COL-001", base="cpu")
class UnknownName(Fault):
    """The backend that is named is not there."""

    collective_backend = "foccl"


@mutant("COL-001", base="cpu", check="test_COL_001_members")
class NamesMoreOnceStarted(Fault):
    """What the collectives are called depends on whether they are started."""

    @property
    def collective_backend(self) -> str | None:  # type: ignore[override]
        named = super().collective_backend
        return f"cpu:{named}" if dist.is_initialized() else named


@mutant("COL-002", base="cpu")
class Averages(_Collective):
    """`all_reduce` averages."""

    function = "all_reduce"

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        if args[0].numel() > 1:
            args[0].copy_((args[0].double() / 2).to(args[0].dtype))
        return result


@mutant("COL-002", base="cpu")
class IntegersAreNotReduced(_Collective):
    """`all_reduce` leaves int64 as it is."""

    function = "all_reduce"

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return None if args[0].dtype is torch.int64 else real(*args, **kwargs)


@mutant("COL-003", base="cpu")
class BroadcastsASum(_Collective):
    """`broadcast` is a sum with zeros: negative zeros are lost."""

    function = "broadcast"

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        real(*args, **kwargs)
        args[0].add_(0.0)


@mutant("COL-003", base="cpu")
class BroadcastsTheLast(_Collective):
    """`broadcast` sends the last rank's values."""

    function = "broadcast"

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return real(args[0], src=dist.get_world_size() - 1)


@mutant("COL-004", base="cpu")
class GathersBackwards(_Collective):
    """`all_gather` gives the pieces in reverse order."""

    function = "all_gather"

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return real(args[0][::-1], *args[1:], **kwargs)


@mutant("COL-005", base="cpu")
class BarrierIsOpen(_Collective):
    """`barrier` does not wait."""

    function = "barrier"

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return None


@mutant("COL-005", base="cpu")
class OnlyTheFirstBarrier(_Collective):
    """`barrier` waits the first time only."""

    function = "barrier"
    entered = False

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.entered:
            return None
        self.entered = True
        return real(*args, **kwargs)


@mutant("COL-006", base="cpu")
class ReducedLate(_Collective):
    """`all_reduce` returns before the result is there, and nothing waits for it."""

    function = "all_reduce"

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if args[0].numel() < 10_000:
            return real(*args, **kwargs)
        result = args[0].clone()
        real(result)

        def deliver() -> None:
            time.sleep(0.2)
            args[0].copy_(result)

        threading.Thread(target=deliver).start()
        return None


@mutant("COL-007", base="cpu")
class ScattersTheFirstPart(_Collective):
    """`reduce_scatter_tensor` gives every rank the first part."""

    function = next(
        n for n in ("reduce_scatter_single", "reduce_scatter_tensor") if hasattr(dist, n)
    )

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        dist.broadcast(args[0], src=0)
        return result


@mutant("COL-008", base="cpu")
class GathersIntoReverse(_Collective):
    """`all_gather_into_tensor` puts the pieces in reverse order."""

    function = (
        "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    )

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        args[0].copy_(args[0].reshape(dist.get_world_size(), -1).flip(0).reshape(args[0].shape))
        return result


@mutant("COL-009", base="cpu")
class ReceivesASum(_Collective):
    """`recv` adds to what was there: negative zeros are lost."""

    function = "recv"

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        args[0].add_(0.0)
        return result


@mutant("COL-010", base="cpu")
class ObjectsStayAtHome(_Collective):
    """`all_gather_object` gives each rank only its own object."""

    function = "all_gather_object"

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        args[0][:] = [args[1]] * len(args[0])


@mutant("COL-011", base="cpu")
class GoesOnAlone(_Collective):
    """A collective that failed is taken for one that succeeded."""

    function = "all_reduce"

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return real(*args, **kwargs)
        except RuntimeError:
            return None


@mutant("COL-012", base="cpu")
class LastOfAnOddSumIsLost(_Collective):
    """Above 64 KiB `all_reduce` leaves out the last element of an odd number."""

    function = "all_reduce"

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        tensor = args[0]
        if tensor.nbytes <= 1 << 16 or tensor.numel() % 2 == 0:
            return real(*args, **kwargs)
        last = tensor[-1].clone()
        result = real(*args, **kwargs)
        tensor[-1] = last
        return result


@mutant("COL-012", base="cpu")
class BroadcastsTheFirst(_Collective):
    """`broadcast` sends rank 0's values, whichever rank is the source."""

    function = "broadcast"

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return real(args[0], src=0, async_op=kwargs.get("async_op", False))


@mutant("COL-005", base="cpu")
class GroupsDoNotWait(_Collective):
    """The barrier of a group that was made later does not wait."""

    function = "barrier"

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        group = args[0] if args else kwargs.get("group")
        return real(*args, **kwargs) if group is None else None


class _Handle:
    """A handle that passes on what it is asked, but for what a fault changes."""

    def __init__(self, work: Any, **changed: Callable[..., Any]) -> None:
        self._work = work
        vars(self).update(changed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


@mutant("COL-005", base="cpu")
class BarriersHandleIsDone(_Collective):
    """The handle of a barrier does not wait."""

    function = "barrier"

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        work = real(*args, **kwargs)
        return None if work is None else _Handle(work, wait=lambda *_: True)


@mutant("COL-012", base="cpu")
class BeginsWhenWaitedFor(_Collective):
    """`all_reduce` with a handle begins when it is waited for."""

    function = "all_reduce"

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("async_op"):
            return real(*args, **kwargs)
        begun: list[Any] = []

        def wait(*_: Any) -> bool:
            if not begun:
                begun.append(real(*args, **kwargs))
            return bool(begun[0].wait())

        return _Handle(None, wait=wait)


@mutant("COL-013", base="cpu")
class CompletedAtOnce(_Collective):
    """A handle says that it is completed from the beginning."""

    function = "all_reduce"

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        work = real(*args, **kwargs)
        return None if work is None else _Handle(work, is_completed=lambda: True)


@mutant("COL-013")
class MeanOfTheWorld(_Collective):
    """The mean of a smaller group divides by the number of all ranks."""

    function = "all_reduce"

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        work, group = real(*args, **kwargs), kwargs.get("group")
        if kwargs.get("op") == dist.ReduceOp.AVG and group is not None:
            if work is not None:
                work.wait()
            args[0].mul_(dist.get_world_size(group) / dist.get_world_size())
        return work


@mutant("COL-013", base="cpu")
class RootOfTheGroupIsIgnored(_Collective):
    """`broadcast` sends rank 0's values, where the root's number in the group is given."""

    function = "broadcast"

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return real(*args, **{**kwargs, **({"group_src": 0} if "group_src" in kwargs else {})})


@mutant("COL-013")
class DoesNotStack(_Collective):
    """`all_gather_into_tensor` takes no result with a dimension for the ranks."""

    function = "all_gather_into_tensor"

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if args[0].dim() != args[1].dim():
            raise ValueError("the result must have as many dimensions as the tensor")
        return real(*args, **kwargs)


@mutant("COL-013", base="cpu")
class FutureHoldsTheInput(_Collective):
    """The future of a handle holds what was put in."""

    function = "all_reduce"

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result([args[0].clone()] if kwargs.get("async_op") else [])
        work = real(*args, **kwargs)
        return None if work is None else _Handle(work, get_future=lambda: future)


@mutant("COL-013", base="cpu")
class ReceivesInReverse(_Collective):
    """`batch_isend_irecv` receives two messages from one rank in reverse."""

    function = "batch_isend_irecv"

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        received = [one for one in args[0] if one.op is dist.irecv]
        return real([received.pop() if one.op is dist.irecv else one for one in args[0]])


@mutant("COL-013", base="cpu")
class WrongAfterARefusal(_Collective):
    """After wrong arguments were refused, the next pieces come in reverse order."""

    function = "all_gather"
    refused = False

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        pieces = args[0][::-1] if self.refused else args[0]
        self.refused = True
        work = real(pieces, *args[1:], **kwargs)
        self.refused = False
        return work


@mutant("COL-013", base="cpu")
class GroupsRunOut(_Collective):
    """A process makes twelve groups in its life, also where it destroyed the others."""

    function = "new_group"
    made = 0

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.made += 1
        if self.made > 12:
            raise RuntimeError("no communicator is left")
        return real(*args, **kwargs)


_held: list[torch.Tensor] = []


@mutant("COL-014")
class KeepsResults(_Collective):
    """`all_gather_into_tensor` keeps its results for ever."""

    function = "all_gather_into_tensor"

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        _held.append(args[0].detach())
        return real(*args, **kwargs)
