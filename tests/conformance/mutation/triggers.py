"""When a fault shows: conditions on a call."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any, Final

import torch

__all__ = ["MOVE_TRIGGERS", "TRIGGERS", "Call"]


@dataclasses.dataclass
class Call:
    """A call of a member, as conditions see it.

    Attributes:
        backend: whose member.
        count: how many calls of it came before.
        index: of the device that the call is about; None where there is none.
        tensor: what is moved or pinned.
        device: where it goes.
        non_blocking: as given to `move`.
    """

    backend: Any
    count: int
    index: int | None = None
    tensor: torch.Tensor | None = None
    device: torch.device | None = None
    non_blocking: bool = False

    @property
    def from_host(self) -> bool:
        """Whether a tensor goes from the host to a device."""
        return self.tensor is not None and _type(self) == ("cpu", self.backend.device_type)

    @property
    def to_host(self) -> bool:
        """Whether a tensor goes from a device to the host."""
        return self.tensor is not None and _type(self) == (self.backend.device_type, "cpu")

    @property
    def between(self) -> bool:
        """Whether a tensor goes from one device to another."""
        mine = self.backend.device_type
        if self.tensor is None or _type(self) != (mine, mine):
            return False
        assert self.device is not None
        return self.tensor.device.index != (self.device.index or 0)

    @property
    def moves(self) -> bool:
        """Whether a tensor really goes from one place to another."""
        return self.from_host or self.to_host or self.between


def _type(call: Call) -> tuple[str, str]:
    assert call.tensor is not None
    assert call.device is not None
    return call.tensor.device.type, call.device.type


def _on_side_stream(call: Call) -> bool:
    index = call.index or 0
    module = call.backend.module
    return bool(module.current_stream(index) != module.default_stream(index))


def _elsewhere(call: Call) -> bool:
    return bool(call.backend.module.current_device() != (call.index or 0))


#: Name to condition, for every member.
TRIGGERS: Final[dict[str, Callable[[Call], bool]]] = {
    "always": lambda call: True,
    "on device 1": lambda call: call.index == 1,
    "while another device is current": _elsewhere,
    "while device 1 is current": lambda call: call.backend.module.current_device() == 1,
    "on a side stream": _on_side_stream,
    "in a thread": lambda call: threading.current_thread() is not threading.main_thread(),
    "in every 40th call": lambda call: call.count % 40 == 39,
    "after 150 calls": lambda call: call.count >= 150,
    "under no_grad": lambda call: (
        not torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    ),
    "under inference mode": lambda call: torch.is_inference_mode_enabled(),
}


def _tensor(condition: Callable[[torch.Tensor], bool]) -> Callable[[Call], bool]:
    return lambda call: call.tensor is not None and bool(condition(call.tensor))


#: Besides, for members that take a tensor.
MOVE_TRIGGERS: Final[dict[str, Callable[[Call], bool]]] = {
    "from the host": lambda call: call.from_host,
    "to the host": lambda call: call.to_host,
    "between devices": lambda call: call.between,
    "from device 1 to device 0": lambda call: call.between and call.tensor.device.index == 1,
    "between devices, non-blocking": lambda call: call.between and call.non_blocking,
    "between devices, not contiguous": lambda call: (
        call.between and not call.tensor.is_contiguous()
    ),
    "between devices, above 64 KiB": lambda call: call.between and call.tensor.nbytes > 1 << 16,
    "between devices, on a side stream": lambda call: call.between and _on_side_stream(call),
    "between devices, of 8 bytes an element": lambda call: (
        call.between and call.tensor.itemsize == 8
    ),
    "to the host, non-blocking": lambda call: call.to_host and call.non_blocking,
    "to the host, blocking, on a side stream": lambda call: (
        call.to_host and not call.non_blocking and _on_side_stream(call)
    ),
    "from the host, non-blocking, not pinned": lambda call: (
        call.from_host and call.non_blocking and not call.tensor.is_pinned()
    ),
    "from pinned memory": lambda call: call.from_host and call.tensor.is_pinned(),
    "from pinned memory, not contiguous": lambda call: (
        call.from_host and call.tensor.is_pinned() and not call.tensor.is_contiguous()
    ),
    "above 1 MiB": _tensor(lambda t: t.nbytes > 1 << 20),
    "above 4 MiB": _tensor(lambda t: t.nbytes > 1 << 22),
    "of one element": _tensor(lambda t: t.numel() == 1),
    "of 4096 elements": _tensor(lambda t: t.numel() == 4096),
    "of an odd number of elements": _tensor(lambda t: t.numel() % 2 == 1),
    "of five or six dimensions": _tensor(lambda t: t.dim() >= 5),
    "of channels-last": _tensor(
        lambda t: (
            t.dim() == 4
            and not t.is_contiguous()
            and t.is_contiguous(memory_format=torch.channels_last)
        )
    ),
    "of channels-last in 3 dimensions": _tensor(
        lambda t: (
            t.dim() == 5
            and not t.is_contiguous()
            and t.is_contiguous(memory_format=torch.channels_last_3d)
        )
    ),
    "not contiguous": _tensor(lambda t: not t.is_contiguous()),
    "expanded": _tensor(lambda t: 0 in t.stride() and t.numel() > 1),
    "with an offset": _tensor(lambda t: t.storage_offset() > 0),
    "of int16": _tensor(lambda t: t.dtype is torch.int16),
    "of uint8": _tensor(lambda t: t.dtype is torch.uint8),
    "of bool": _tensor(lambda t: t.dtype is torch.bool),
    "of float8": _tensor(lambda t: t.is_floating_point() and t.itemsize == 1),
    "of complex64": _tensor(lambda t: t.dtype is torch.complex64),
    "of float64": _tensor(lambda t: t.dtype is torch.float64),
    "that requires grad": _tensor(lambda t: t.requires_grad),
    "of a Parameter": _tensor(lambda t: isinstance(t, torch.nn.Parameter)),
    "of an inference tensor": _tensor(lambda t: t.is_inference()),
    "conjugate": _tensor(lambda t: t.is_conj()),
    "negative": _tensor(lambda t: t.is_neg()),
    "of integers that require no grad, on a side stream": lambda call: (
        _on_side_stream(call) and not call.tensor.is_floating_point()
    ),
}
