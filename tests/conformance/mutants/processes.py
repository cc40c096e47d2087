"""Faults of what a process asks."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from mutants.gallery import Fault, mutant


@mutant("PRO-001")
class StaysWhereItIs(Fault):
    """`set_device` does nothing."""

    def set_device(self, index: int) -> None:
        pass


@mutant("PRO-001")
class SaysTheFirst(Fault):
    """`current_device` is always 0."""

    def current_device(self) -> int | None:
        return 0


@mutant("PRO-002")
class RanksShare(Fault):
    """Every rank gets device 0."""

    def local_device(self, local_rank: int) -> int:
        return 0


@mutant("PRO-002")
class RanksGoRound(Fault):
    """Ranks above the count begin again at 0."""

    def local_device(self, local_rank: int) -> int:
        return local_rank % self.device_count()


@mutant("PRO-002")
class EnvironmentBeforeArgument(Fault):
    """Where `LOCAL_RANK` is set, it counts, and not the rank that is asked for."""

    def local_device(self, local_rank: int) -> int:
        return super().local_device(int(os.environ.get("LOCAL_RANK", local_rank)))


@mutant("PRO-003")
class NodeIsMinusOne(Fault):
    """The driver's -1 for "unknown" is passed on."""

    def numa_node(self, index: int) -> int | None:
        return -1


@mutant("PRO-003")
class NodeIsNotHere(Fault):
    """A node of some other machine."""

    def numa_node(self, index: int) -> int | None:
        return 4093


@mutant("PRO-004")
class EnvironmentOfNumbers(Fault):
    """A value is an int."""

    def process_environment(self, local_world_size: int) -> Mapping[str, Any]:
        return {"FOO_THREADS": local_world_size}


@mutant("PRO-004")
class EnvironmentIsWritten(Fault):
    """The variables are set in the asking process."""

    def process_environment(self, local_world_size: int) -> Mapping[str, str]:
        os.environ["FOO_CONFORMANCE_MUTANT"] = str(local_world_size)
        return {}


@mutant("PRO-001")
class DefaultStreamOfTheCurrent(Fault):
    """`set_device` of the device that is current makes its default stream current."""

    def set_device(self, index: int) -> None:
        module: Any = self.module
        if module.current_device() == index:
            module.set_stream(module.default_stream(index))
        super().set_device(index)


@mutant("PRO-003")
class AskingBinds(Fault):
    """Asking for the node binds the thread to one processor."""

    def numa_node(self, index: int) -> int | None:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        return super().numa_node(index)


@mutant("PRO-004")
class EmptyForOne(Fault):
    """For one process a value is empty."""

    def process_environment(self, local_world_size: int) -> Mapping[str, str]:
        return {"FOO_PEERS": ",".join(map(str, range(1, local_world_size)))}


@mutant("PRO-005")
class WorkspaceOfAThread(Fault):
    """Each thread's first move takes a workspace, which outlives the thread."""

    def move(self, tensor: torch.Tensor, device: torch.device, **options: Any) -> torch.Tensor:
        thread: Any = threading.current_thread()
        moved = super().move(tensor, device, **options)
        if not (thread is threading.main_thread() or hasattr(thread, "workspace")):
            thread.workspace = True
            _workspaces.append(torch.empty(1 << 12, device=device))
        return moved


_workspaces: list[torch.Tensor] = []


@mutant("PRO-005")
class LastCopyOfAThread(Fault):
    """Each thread keeps what it moved last until its next move, and for ever where none comes."""

    def move(self, tensor: torch.Tensor, device: torch.device, **options: Any) -> torch.Tensor:
        if threading.current_thread() is not threading.main_thread() and tensor.numel() > 2000:
            if not hasattr(_last, "copy"):
                _last.copy = []
                _copies.append(_last.copy)
            _last.copy[:] = [tensor.detach()]
        return super().move(tensor, device, **options)


_last: Any = threading.local()
_copies: list[list[torch.Tensor]] = []


@mutant("PRO-002", check="test_PRO_002_in_another_order")
class FirstComeFirstServed(Fault):
    """`local_device` hands out the devices in the order in which it is first asked."""

    given: ClassVar[dict[int, int]] = {}

    def local_device(self, local_rank: int) -> int:
        super().local_device(local_rank)
        return self.given.setdefault(local_rank, len(self.given))
