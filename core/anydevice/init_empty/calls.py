"""Calling functions of torch once more, with values, where they need them.

A function mode of torch sees each call that the user's code makes. To that code, tensors of the log
are on the host, as they are in a plain build.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from anydevice.init_empty.log import Log
from anydevice.init_empty.operations import NeedsValues, is_transforming
from anydevice.init_empty.steps import Step, flat_tensors
from anydevice.init_empty.values import call_with_values
from anydevice.nested import iter_tensors

__all__ = ["CallMode"]

_CPU: Final = torch.device("cpu")
_META: Final = torch.device("meta")


class CallMode(TorchFunctionMode):
    """Makes arguments real where a call needs values."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self.log = log

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        log, kwargs = self.log, kwargs or {}
        if log.is_off or log.is_eager:
            return func(*args, **kwargs)
        special = _SPECIAL.get(func)
        if special is not None:
            return special(self, func, args, kwargs)
        if kwargs.get("device") is not None and _is_meta(kwargs["device"]):
            kwargs = {**kwargs, "device": _CPU}
        return self.call(func, args, kwargs)

    def call(self, func: Any, args: Any, kwargs: Any, real: Any = None) -> Any:
        """Call a function; once more, with values, where it needs them.

        Args:
            func: what to call.
            args: its arguments.
            kwargs: the same, by name.
            real: both for the call with values, where they are others.
        """
        log, real = self.log, real or (args, kwargs)
        log.has_autocast = torch._C._is_any_autocast_enabled()
        if is_transforming():
            return func(*args, **kwargs)  # its tensors are not what they hold
        if torch.is_grad_enabled() and any(map(self._records, flat_tensors(args))):
            return self.call_for_real(func, *real)  # the graph is one of real tensors
        mark = log.mark()
        log.calls += 1
        try:
            return func(*args, **kwargs)
        except (NeedsValues, RuntimeError) as error:
            # Kernels that read memory without an operation fail on meta with errors of their own;
            # so do functions that make a tensor of their own, which was put off.
            ours = log.mark() != mark or any(t in log for t in iter_tensors((args, kwargs)))
            log.roll_back(mark)
            if not ours and not isinstance(error, NeedsValues):
                raise
            return self.call_for_real(func, *real)
        finally:
            log.calls -= 1

    def _records(self, tensor: torch.Tensor) -> bool:
        """Whether gradients are to come to a tensor that is neither a parameter nor made of one."""
        if not tensor.requires_grad or isinstance(tensor, nn.Parameter):
            return False
        return tensor.is_leaf or tensor not in self.log

    def call_for_real(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function with real arguments; parameters are replaced by their values."""
        self.log.make_real(list(iter_tensors((args, kwargs))))
        return call_with_values(self.log, func, args, kwargs, leaves=True)


def _is_meta(device: Any) -> bool:
    return isinstance(device, (str, torch.device)) and torch.device(device).type == "meta"


def _is_ours(mode: CallMode, tensor: Any) -> bool:
    """Whether a tensor is on meta only for now."""
    return not isinstance(tensor, nn.Parameter) and tensor in mode.log


def _device(mode: CallMode, func: Any, args: Any, kwargs: Any) -> Any:
    if sys._getframe(2).f_globals.get("__name__") == parametrize.__name__:
        return func(*args, **kwargs)  # compares what comes of a parameter with that
    return _CPU if _is_ours(mode, args[0]) else func(*args, **kwargs)


def _is_on_host(mode: CallMode, func: Any, args: Any, kwargs: Any) -> Any:
    return True if _is_ours(mode, args[0]) else func(*args, **kwargs)


def _is_on_meta(mode: CallMode, func: Any, args: Any, kwargs: Any) -> Any:
    caller = sys._getframe(2)
    if caller.f_code is _TRUNCATED and args[0] in mode.log:
        _note_truncated(mode.log, args[0], caller.f_locals)
        return True
    return False if _is_ours(mode, args[0]) else func(*args, **kwargs)


#: torch's `trunc_normal_` draws until all numbers are in range, unless the tensor is on meta. It is
#: one step of the log, since how often it draws depends on values.
_TRUNCATED: Final = getattr(getattr(nn.init, "_no_grad_trunc_normal_", None), "__code__", None)


def _note_truncated(log: Log, tensor: torch.Tensor, given: Mapping[str, Any]) -> None:
    view = log.view(tensor)
    options = {name: given[name] for name in ("mean", "std", "a", "b")}
    generator = given.get("generator")
    step = Step(
        nn.init.trunc_normal_,
        (view,),
        {**options, "generator": generator},
        [None],
        {view.storage},
        {view.storage},
        torch.get_default_dtype(),
        generator or torch.default_generator,
    )
    log.append(step)


def _with_values(mode: CallMode, func: Any, args: Any, kwargs: Any) -> Any:
    return mode.call_for_real(func, args, kwargs)


def _with_memory(mode: CallMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Functions that give the memory of a tensor out, other than by a tensor."""
    result = mode.call_for_real(func, args, kwargs)
    mode.log.share(args[0])
    return result


def _cpu(mode: CallMode, func: Any, args: Any, kwargs: Any) -> Any:
    return (
        args[0]
        if args[0] in mode.log and len(args) == 1 and not kwargs
        else mode.call(func, args, kwargs)
    )


def _set_data(mode: CallMode, func: Any, args: Any, kwargs: Any) -> Any:
    """`tensor.data = other`: the tensor sees the storage of the other from now on."""
    mode.call(func, args, kwargs)
    mode.log.hold(args[0])


def _new_tensor(mode: CallMode, func: Any, args: Any, kwargs: Any) -> Any:
    """`Tensor.new_tensor` copies data without an operation that could be seen."""
    device = kwargs.get("device")
    if args[0] in mode.log and (device is None or _is_meta(device)):
        kwargs = {**kwargs, "device": _CPU}
    return mode.call(func, args, kwargs)


def _to(mode: CallMode, func: Any, args: Any, kwargs: Any) -> Any:
    """`Tensor.to` and the like: a tensor of the log is on the host already; no copy is made."""

    def translated(here: torch.device) -> tuple[Any, Any]:
        def translate(argument: Any) -> Any:
            if isinstance(argument, torch.Tensor):
                same = argument in mode.log or argument.device.type in ("cpu", "meta")
                return (here if same else argument.device, argument.dtype)
            if isinstance(argument, (str, torch.device)):
                return here if torch.device(argument).type in ("cpu", "meta") else argument
            return argument

        rest, named = list(args[1:]), dict(kwargs)
        if rest and isinstance(rest[0], torch.Tensor):
            rest[:1] = translate(rest[0])
        if isinstance(named.get("other"), torch.Tensor):
            named["device"], named["dtype"] = translate(named.pop("other"))
        elif named.get("device") is not None:
            named["device"] = translate(named["device"])
        return (args[0], *map(translate, rest)), named

    is_late = isinstance(args[0], torch.Tensor) and args[0] in mode.log
    here = _META if is_late else _CPU
    return mode.call(func, *translated(here), real=translated(_CPU))


def _getter(name: str) -> Any:
    """How a call of the function mode names the reading of an attribute."""
    return getattr(torch.Tensor, name).__get__


_SPECIAL: Final[dict[Any, Callable[[CallMode, Any, Any, Any], Any]]] = {
    _getter("device"): _device,
    _getter("is_cpu"): _is_on_host,
    _getter("is_meta"): _is_on_meta,
    torch.Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    torch.Tensor.new_tensor: _new_tensor,
    torch.Tensor.to: _to,
    torch.as_tensor: _to,
    torch.asarray: _to,
    torch.Tensor.cpu: _cpu,
    **dict.fromkeys(
        (
            torch.Tensor.__array__,
            torch.Tensor.__deepcopy__,
            torch.Tensor.__dlpack__,
            torch.Tensor.__dlpack_device__,
            torch.Tensor.__format__,
            torch.Tensor.__repr__,
            torch.Tensor.apply_,
            torch.Tensor.map2_,
            torch.Tensor.map_,
            torch.Tensor.new,
            torch.Tensor.numpy,
            torch.Tensor.tolist,
        ),
        _with_values,
    ),
    **dict.fromkeys(
        (
            torch.Tensor.__reduce_ex__,
            torch.Tensor.data_ptr,
            torch.Tensor.share_memory_,
            torch.Tensor.storage,
            torch.Tensor.untyped_storage,
        ),
        _with_memory,
    ),
}
