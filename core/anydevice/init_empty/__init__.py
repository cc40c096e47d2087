"""Building a model without its weights.

Inside `init_empty_weights` a tensor factory does not know whether its result becomes a parameter,
which needs no memory, or a buffer, which must be real. So factories, and operations on their
results, run on meta and are noted in a log (`anydevice.init_empty.log`). What turns out not to be a
parameter is made real: its part of the log runs on the host, with the same random numbers.
``nn.Parameter(torch.randn(100_000, 8192) * 0.02)`` costs nothing, and
``register_buffer("inv_freq", 1 / base ** (torch.arange(0, dim, 2) / dim))`` has its values.

Why not compute all that is no parameter at once, on the host? Because it is not known when a tensor
is made what becomes of it: a parameter of 100 GB begins as a random tensor of 100 GB. And the
numbers that a buffer draws depend on what the parameters before it drew.

Nothing is patched: torch's modes are the thread's own, and registration is heard of through torch's
hooks, which ask whether their thread is inside.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from anydevice.devices import META, Device, DeviceLike, resolve_device
from anydevice.init_empty.calls import CallMode
from anydevice.init_empty.leaving import Entered, finish_contexts
from anydevice.init_empty.log import Log
from anydevice.init_empty.operations import OperationMode
from anydevice.init_empty.steps import is_simple
from anydevice.tensors import move_tensor

__all__ = ["init_empty_weights", "init_on_device"]


@contextlib.contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Build models in this context with their parameters on meta: no memory, no time.

    Buffers, and other tensors that are no parameters, have the values of a plain build; random ones
    too, under the same seed. When the context ends, the random generator is as after a plain build
    if a buffer needed random numbers, else as before. The context holds for this thread only. Load
    the weights with `load_checkpoint_and_dispatch`.

    States of generators that are read inside (``torch.get_rng_state``) can be set again inside, for
    the same numbers as in a plain build. Their bytes are others, since draws are put off; they are
    of no use after the context has ended.

    Args:
        include_buffers: whether buffers are empty too. By default they are real, since those that
            are not in a checkpoint could not be recovered.

    Example:
        >>> from torch import nn
        >>> from anydevice import init_empty_weights
        >>> with init_empty_weights():
        ...     model = nn.Linear(100_000, 100_000)
        >>> model.weight.is_meta
        True
    """
    with init_on_device(META, include_buffers):
        yield


@contextlib.contextmanager
def init_on_device(device: DeviceLike, include_buffers: bool | None = None) -> Iterator[None]:
    """Build models in this context with their parameters on a device.

    Args:
        device: any spelling.
        include_buffers: whether buffers, and all other tensors made inside, are there too.

    Raises:
        UnknownDeviceError: the device is not on this machine.

    Example:
        >>> from torch import nn
        >>> from anydevice import init_on_device
        >>> with init_on_device("cpu"):
        ...     model = nn.Linear(4, 4)
        >>> model.weight.device.type
        'cpu'
    """
    place = resolve_device(device)
    _listen()
    outer = list(_local.contexts)
    log = outer[-1].log if outer else None
    if log is not None or place != META or include_buffers:
        opened = _opened(_Context(place, bool(include_buffers), log), outer)
    else:
        opened = _logged(_Context(place, False, Log()), outer)
    with opened:
        yield


@contextlib.contextmanager
def _opened(context: _Context, outer: list[_Context]) -> Iterator[None]:
    """Open a context that has no log, or that of an outer one."""
    try:
        try:
            _local.contexts.append(context)
            place = context.device.torch
            with torch.device(place) if context.buffers else contextlib.nullcontext():
                try:
                    yield
                except BaseException as error:
                    finish_contexts(error)
                    raise
        finally:
            _local.contexts[:] = outer
    finally:
        _local.contexts[:] = outer  # an interrupt may have cut the first short


@contextlib.contextmanager
def _logged(context: _Context, outer: list[_Context]) -> Iterator[None]:
    """Open a context with a log of its own."""
    log = context.log
    assert log is not None
    entered = Entered(OperationMode(log), CallMode(log))

    def close() -> None:
        entered.leave()
        _local.contexts[:] = outer
        log.put_back()

    try:
        try:
            _local.contexts.append(context)
            entered.enter()
            yield
            entered.leave()
            log.make_all_real()
        except BaseException as error:
            finish_contexts(error)
            raise
        finally:
            close()
    finally:
        close()


@dataclasses.dataclass
class _Context:
    """A context that is open: where parameters go, and the log of the outermost empty one."""

    device: Device
    buffers: bool
    log: Log | None
    #: What became of the parameters that had to be replaced, by id, so that ties hold.
    replaced: dict[int, tuple[weakref.ref[nn.Parameter], weakref.ref[nn.Parameter]]] = (
        dataclasses.field(default_factory=dict)
    )


class _Local(threading.local):
    def __init__(self) -> None:
        self.contexts: list[_Context] = []


_local = _Local()
_listening = threading.Lock()
_handles: list[Any] = []


def _listen() -> None:
    """Hear of every registration from now on; torch's hooks are the same for all threads."""
    with _listening:
        if not _handles:
            _handles.append(torch_module.register_module_parameter_registration_hook(_on_parameter))
            _handles.append(torch_module.register_module_buffer_registration_hook(_on_buffer))


def _on_parameter(_module: nn.Module, _name: str, parameter: Any) -> Any:
    context = _local.contexts[-1] if _local.contexts else None
    if context is None or parameter is None or nn.parameter.is_lazy(parameter):
        return None
    with _undisturbed(context.log):
        return _placed(context, parameter)


def _placed(context: _Context, parameter: nn.Parameter) -> nn.Parameter | None:
    """The parameter to register in place of another; None for that itself."""
    log = context.log
    if context.device == META and parameter.is_meta:
        if log is not None:
            log.hold(parameter)
        return None
    if parameter.device == context.device.torch:
        return None
    known = context.replaced.get(id(parameter))
    old, new = (None, None) if known is None else (known[0](), known[1]())
    if new is None or old is not parameter:
        value = parameter.detach()
        if log is not None and parameter in log:
            value = log.value(value)
        if context.device != META:
            moved = move_tensor(value, context.device)
        elif log is not None and value.device.type == "cpu" and is_simple(value):
            moved = log.adopt(value)
        else:
            moved = value.to("meta")
        new = torch.Tensor._make_subclass(type(parameter), moved, parameter.requires_grad)
        new.__dict__.update(parameter.__dict__)
        if log is not None and context.device == META:
            log.hold(new)
        context.replaced[id(parameter)] = weakref.ref(parameter), weakref.ref(new)
    return new


def _on_buffer(_module: nn.Module, _name: str, buffer: Any) -> Any:
    context = _local.contexts[-1] if _local.contexts else None
    if context is None or buffer is None:
        return None
    log = context.log
    if log is not None and not (context.buffers and context.device == META):
        log.make_real([buffer], even_owned=True)
    with _undisturbed(log):
        if not context.buffers:
            return None
        if context.device == META:
            is_new = log is not None and buffer in log
            return torch.empty_like(buffer, device="meta") if is_new else buffer.to("meta")
        return move_tensor(buffer, context.device)


def _undisturbed(log: Log | None) -> contextlib.AbstractContextManager[None]:
    """Let the operations inside go straight to torch."""
    return contextlib.nullcontext() if log is None else log.at_work()
