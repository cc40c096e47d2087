"""Running the operations of a log on meta, and noting them.

A dispatch mode of torch sees each operation, with a schema that says what it writes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from anydevice.init_empty.log import Log
from anydevice.init_empty.real_storages import MAX_CONSTANT, copied
from anydevice.init_empty.steps import Step, View, flat_tensors, is_simple, map_call
from anydevice.init_empty.values import call_with_values

__all__ = ["NeedsValues", "OperationMode", "is_transforming"]

_CPU: Final = torch.device("cpu")
_META: Final = torch.device("meta")


class NeedsValues(Exception):  # noqa: N818 - a signal from the dispatch mode to the function mode
    """An operation cannot be put off: it needs values."""


class _Traits(NamedTuple):
    """What the schema of an operation says."""

    takes_device: bool
    takes_pin_memory: bool
    gives_tensors: bool
    draws: bool
    written: tuple[tuple[int, str], ...]
    fills: bool
    is_view: bool
    is_cast_by_autocast: bool
    is_composite: bool


#: In-place operations without tensors among their other arguments: on meta there is nothing to do.
_FILLS: Final = frozenset(
    "aten::" + name
    for name in (
        "fill_",
        "normal_",
        "uniform_",
        "zero_",
        "random_",
        "exponential_",
        "cauchy_",
        "log_normal_",
    )
)


#: These give a tensor other memory.
_CHANGE_STORAGE: Final = frozenset(("aten::set_", "aten::resize_", "aten::resize_as_"))


def is_transforming() -> bool:
    """Whether `torch.func` is at work, whose tensors hold those of the log inside."""
    return torch._C._functorch.peek_interpreter_stack() is not None


@functools.cache
def _traits(operation: Any) -> _Traits:
    schema = operation._schema
    arguments = schema.arguments
    names = {argument.name for argument in schema.arguments}
    written = tuple(
        (i, argument.name)
        for i, argument in enumerate(arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    changes_storage = schema.name in _CHANGE_STORAGE or any(a.is_out for a in arguments)
    aliases = any(r.alias_info is not None for r in schema.returns)
    return _Traits(
        "device" in names,
        "pin_memory" in names,
        # The meta kernel of quantizing gives no quantized tensor.
        bool(schema.returns)
        and all("Tensor" in str(r.type) for r in schema.returns)
        and "quantize" not in schema.name
        and not changes_storage,
        torch.Tag.nondeterministic_seeded in operation.tags,
        written,
        schema.name in _FILLS,
        (aliases and not written)
        or (torch.Tag.inplace_view in operation.tags and not changes_storage),
        not (written or aliases or "device" in names or schema.name == "aten::clone"),
        torch._C._dispatch_has_kernel_for_dispatch_key(
            operation.name(), "CompositeImplicitAutograd"
        ),
    )


class OperationMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs the operations of a log on meta."""

    def __init__(self, log: Log) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = log

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        log, kwargs = self.log, dict(kwargs or {})
        if log.is_off:
            return func(*args, **kwargs)
        traits = _traits(func)
        if traits.is_composite:  # of smaller operations, which inference mode leaves together
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if traits.takes_device:  # meta: asked for with the device of a parameter, or of the log
            args = tuple(map(_on_host, args))
            kwargs = {name: _on_host(value) for name, value in kwargs.items()}
        # Some do not come through the function mode: `torch.Tensor(2, 3)`, `Tensor.set_`.
        if log.calls:
            return self._held(func, traits, args, kwargs)
        with torch._C.DisableTorchFunction():
            return self._held(func, traits, args, kwargs)

    def _held(self, *operation: Any) -> Any:
        result = self._dispatch(*operation)
        for tensor in flat_tensors(result):
            if type(tensor) is not nn.Parameter:
                self.log.hold(tensor)
        return result

    def _dispatch(
        self, func: Any, traits: _Traits, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Put an operation off, or run it with values."""
        log = self.log
        tensors = flat_tensors(args)
        for value in kwargs.values():
            tensors += flat_tensors(value)
        known = [tensor for tensor in tensors if tensor in log]
        if traits.is_view and known:
            return func(*args, **kwargs)
        if not log.is_eager:
            is_inside = log.calls and not is_transforming()
            try:
                if known or (not tensors and traits.takes_device):
                    return self._put_off(func, traits, args, kwargs, tensors)
            except NeedsValues:
                if is_inside:
                    raise
            if is_inside and (known or traits.draws):
                raise NeedsValues  # a call that runs once more must not draw, or write, twice
            if not is_transforming():
                log.make_real(known)
        if traits.draws:
            log.catch_up(_generator(args, kwargs))
        return call_with_values(log, func, args, kwargs)

    def _put_off(
        self,
        func: Any,
        traits: _Traits,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[torch.Tensor],
    ) -> Any:
        """Run an operation on meta, and note it.

        Raises:
            NeedsValues: it must run for real.
        """
        log = self.log
        kept = [args[i] if i < len(args) else kwargs.get(name) for i, name in traits.written]
        written = flat_tensors(kept)
        if not _can_wait(traits, kwargs) or not all(map(log.is_late, written)):
            raise NeedsValues
        if log.has_autocast and traits.is_cast_by_autocast:
            raise NeedsValues  # on the host, autocast chooses other dtypes than on meta
        views: dict[int, Any] = {}
        stand_ins: dict[int, torch.Tensor] = {}
        for tensor in tensors:
            if not is_simple(tensor):
                raise NeedsValues
            if tensor in log:
                is_late = log.is_late(tensor)
                views[id(tensor)] = log.view(tensor) if is_late else _copy(log.value(tensor))
            elif tensor.is_meta:
                return func(*args, **kwargs)  # not ours, and without values
            else:
                views[id(tensor)] = _copy(tensor)
                stand_ins[id(tensor)] = tensor.to(_META)
        real_kwargs = dict(kwargs)
        if traits.takes_device:
            real_kwargs["device"], kwargs = _CPU, {**kwargs, "device": _META}
        if traits.takes_pin_memory:
            real_kwargs["pin_memory"] = kwargs["pin_memory"] = False
        with _undrawn(args, real_kwargs) if traits.draws else contextlib.nullcontext():
            result = args[0] if traits.fills else _on_meta(func, args, kwargs, stand_ins)
        results = flat_tensors(result)
        if not all(map(is_simple, results)):
            raise NeedsValues
        if not tensors and not any(tensor.numel() for tensor in results):
            raise NeedsValues  # it costs nothing, and is often given another storage
        new = [log.view(t) if t not in log else None for t in results]
        writes = {log.view(t).storage for t in written} | {v.storage for v in new if v is not None}
        if writes:
            log.append(
                Step(
                    func,
                    *map_call(lambda t: views[id(t)], args, real_kwargs, torch.Tensor),
                    new,
                    {v.storage for v in views.values() if type(v) is View},
                    writes,
                    torch.get_default_dtype(),
                    _generator(args, real_kwargs) if traits.draws else None,
                )
            )
        return result


def _on_host(argument: Any) -> Any:
    return _CPU if isinstance(argument, torch.device) and argument == _META else argument


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """What the log keeps of a tensor that code can change."""
    if tensor.nbytes > MAX_CONSTANT:
        raise NeedsValues
    return copied(tensor)


def _on_meta(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], stand_ins: dict[int, torch.Tensor]
) -> Any:
    if stand_ins:
        args, kwargs = map_call(lambda t: stand_ins.get(id(t), t), args, kwargs, torch.Tensor)
    try:
        return func(*args, **kwargs)
    except Exception:  # noqa: BLE001 - no meta kernel, or values are needed: a real run tells
        raise NeedsValues from None


@contextlib.contextmanager
def _undrawn(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Leave generators as they are: some operations draw from the host's even on meta."""
    generators = {torch.default_generator, _generator(args, kwargs)}
    states = [(generator, generator.get_state()) for generator in generators]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


def _can_wait(traits: _Traits, kwargs: Mapping[str, Any]) -> bool:
    device, layout = kwargs.get("device"), kwargs.get("layout")
    on_host = device is None or torch.device(device).type in ("cpu", "meta")
    return traits.gives_tensors and on_host and layout in (None, torch.strided)


def _generator(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Generator:
    given = next((a for a in (*args, *kwargs.values()) if isinstance(a, torch.Generator)), None)
    return given if given is not None else torch.default_generator
