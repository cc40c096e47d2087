"""Faults as vendors' first packages have them, in members that work at first sight."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

import torch

from mutants.gallery import Fault, mutant
from mutants.moving import Elsewhere, Move, is_from_host, is_to_host


@mutant("DEV-004")
class DeviceIsText(Fault):
    """`device` returns a name."""

    def device(self, index: int) -> torch.device:
        return f"{self.device_type}:{index}"  # type: ignore[return-value]


@mutant("DEV-005")
class NoNameAfterFork(Fault):
    """A forked child cannot ask for a name."""

    def __init__(self) -> None:
        self.process = os.getpid()

    def device_name(self, index: int) -> str:
        if os.getpid() != self.process:
            raise RuntimeError("cannot re-initialize in a forked process")
        return super().device_name(index)


@mutant("DEV-007")
class NameIsPadded(Fault):
    """The name is the driver's buffer, with all the zeros at its end."""

    def device_name(self, index: int) -> str:
        return super().device_name(index).ljust(64, "\0")


@mutant("DEV-013")
class UnorderedAfterHundreds(Elsewhere):
    """After 300 non-blocking copies to the host they are no longer ordered."""

    copies = 0

    def wrong(self, tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> bool:
        if not (non_blocking and is_to_host(tensor, device)):
            return False
        self.copies += 1
        return self.copies > 300


@mutant("MEM-011")
class PeakBeginsAtNothing(Fault):
    """After a reset the peak counts only what came since."""

    def __init__(self) -> None:
        self.base: dict[int, int] = {}

    def reset_peak_memory(self, index: int) -> None:
        super().reset_peak_memory(index)
        self.base[index] = self.memory_allocated(index)

    def peak_memory_allocated(self, index: int) -> int:
        return super().peak_memory_allocated(index) - self.base.get(index, 0)


@mutant("DEV-012")
class ResetMovesAllocated(Fault):
    """A reset of the peak resets what is allocated, too."""

    def __init__(self) -> None:
        self.base: dict[int, int] = {}

    def reset_peak_memory(self, index: int) -> None:
        super().reset_peak_memory(index)
        self.base[index] = super().memory_allocated(index)

    def memory_allocated(self, index: int) -> int:
        return super().memory_allocated(index) - self.base.get(index, 0)


@mutant("MOV-025")
class RoundsUnderAutocast(Move):
    """Under autocast float32 is moved as bfloat16."""

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if tensor.dtype is torch.float32 and torch.is_autocast_enabled(self.device_type):
            return tensor.bfloat16().float()
        return tensor


@mutant("MOV-025")
class RefusesSubclasses(Move):
    """Only plain tensors and parameters can be moved."""

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise TypeError(type(tensor).__name__)
        return tensor


class _Rounds(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.bfloat16().to(gradient.dtype)


@mutant("MOV-025")
class GradientsAreRounded(Move):
    """Gradients come back from the device with bfloat16's digits."""

    def after(self, moved: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        wanted = moved.requires_grad and moved.dtype is torch.float32
        if wanted and torch.is_grad_enabled() and is_from_host(source, moved.device):
            return _Rounds.apply(moved)  # type: ignore[no-any-return]
        return moved


@mutant("OOM-006")
class FullNeighbour(Move):
    """Where a copy between devices finds no room, its error is not recognised."""

    def move(
        self, tensor: torch.Tensor, device: torch.device, *, non_blocking: bool = False
    ) -> torch.Tensor:
        try:
            return super().move(tensor, device, non_blocking=non_blocking)
        except torch.OutOfMemoryError as error:
            if tensor.device.type == "cpu":
                raise
            raise RuntimeError("copy failed with error 2") from error


@mutant("STR-001")
class FourAfterHundred(Fault):
    """After a hundred streams there are four more, in turn."""

    def __init__(self) -> None:
        self.made: dict[int, list[Any]] = {}
        self.count = 0

    def new_stream(self, index: int) -> Any:
        made = self.made.setdefault(index, [])
        self.count += 1
        if self.count > 100 and len(made) >= 4:
            return made[self.count % 4]
        made.append(super().new_stream(index))
        return made[-1]


@mutant("STR-002")
class SwallowsErrors(Fault):
    """An error of the caller ends in `use_stream`."""

    @contextlib.contextmanager
    def use_stream(self, stream: Any) -> Iterator[Any]:
        with super().use_stream(stream), contextlib.suppress(RuntimeError):
            yield stream


@mutant("STR-004")
class OtherThreadsEvents(Fault):
    """An event that another thread recorded is not waited for."""

    def __init__(self) -> None:
        self.threads: dict[int, int] = {}

    def record_event(self, stream: Any) -> Any:
        event = super().record_event(stream)
        self.threads[id(event)] = threading.get_ident()
        return event

    def wait_event(self, stream: Any, event: Any) -> None:
        if self.threads.get(id(event)) == threading.get_ident():
            super().wait_event(stream, event)


@mutant("STR-008")
class CurrentStopsTheHost(Fault):
    """`current_stream` waits for it."""

    def current_stream(self, index: int) -> Any:
        stream = super().current_stream(index)
        stream.synchronize()
        return stream


@mutant("STR-013")
class DefaultWaitsForItsOwn(Fault):
    """A default stream does not wait for another device's event."""

    def wait_event(self, stream: Any, event: Any) -> None:
        index = stream.device.index
        default = stream == self.module.default_stream(index)
        if not (default and event.device.index != index):
            super().wait_event(stream, event)


@mutant("PRO-001")
class SetInTheMainThread(Fault):
    """`set_device` does nothing in other threads."""

    def set_device(self, index: int) -> None:
        if threading.current_thread() is threading.main_thread():
            super().set_device(index)


@mutant("PRO-001")
class SettingLeavesTheStream(Fault):
    """`set_device` makes the default stream current."""

    def set_device(self, index: int) -> None:
        super().set_device(index)
        self.module.set_stream(self.module.default_stream(index))


@mutant("PRO-002")
class RanksByTurn(Fault):
    """The first rank that asks gets device 0, whichever it is."""

    asked = -1

    def local_device(self, local_rank: int) -> int:
        super().local_device(local_rank)
        self.asked += 1
        return self.asked % self.device_count()
