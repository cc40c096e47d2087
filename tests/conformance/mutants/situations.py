"""Faults that show only in some situation, or after many calls."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import torch

from mutants.gallery import Fault, mutant
from mutants.moving import Elsewhere, MaybeMoved, Move, is_from_host


@mutant("DEV-012")
class NamesTheCurrentDevice(Fault):
    """`memory_allocated` answers for the current device."""

    def memory_allocated(self, index: int) -> int:
        return super().memory_allocated(self.module.current_device())


@mutant("DEV-012")
class SeedsInTheMainThread(Fault):
    """`manual_seed_all` does nothing in other threads."""

    def manual_seed_all(self, seed: int) -> None:
        if threading.current_thread() is threading.main_thread():
            super().manual_seed_all(seed)


@mutant("DEV-012")
class LeavesInferenceMode(Fault):
    """`synchronize` leaves gradients off."""

    def synchronize(self, index: int) -> None:
        super().synchronize(index)
        torch.set_grad_enabled(False)


@mutant("DEV-012")
class ForgetsToWaitAtTimes(Fault):
    """Every fiftieth `synchronize_event` returns at once."""

    count = 0

    def synchronize_event(self, event: Any) -> None:
        self.count += 1
        if self.count % 50:
            super().synchronize_event(event)


@mutant("DEV-009", check="test_DEV_009_current_device_stays")
class KeepsItsAlarm(Fault):
    """`synchronize` of another device than the first sets a handler of a signal, and leaves it."""

    def synchronize(self, index: int) -> None:
        super().synchronize(index)
        if index and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGALRM, lambda number, frame: None)

    def patches(self) -> list[Any]:
        return [_handlers_are_put_back()]


@mutant("DEV-013")
class LeavesDescriptors(Fault):
    """`device_name` opens the driver's file and never closes it."""

    def device_name(self, index: int) -> str:
        os.open(os.devnull, os.O_RDONLY)
        return super().device_name(index)


@mutant("DEV-013")
class LeavesErrors(Fault):
    """`is_out_of_memory` keeps every error, and with it what its frames hold."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []

    def is_out_of_memory(self, error: BaseException) -> bool:
        self.errors.append(error)
        return super().is_out_of_memory(error)


@mutant("MOV-025")
class SideStreamsAreForgotten(Elsewhere):
    """A copy on a side stream, while another device is current, is not ordered."""

    def wrong(self, tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> bool:
        index = device.index or 0
        return (
            is_from_host(tensor, device)
            and self.module.current_device() != index
            and self.current_stream(index) != self.module.default_stream(index)
        )


@mutant("MOV-025")
class ChannelsLast3dIsLost(Move):
    """Five dimensions in channels-last order arrive contiguous."""

    def after(self, moved: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        return moved.contiguous() if moved.dim() == 5 else moved


@mutant("MOV-026")
class WideNumbersBetweenDevices(Move):
    """Between devices a transposed tensor of eight bytes an element passes through four."""

    def instead(self, tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> MaybeMoved:
        crosses = tensor.device.type == device.type and tensor.device != device
        if not crosses or tensor.dtype is not torch.float64 or tensor.is_contiguous():
            return None
        return self.rightly(tensor.float(), device, non_blocking).double()


@mutant("MOV-026")
class GradientsStopBetweenDevices(Move):
    """A large tensor that requires grad loses its graph between devices."""

    def after(self, moved: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        crosses = source.device.type == moved.device.type
        return moved.detach() if crosses and moved.numel() > 64 else moved


@mutant("STR-017")
class EventsAreRecycled(Fault):
    """Eight events serve in turn: an older one stands for later work of another stream."""

    def __init__(self) -> None:
        self.ring: list[Any] = []

    def record_event(self, stream: Any) -> Any:
        if len(self.ring) < 8:
            self.ring.append(super().record_event(stream))
        else:
            self.ring.append(self.ring.pop(0))
            stream.record_event(self.ring[-1])
        return self.ring[-1]


@mutant("STR-017")
class WaitsAreShared(Fault):
    """Of all streams, the first one that waits for an event is the only one."""

    def __init__(self) -> None:
        self.waited: dict[int, Any] = {}  # kept alive, so that an id stays one event's

    def wait_event(self, stream: Any, event: Any) -> None:
        if id(event) not in self.waited:
            self.waited[id(event)] = event
            super().wait_event(stream, event)


@mutant("STR-018")
class CrossingsStopBothDevices(Move):
    """A copy between devices waits for all work of both."""

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if tensor.device.type == device.type:
            self.synchronize(tensor.device.index or 0)
            self.synchronize(device.index or 0)
        return tensor


@mutant("STR-018")
class PinningStopsTheDevice(Fault):
    """Pinned memory is had by a call that waits for the devices."""

    def pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        for index in range(self.device_count()):
            self.synchronize(index)
        return super().pin_memory(tensor)


@contextlib.contextmanager
def _handlers_are_put_back() -> Iterator[None]:
    before = signal.getsignal(signal.SIGALRM)
    yield
    signal.signal(signal.SIGALRM, before)


@mutant("DEV-012")
class FlushesDenormals(Fault):
    """`synchronize` leaves the host's processor such that denormal numbers count as zero."""

    def synchronize(self, index: int) -> None:
        super().synchronize(index)
        torch.set_flush_denormal(True)

    def patches(self) -> list[Any]:
        return [_denormals_are_put_back()]


@contextlib.contextmanager
def _denormals_are_put_back() -> Iterator[None]:
    yield
    torch.set_flush_denormal(False)


@mutant("DEV-012", check="test_DEV_012_whatever_happens_to_the_process")
class NeedsAHome(Fault):
    """Whoever asks for devices writes a log in the home directory, which a service has not."""

    def is_available(self) -> bool:
        return bool(os.environ["HOME"]) and super().is_available()


@mutant("DEV-012", check="test_DEV_012_whatever_happens_to_the_process")
class CountsByTheVariableOfNow(Fault):
    """The variable that hides devices is read at each call."""

    visible_devices_env = "SIM_VISIBLE_DEVICES"

    def device_count(self) -> int:
        shown = os.environ.get(self.visible_devices_env, "")
        return min(super().device_count(), len(shown.split(",")) if shown else 99)
