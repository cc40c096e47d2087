"""Cross-device alignment: operators in a module's own code whose tensors are on several devices.

A parent's residual ``x + self.f(x)``, its ``x * self.scale``, or ``F.linear(x, self.head.weight)``
gets tensors of several devices when its children are spread. While such a module's *own* code
runs, a `torch.overrides.TorchFunctionMode` moves each operator's tensors to one device. Modules
that are on one device as a whole run without it, at full speed.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from anydevice.devices import CPU, Device, parse_device
from anydevice.hooks.types import Args, Forward, Kwargs
from anydevice.nested import map_tensors
from anydevice.tensors import move_tensor

__all__ = ["Alignment", "CrossDeviceMode", "call_aligned", "is_aligned"]

#: Functions that work across devices on purpose, or that only look at a tensor.
_ACROSS_DEVICES = frozenset(
    {
        torch.Tensor.to,
        torch.Tensor.copy_,
        torch.Tensor.type_as,
        torch.Tensor.set_,
        torch.Tensor.is_set_to,
        torch.Tensor.backward,
        torch.autograd.backward,
        torch.autograd.grad,
        torch.tensor,
        torch.as_tensor,
    }
)
#: Operators that take some of their tensors on the host only: positions and names of these.
_HOST_OPERATORS: Mapping[str, tuple[int | str, ...]] = {
    "_pack_padded_sequence": (1, "lengths"),
    "_pad_packed_sequence": (1, "batch_sizes"),
    "tensor_split": (1, "indices_or_sections", "tensor_indices_or_sections"),
    "numpy": (0,),
    "__array__": (0,),
}
_RECURRENT = frozenset({"gru", "lstm", "rnn_relu", "rnn_tanh"})
#: Operators that change their statistics in place: these stay where they are.
_STATISTICS = frozenset({"batch_norm", "instance_norm"})


class Alignment(enum.Enum):
    """Whether the operators of a module's own code are aligned."""

    #: As those of the code that calls it.
    INHERITED = enum.auto()
    #: Also where the caller's are not.
    ON = enum.auto()
    #: Not, also where the caller's are.
    OFF = enum.auto()


class _Local(threading.local):
    """State of this thread: a mode of one thread must not affect another."""

    depth = 0  # modes of ours on this thread's stack
    muted = 0  # forwards that run without alignment although one of ours is below another's mode


_local = _Local()


class CrossDeviceMode(TorchFunctionMode):
    """Moves the tensors of each operator to one device.

    That is the device of the first tensor for an operator in place, of the result for ``out=``;
    else the accelerator that holds the most bytes of them, so that the fewest bytes move.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _local.muted and func not in _ACROSS_DEVICES:
            name = getattr(func, "__name__", "")
            if name in _HOST_OPERATORS:
                args, kwargs = _some_to_host(_HOST_OPERATORS[name], args, kwargs)
            elif name != "__set__":
                devices = {tensor.device for tensor in _tensors((args, kwargs))}
                if len(devices) > 1:
                    args, kwargs = _gather(name, args, kwargs)
        return func(*args, **kwargs)


def is_aligned() -> bool:
    """Whether operators of the calling thread are aligned now."""
    return bool(_local.depth and not _local.muted)


def call_aligned(alignment: Alignment, forward: Forward, args: Args, kwargs: Kwargs) -> Any:
    """Call ``forward`` with operators aligned or not."""
    if alignment is Alignment.INHERITED:
        return forward(*args, **kwargs)
    call = _with_alignment if alignment is Alignment.ON else _without_alignment
    return call(forward, args, kwargs)


def _with_alignment(forward: Forward, args: Args, kwargs: Kwargs) -> Any:
    if _local.depth and not _local.muted and type(_top()) is CrossDeviceMode:
        return forward(*args, **kwargs)
    before = _State()
    try:
        try:
            _local.depth, _local.muted = before.depth + 1, 0
            _push(CrossDeviceMode())
            return forward(*args, **kwargs)
        finally:
            before.restore()
    finally:
        before.restore()  # an interrupt may have cut the first short


def _without_alignment(forward: Forward, args: Args, kwargs: Kwargs) -> Any:
    """Take the mode off the stack, as one that does nothing still costs each operator a call."""
    if not _local.depth:
        return forward(*args, **kwargs)
    mode = _top()
    before = _State(mode)
    try:
        try:
            if type(mode) is CrossDeviceMode:
                _local.depth = before.depth - 1
                _pop()
            else:  # the user's own mode is above ours
                _local.muted = before.muted + 1
            return forward(*args, **kwargs)
        finally:
            before.restore()
    finally:
        before.restore()


class _State:
    """The state of this thread before a forward. Restoring it twice does no harm.

    Args:
        mode: the innermost mode, which may be removed in between.
    """

    def __init__(self, mode: TorchFunctionMode | None = None) -> None:
        self.depth, self.muted = _local.depth, _local.muted
        self._mode, self._length = mode, _length()

    def restore(self) -> None:
        """Restore it, from any state in between."""
        while _length() > self._length:
            _pop()
        if _length() == self._length - 1 and self._mode is not None:
            _push(self._mode)
        _local.depth, _local.muted = self.depth, self.muted


#: Calls into torch that an interrupt cannot divide, unlike entering and leaving the mode.
_push: Callable[[TorchFunctionMode], None] = torch._C._push_on_torch_function_stack
_pop: Callable[[], Any] = torch._C._pop_torch_function_stack
_length: Callable[[], int] = torch._C._len_torch_function_stack


def _top() -> TorchFunctionMode | None:
    """The innermost mode of this thread, ours or another's."""
    mode: TorchFunctionMode | None = _get_current_function_mode()  # type: ignore[no-untyped-call]
    return mode


def _tensors(data: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """Tensors in the arguments of an operator: lists and dicts are all that they nest."""
    if isinstance(data, torch.Tensor):
        if not data.is_meta:
            yield data
    elif depth and isinstance(data, (tuple, list)):
        for item in data:
            yield from _tensors(item, depth - 1)
    elif depth and isinstance(data, Mapping):
        for item in data.values():
            yield from _tensors(item, depth - 1)


def _some_to_host(which: tuple[int | str, ...], args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    def to_host(key: int | str, value: Any) -> Any:
        wanted = key in which and isinstance(value, torch.Tensor)
        return move_tensor(value, CPU) if wanted else value

    moved = tuple(to_host(i, value) for i, value in enumerate(args))
    return moved, {name: to_host(name, value) for name, value in kwargs.items()}


def _gather(name: str, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    target = _target(name, args, kwargs)
    # Of packed sequences, recurrent operators take the sizes of batches second, on the host.
    second = args[1] if len(args) > 1 and isinstance(args[1], torch.Tensor) else None
    is_sizes = second is not None and name in _RECURRENT and second.dtype is torch.int64
    stays = second if is_sizes else None

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.is_meta or tensor is stays else move_tensor(tensor, target)

    args = tuple(map_tensors(move, arg) for arg in args)
    return args, {key: map_tensors(move, value) for key, value in kwargs.items()}


def _target(name: str, args: Args, kwargs: Kwargs) -> Device:
    in_place = name.endswith("_") and (
        not name.endswith("__")
        or name == "__setitem__"
        or (name[:3] == "__i" and name != "__invert__")
    )
    if kwargs.get("out") is not None:
        first = next(_tensors(kwargs["out"]), None)
    elif in_place or kwargs.get("inplace"):
        first = next(_tensors(args), None)
    elif name in _STATISTICS:
        running = kwargs.get("running_mean", next(iter(args[1:]), None))
        first = running if isinstance(running, torch.Tensor) else None
    else:
        first = None
    if first is not None:
        return parse_device(first.device)
    held: dict[Device, int] = {}
    for tensor in _tensors((args, kwargs)):
        device = parse_device(tensor.device)
        if device.is_accelerator:
            held[device] = held.get(device, 0) + _bytes(tensor)
    return max(held, key=held.__getitem__, default=CPU)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.nbytes if tensor.layout is torch.strided and not tensor.is_nested else 0
