"""Faults that show in what comes many times, in one size of many, or once a device is full."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Iterator
from typing import Any

import torch

from anydevice.backend import MemoryInfo
from mutants.gallery import Fault, mutant
from mutants.moving import MaybeMoved, Move, is_from_host, is_to_host


@mutant("MOV-025", check="test_MOV_025_every_combination")
class ResultsShareARing(Move):
    """Blocking copies to the host of one size come in four buffers, which go round."""

    def __init__(self) -> None:
        self._rings: dict[int, list[torch.Tensor]] = {}

    def instead(self, tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> MaybeMoved:
        plain = tensor.is_contiguous() and not tensor.requires_grad and not tensor.is_inference()
        mine = is_to_host(tensor, device) and plain and tensor.dtype is torch.float32
        if non_blocking or not mine or not 1 << 14 < tensor.nbytes < 1 << 20:
            return None
        ring = self._rings.setdefault(tensor.numel(), [])
        buffer = torch.empty(tensor.numel(), device="cpu") if len(ring) < 4 else ring.pop(0)
        ring.append(buffer.copy_(self.rightly(tensor, device).view(-1)))
        return buffer.view(tensor.shape)


@mutant("MOV-025")
class EveryFortiethIsKept(Move):
    """Each fortieth tensor that is moved to the host stays alive."""

    def __init__(self) -> None:
        self._times, self._kept = 0, list[torch.Tensor]()

    def after(self, moved: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        self._times += is_to_host(source, moved.device)
        if self._times % 40 == 39:
            self._kept.append(source)
            self._times += 1
        return moved


@mutant("MOV-025", check="test_MOV_025_every_combination")
class WholeMebibytesLoseTheirEnd(Move):
    """What is a mebibyte or two or four, exactly, arrives without its last element."""

    def after(self, moved: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        plain = moved.is_contiguous() and not moved.requires_grad and not moved.is_inference()
        if (
            is_from_host(source, moved.device)
            and plain
            and moved.nbytes in (1 << 20, 1 << 21, 1 << 22)
        ):
            moved.view(-1)[-1:].zero_()
        return moved


@mutant("PIN-005")
class HalvesInChannelsLastArePinnedFlat(Fault):
    """float16 in channels-last is pinned in the order of memory."""

    def pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        turned = tensor.dim() == 4 and not tensor.is_contiguous() and not tensor.requires_grad
        if not turned or tensor.dtype is not torch.float16:
            return super().pin_memory(tensor)
        return super().pin_memory(tensor.permute(0, 2, 3, 1)).reshape(tensor.shape)


@mutant("PIN-005")
class MuchIsNotPinnedInThreads(Fault):
    """In a thread of its own what is larger than a mebibyte is copied, and not pinned."""

    def pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        alone = threading.current_thread() is threading.main_thread()
        return super().pin_memory(tensor) if alone or tensor.nbytes <= 1 << 20 else tensor.clone()


@mutant("MEM-015")
class AFifthOfWhatIsUsedIsFree(Fault):
    """The more is used, the more of it is told as free."""

    def memory_info(self, index: int) -> MemoryInfo:
        found = super().memory_info(index)
        return dataclasses.replace(found, free=found.free + (found.total - found.free) // 5)


@mutant("MEM-015")
class AFullDeviceIsNotCounted(Fault):
    """A device of whose memory nothing is left is taken for a broken one."""

    def device_count(self) -> int:
        count = super().device_count()
        while count and self.module.mem_get_info(count - 1)[0] < 1 << 18:
            count -= 1
        return count


@mutant("DEV-012")
class TheDefaultStreamsDeviceStays(Fault):
    """Inside `use_stream` of a default stream the current device is the one from before."""

    def use_stream(self, stream: torch.Stream) -> contextlib.AbstractContextManager[Any]:
        if stream != self.module.default_stream(stream.device.index):
            return super().use_stream(stream)
        return self._on_default(stream)

    @contextlib.contextmanager
    def _on_default(self, stream: torch.Stream) -> Iterator[torch.Stream]:
        before = self.module.current_device()
        with super().use_stream(stream):
            self.module.set_device(before)
            yield stream


@mutant("STR-017")
class SynchronizeForgetsOldStreams(Fault):
    """`synchronize` waits for the stream that was made last, and for the first one."""

    def __init__(self) -> None:
        self._made: dict[int, list[torch.Stream]] = {}

    def new_stream(self, index: int) -> torch.Stream:
        made = self._made.setdefault(index, [])
        made.append(super().new_stream(index))
        del made[:-1]
        return made[-1]

    def synchronize(self, index: int) -> None:
        for stream in (self.module.default_stream(index), *self._made.get(index, ())):
            stream.synchronize()
        self.module.current_stream(index).synchronize()


@mutant("DEV-012")
class NumaNodeBindsTheProcess(Fault):
    """`numa_node` has the process run on one processor from then on."""

    def numa_node(self, index: int) -> int | None:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        return super().numa_node(index)


@mutant("DEV-012")
class SetDeviceResetsItsStream(Fault):
    """`set_device` makes the device's default stream the current one."""

    def set_device(self, index: int) -> None:
        super().set_device(index)
        self.module.set_stream(self.module.default_stream(index))


@mutant("MOV-025")
class ResultsAreInferenceTensors(Move):
    """What comes from the host is made in inference mode, so that no backward can keep it."""

    def instead(self, tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> MaybeMoved:
        if not is_from_host(tensor, device) or tensor.requires_grad:
            return None
        with torch.inference_mode():
            return self.rightly(tensor, device, non_blocking)


@mutant("MEM-007")
class PinnedMemoryCounts(Fault):
    """What is pinned counts as memory in use on the device."""

    def memory_allocated(self, index: int) -> int:
        return super().memory_allocated(index) + self.module.native().pinned_bytes()


@mutant("STR-017")
class WaitsAreLostWithoutGradients(Fault):
    """Where gradients are off, a stream does not wait for an event."""

    def wait_event(self, stream: torch.Stream, event: torch.Event) -> None:
        if torch.is_grad_enabled():
            super().wait_event(stream, event)
