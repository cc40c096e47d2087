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
