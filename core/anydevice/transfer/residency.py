"""A residency: the time for which copies stand in a group's slots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from anydevice.devices import parse_device
from anydevice.tensors import move_tensor
from anydevice.transfer import profile
from anydevice.transfer.device_copy import attributes_back, pass_gradient_on
from anydevice.weights import Slot, exchange

if TYPE_CHECKING:
    from anydevice.transfer.profile import Span
    from anydevice.transfer.queue import DeviceQueue
    from anydevice.transfer.transfer import Transfer

__all__ = ["Residency", "SwappedTensor"]


class SwappedTensor(NamedTuple):
    """A copy and where it stands.

    Attributes:
        slot: the place.
        original: the tensor that stood there before, and will again.
        copy: the tensor that stands there meanwhile.
        version: the copy's version when it came.
        address: of the copy's data when it came.
        attributes: of the copy when it came.
    """

    slot: Slot
    original: torch.Tensor
    copy: torch.Tensor
    version: int
    address: int
    attributes: dict[str, Any]

    @classmethod
    def of(cls, slot: Slot, original: torch.Tensor, copy: torch.Tensor) -> SwappedTensor:
        """Note what a copy is like before anybody uses it."""
        return cls(slot, original, copy, copy._version, _address(copy), dict(copy.__dict__))

    def changed(self) -> bool:
        """Whether the copy's values were changed in place."""
        return self.copy._version != self.version or _address(self.copy) != self.address


class Residency:
    """Device copies of one group, and the calls that use them. Guarded by the engine's lock.

    Attributes:
        count: calls that are inside.
        swapped: the copies.
        compares: whether changes that no version tells of are looked for.
    """

    def __init__(
        self,
        queue: DeviceQueue,
        swapped: list[SwappedTensor],
        transfer: Transfer | None,
        span: Span | None,
        compares: bool = False,
    ) -> None:
        self.swapped = swapped
        self.compares = compares
        self.count = 0
        self._queue = queue
        self._transfer = transfer
        self._span = span
        self._stream = queue.here()  # the copies are ready for its later work
        self._readers: list[tuple[Any, Any]] = []  # streams that have used them, and until when

    def begin(self) -> None:
        """Put the copies into their slots."""
        for swap in self.swapped:
            swap.slot.put(swap.copy)

    def join(self) -> None:
        """One more call uses the copies, on the calling thread's current stream."""
        self.count += 1
        here = self._queue.here()
        if here != self._stream:
            self._queue.wait(here, self._queue.mark(self._stream))

    def part(self) -> bool:
        """A call needs them no more; say whether it was the last."""
        self.count -= 1
        here = self._queue.here()
        if here is not None:
            self._readers = [r for r in self._readers if r[0] != here]
            if self.count:
                self._readers.append((here, self._queue.mark(here)))
        return self.count == 0

    def end(self) -> None:
        """Put the resting tensors back, and give the device's memory back."""
        here = self._queue.here()
        recorder = profile.active
        if self._span is not None and recorder is not None:
            recorder.leaves(self._span, self._queue)
        for _, event in self._readers:
            self._queue.wait(here, event)  # for what they changed, too
        try:
            self._swap_back()
        finally:
            if self._transfer is not None:
                self._transfer.release([self._queue.mark(here)])
            self._transfer = None

    def _swap_back(self) -> None:
        """Put the resting tensors back, with the changes that were made on the device."""
        swapped, self.swapped = self.swapped, []
        busy = {id(g.slot.module) for g in swapped if g.slot.is_buffer and g.changed()}
        written: set[int] = set()
        failure: Exception | None = None
        while swapped:
            try:
                self._restore(swapped.pop(), busy, written)
            except Exception as error:  # noqa: BLE001 - every slot must get its tensor back
                failure = failure or error
        if failure is not None:
            raise failure

    def _restore(self, swap: SwappedTensor, busy: set[int], written: set[int]) -> None:
        slot, original, copy = swap.slot, swap.original, swap.copy
        table = slot.table
        now = table.get(slot.name)
        if now is copy:
            table[slot.name] = original
            if id(copy) not in written:
                written.add(id(copy))
                if swap.changed():
                    _write_back(slot, original, copy)
                elif self.compares or (slot.is_buffer and _is_doubtful(slot.module, busy)):
                    _write_differences_back(original, copy)
            if swap.attributes or copy.__dict__:
                attributes_back(copy, original, swap.attributes)
            if copy.requires_grad and copy.is_leaf:
                pass_gradient_on(copy, original)
        elif now is not None and now.device == self._queue.place:
            _settle(slot, now, original.device)


def _is_doubtful(module: nn.Module, busy: set[int]) -> bool:
    """Whether a module may have changed its buffers without their versions telling.

    Batch norm's kernel updates the running statistics so; it counts its batches in a buffer beside
    them, which tells. Others write to ``buffer.data`` while they are trained.
    """
    if id(module) in busy:
        return True
    is_norm = isinstance(module, nn.modules.batchnorm._NormBase)
    return module.training and (is_norm or torch.is_grad_enabled())


def _write_back(slot: Slot, original: torch.Tensor, copy: torch.Tensor) -> None:
    with torch.inference_mode(original.is_inference()), torch.no_grad():
        if original.shape == copy.shape:
            original.copy_(copy)
        else:
            exchange(slot, move_tensor(copy.detach(), parse_device(original.device)))


def _write_differences_back(original: torch.Tensor, copy: torch.Tensor) -> None:
    with torch.inference_mode(original.is_inference()), torch.no_grad():
        value = move_tensor(copy.detach(), parse_device(original.device)).to(original.dtype)
        if not torch.equal(value, original):
            original.copy_(value)


def _settle(slot: Slot, new: torch.Tensor, device: torch.device) -> None:
    """Let what forward put into the slot original where its predecessor did."""
    place = parse_device(device)
    if isinstance(new, nn.Parameter):
        exchange(slot, move_tensor(new.detach(), place))
    else:
        slot.put(move_tensor(new, place))


def _address(tensor: torch.Tensor) -> int:
    """Where the tensor's data are; 0 where its layout or class has no such thing."""
    if tensor.layout is not torch.strided:
        return 0
    try:
        return tensor.data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0
