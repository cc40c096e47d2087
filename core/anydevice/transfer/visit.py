"""A visit: the time for which twins stand in a unit's slots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from anydevice.devices import parse_device
from anydevice.tensors import move_tensor
from anydevice.transfer import profile
from anydevice.transfer.twins import attributes_back
from anydevice.weights import Slot, exchange

if TYPE_CHECKING:
    from anydevice.transfer.lane import Lane
    from anydevice.transfer.profile import Span
    from anydevice.transfer.shipment import Shipment

__all__ = ["Guest", "Visit"]


class Guest(NamedTuple):
    """A twin and where it stands.

    Attributes:
        slot: the place.
        rest: the tensor that stood there before, and will again.
        twin: the tensor that stands there meanwhile.
        version: the twin's version when it came.
        address: of the twin's data when it came.
        attributes: of the twin when it came.
    """

    slot: Slot
    rest: torch.Tensor
    twin: torch.Tensor
    version: int
    address: int
    attributes: dict[str, Any]

    @classmethod
    def of(cls, slot: Slot, rest: torch.Tensor, twin: torch.Tensor) -> Guest:
        """Note what a twin is like before anybody uses it."""
        return cls(slot, rest, twin, twin._version, _address(twin), dict(twin.__dict__))

    def changed(self) -> bool:
        """Whether the twin's values were changed in place."""
        return self.twin._version != self.version or _address(self.twin) != self.address


class Visit:
    """Twins of one unit on its device, and the calls that use them. Guarded by the engine's lock.

    Attributes:
        count: calls that are inside.
        guests: the twins.
        compares: whether changes that no version tells of are looked for.
    """

    def __init__(
        self,
        lane: Lane,
        guests: list[Guest],
        shipment: Shipment | None,
        span: Span | None,
        compares: bool = False,
    ) -> None:
        self.guests = guests
        self.compares = compares
        self.count = 0
        self._lane = lane
        self._shipment = shipment
        self._span = span
        self._stream = lane.here()  # the twins are ready for its later work
        self._readers: list[tuple[Any, Any]] = []  # streams that have used them, and until when

    def begin(self) -> None:
        """Put the twins into their slots."""
        for guest in self.guests:
            guest.slot.put(guest.twin)

    def join(self) -> None:
        """One more call uses the twins, on the calling thread's current stream."""
        self.count += 1
        here = self._lane.here()
        if here != self._stream:
            self._lane.wait(here, self._lane.mark(self._stream))

    def part(self) -> bool:
        """A call needs them no more; say whether it was the last."""
        self.count -= 1
        here = self._lane.here()
        if here is not None:
            self._readers = [r for r in self._readers if r[0] != here]
            if self.count:
                self._readers.append((here, self._lane.mark(here)))
        return self.count == 0

    def end(self) -> None:
        """Put the resting tensors back, and give the device's memory back."""
        here = self._lane.here()
        recorder = profile.active
        if self._span is not None and recorder is not None:
            recorder.leaves(self._span, self._lane)
        for _, event in self._readers:
            self._lane.wait(here, event)  # for what they changed, too
        try:
            self._settle_guests()
        finally:
            if self._shipment is not None:
                self._shipment.release([self._lane.mark(here)])
            self._shipment = None

    def _settle_guests(self) -> None:
        """Put the resting tensors back, with the changes that were made on the device."""
        guests, self.guests = self.guests, []
        busy = {id(g.slot.module) for g in guests if g.slot.is_buffer and g.changed()}
        written: set[int] = set()
        failure: Exception | None = None
        while guests:
            try:
                self._rest_again(guests.pop(), busy, written)
            except Exception as error:  # noqa: BLE001 - every slot must get its tensor back
                failure = failure or error
        if failure is not None:
            raise failure

    def _rest_again(self, guest: Guest, busy: set[int], written: set[int]) -> None:
        slot, rest, twin = guest.slot, guest.rest, guest.twin
        table = slot.table
        now = table.get(slot.name)
        if now is twin:
            table[slot.name] = rest
            if id(twin) not in written:
                written.add(id(twin))
                if guest.changed():
                    _write_back(slot, rest, twin)
                elif self.compares or (slot.is_buffer and _is_doubtful(slot.module, busy)):
                    _write_differences_back(rest, twin)
            if guest.attributes or twin.__dict__:
                attributes_back(twin, rest, guest.attributes)
        elif now is not None and now.device == self._lane.place:
            _settle(slot, now, rest.device)


def _is_doubtful(module: nn.Module, busy: set[int]) -> bool:
    """Whether a module may have changed its buffers without their versions telling.

    Batch norm's kernel updates the running statistics so; it counts its batches in a buffer beside
    them, which tells. Others write to ``buffer.data`` while they are trained.
    """
    if id(module) in busy:
        return True
    is_norm = isinstance(module, nn.modules.batchnorm._NormBase)
    return module.training and (is_norm or torch.is_grad_enabled())


def _write_back(slot: Slot, rest: torch.Tensor, twin: torch.Tensor) -> None:
    with torch.inference_mode(rest.is_inference()), torch.no_grad():
        if rest.shape == twin.shape:
            rest.copy_(twin)
        else:
            exchange(slot, move_tensor(twin.detach(), parse_device(rest.device)))


def _write_differences_back(rest: torch.Tensor, twin: torch.Tensor) -> None:
    with torch.inference_mode(rest.is_inference()), torch.no_grad():
        value = move_tensor(twin.detach(), parse_device(rest.device)).to(rest.dtype)
        if not torch.equal(value, rest):
            rest.copy_(value)


def _settle(slot: Slot, new: torch.Tensor, device: torch.device) -> None:
    """Let what forward put into the slot rest where its predecessor did."""
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
