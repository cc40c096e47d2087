"""Building a model without its weights.

Inside `init_empty_weights` a tensor factory does not know whether its result will be a parameter,
which needs no memory, or a buffer, which must be real. So factories, and operators on their
results, run on meta and are written down; what turns out not to be a parameter is made real by
running its part of the record. ``nn.Parameter(torch.randn(100_000, 8192) * 0.02)`` then costs
nothing, and ``register_buffer("inv_freq", 1 / base ** (torch.arange(0, dim, 2) / dim))`` has its
values.

Nothing is patched: the record is a `torch.overrides.TorchFunctionMode`, which is the thread's own,
and registration is heard of through torch's own hooks, which ask whether their thread is inside.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode

from anydevice.devices import META, Device, DeviceLike, resolve_device
from anydevice.tensors import iter_tensors, map_tensors, move_tensor

__all__ = ["init_empty_weights", "init_on_device"]


@contextlib.contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Build models in this context with their parameters on meta: no memory, no time.

    The context is this thread's alone. Load the weights with `load_checkpoint_and_dispatch`.

    Args:
        include_buffers: whether buffers are empty too. By default they are real, since those that
            no checkpoint holds could not be had back.

    Example::

        with init_empty_weights():
            model = nn.Sequential(*[nn.Linear(10000, 10000) for _ in range(1000)])
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
    """
    place = resolve_device(device)
    _listen()
    record = _Record() if place == META and not include_buffers else None
    _local.contexts.append(_Context(place, bool(include_buffers), record))
    try:
        with contextlib.ExitStack() as stack:
            if include_buffers:
                stack.enter_context(torch.device(place.torch))
            elif record is not None:
                stack.enter_context(record)
            yield
        if record is not None:
            record.make_all_real()
    finally:
        _local.contexts.pop()


@dataclasses.dataclass
class _Context:
    device: Device
    buffers: bool
    record: _Record | None
    #: What became of the parameters that had to be replaced, by id, so that ties hold.
    replaced: dict[int, tuple[nn.Parameter, nn.Parameter]] = dataclasses.field(default_factory=dict)


class _Local(threading.local):
    def __init__(self) -> None:
        self.contexts: list[_Context] = []


_local = _Local()
_listening = threading.Lock()
_handles: list[Any] = []


# ---------------------------------------------------------------------- registration


def _listen() -> None:
    """Hear of every registration from now on; torch's way to be told has no thread of its own."""
    with _listening:
        if not _handles:
            _handles.append(torch_module.register_module_parameter_registration_hook(_on_parameter))
            _handles.append(torch_module.register_module_buffer_registration_hook(_on_buffer))


def _on_parameter(_module: nn.Module, _name: str, parameter: Any) -> Any:
    context = _local.contexts[-1] if _local.contexts else None
    if context is None or parameter is None or nn.parameter.is_lazy(parameter):
        return None
    if parameter.device == context.device.torch:
        return None
    known = context.replaced.get(id(parameter))
    if known is None:
        value = parameter.detach()
        moved = value.to("meta") if context.device == META else move_tensor(value, context.device)
        new = torch.Tensor._make_subclass(type(parameter), moved, parameter.requires_grad)
        new.__dict__.update(parameter.__dict__)
        # The old one is kept: its id must not become another's while the context lasts.
        known = context.replaced[id(parameter)] = (parameter, new)
    return known[1]


def _on_buffer(_module: nn.Module, _name: str, buffer: Any) -> Any:
    context = _local.contexts[-1] if _local.contexts else None
    if context is None or buffer is None:
        return None
    if context.record is not None:
        context.record.make_real([buffer])
    if context.buffers and buffer.device != context.device.torch:
        return buffer.to("meta") if context.device == META else move_tensor(buffer, context.device)
    return None


# ---------------------------------------------------------------------- the record

#: Functions whose result depends on no tensor: they run on meta, and are written down.
_FACTORIES = frozenset(
    {
        torch.arange,
        torch.empty,
        torch.empty_strided,
        torch.eye,
        torch.full,
        torch.linspace,
        torch.logspace,
        torch.normal,
        torch.ones,
        torch.rand,
        torch.randint,
        torch.randn,
        torch.randperm,
        torch.range,
        torch.tril_indices,
        torch.triu_indices,
        torch.zeros,
        torch.hann_window,
        torch.hamming_window,
        torch.blackman_window,
        torch.bartlett_window,
        torch.kaiser_window,
    }
)
#: Functions that need the numbers themselves.
_NEEDS_VALUES = frozenset(
    {
        torch.Tensor.__array__,
        torch.Tensor.__bool__,
        torch.Tensor.__complex__,
        torch.Tensor.__contains__,
        torch.Tensor.__float__,
        torch.Tensor.__format__,
        torch.Tensor.__index__,
        torch.Tensor.__int__,
        torch.Tensor.__repr__,
        torch.Tensor.__deepcopy__,
        torch.Tensor.__reduce_ex__,
        torch.Tensor.cpu,
        torch.Tensor.data_ptr,
        torch.Tensor.item,
        torch.Tensor.numpy,
        torch.Tensor.tolist,
        torch.Tensor.untyped_storage,
        torch.equal,
        torch.allclose,
        torch.is_nonzero,
    }
)


@dataclasses.dataclass
class _Deferred:
    """Stands in a recorded call for a tensor of the record, which it does not keep alive."""

    serial: int


@dataclasses.dataclass
class _Step:
    """One call: what it was, which storages it read, and which it made or wrote to."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[int]
    reads: set[int]
    writes: set[int]


class _Record(TorchFunctionMode):
    """Runs factories on meta and writes down how to get the real thing."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[_Step] = []
        #: Tensors of the record that somebody holds, by id, with a number that is never reused.
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._serials = itertools.count()
        #: All storages of the record, by address: kept, so that no address is reused. They are
        #: empty.
        self._storages: dict[int, torch.UntypedStorage] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = list(iter_tensors((args, kwargs)))
        inputs = [t for t in given if self._is_known(t)]
        if not inputs:
            if func in _FACTORIES and not given:
                on_meta = func(*args, **{**kwargs, "device": "meta", "pin_memory": False})
                self._note(func, args, kwargs, [], on_meta)
                return on_meta
            return func(*args, **kwargs)
        if func in _NEEDS_VALUES or _names_device(func, args, kwargs):
            self.make_real(inputs)
            return func(*args, **kwargs)
        before = [t._version for t in inputs]
        try:
            result = func(*args, **kwargs)
        except (RuntimeError, ValueError, TypeError):  # no kernel for meta, or values are needed
            self.make_real(inputs)
            return func(*args, **kwargs)
        written = [t for t, version in zip(inputs, before, strict=True) if t._version != version]
        self._note(func, args, kwargs, written, result)
        return result

    def make_all_real(self) -> None:
        """Make real what somebody still holds and is no parameter."""
        held = [reference() for reference, _ in list(self._known.values())]
        self.make_real([tensor for tensor in held if tensor is not None])
        self._steps.clear()

    def make_real(self, tensors: list[torch.Tensor]) -> None:
        """Give tensors that stand on meta their values; they stay the same objects.

        So do those that were computed from the same steps: each step runs once, so that random
        numbers agree, and what is changed in place later is not read again.
        """
        wanted = [t for t in tensors if self._is_known(t)]
        if not wanted:
            return
        touched = {s for step in self._needed(self._places(wanted)) for s in step.writes}
        for step in self._steps:
            if step.reads & touched:
                touched |= step.writes
        held = [reference() for reference, _ in list(self._known.values())]
        wanted = [t for t in held if t is not None and self._place(t) in touched]
        made = self._run(self._needed(self._places(wanted)))
        for tensor in wanted:
            _, serial = self._known.pop(id(tensor))
            real = torch.Tensor._make_subclass(
                type(tensor), made[serial].detach(), tensor.requires_grad
            )
            real.__dict__.update(tensor.__dict__)
            torch._C._swap_tensor_impl(tensor, real)

    # ------------------------------------------------------------------ writing down

    def _is_known(self, tensor: torch.Tensor) -> bool:
        entry = self._known.get(id(tensor))
        return entry is not None and entry[0]() is tensor

    def _number(self, tensor: torch.Tensor) -> int:
        """The number of a tensor of the record; a new one is taken into it."""
        key = id(tensor)
        if self._is_known(tensor):
            return self._known[key][1]
        serial = next(self._serials)
        self._known[key] = (weakref.ref(tensor), serial)
        return serial

    def _note(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        written: list[torch.Tensor],
        result: Any,
    ) -> None:
        def stand_in(tensor: torch.Tensor) -> Any:
            return _Deferred(self._number(tensor)) if self._is_known(tensor) else tensor

        reads = self._places([t for t in iter_tensors((args, kwargs)) if t.is_meta])
        stored_args = tuple(map_tensors(stand_in, arg) for arg in args)
        stored_kwargs = {name: map_tensors(stand_in, value) for name, value in kwargs.items()}
        results = [t for t in iter_tensors(result) if not isinstance(t, nn.Parameter)]
        numbers = [self._number(t) if t.is_meta else next(self._serials) for t in results]
        writes = self._places([t for t in (*written, *results) if t.is_meta])
        self._steps.append(_Step(func, stored_args, stored_kwargs, numbers, reads, writes))

    def _place(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        self._storages.setdefault(storage._cdata, storage)
        return int(storage._cdata)

    def _places(self, tensors: list[torch.Tensor]) -> set[int]:
        return {self._place(tensor) for tensor in tensors}

    # ------------------------------------------------------------------ running

    def _needed(self, places: set[int]) -> list[_Step]:
        """The steps that the content of some storages comes from, in order."""
        places = set(places)
        steps = []
        for step in reversed(self._steps):
            if step.writes & places:
                steps.append(step)
                places |= step.reads
        return steps[::-1]

    def _run(self, steps: list[_Step]) -> dict[int, torch.Tensor]:
        made: dict[int, torch.Tensor] = {}

        def real(data: Any) -> Any:
            if isinstance(data, _Deferred):
                return made[data.serial]
            if isinstance(data, (list, tuple)):
                items = [real(item) for item in data]
                return type(data)(*items) if hasattr(data, "_fields") else type(data)(items)
            if type(data) is dict:
                return {key: real(value) for key, value in data.items()}
            return data

        with torch._C.DisableTorchFunction(), torch.no_grad():
            for step in steps:
                result = step.function(*real(step.args), **real(step.kwargs))
                tensors = [t for t in iter_tensors(result) if not isinstance(t, nn.Parameter)]
                made.update(zip(step.results, tensors, strict=True))
        return made


def _names_device(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call on a tensor of the record asks for a real device."""
    if kwargs.get("device") is not None:
        return True
    return func is torch.Tensor.to and any(
        isinstance(arg, (str, torch.device)) or (isinstance(arg, torch.Tensor) and not arg.is_meta)
        for arg in args[1:]
    )
