"""Running the operations of a log on meta, and noting them.

A dispatch mode of torch sees each operation, with a schema that says what it writes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from anydevice.init_empty.log import MAX_CONSTANT, Log
from anydevice.init_empty.steps import Step, View, flat_tensors, map_call
from anydevice.tensors import PLAIN_TYPES

__all__ = ["NeedsValues", "OperationMode"]

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
    sets_storage: bool


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


@functools.cache
def _traits(operation: Any) -> _Traits:
    schema = operation._schema
    names = {argument.name for argument in schema.arguments}
    written = tuple(
        (i, argument.name)
        for i, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    return _Traits(
        "device" in names,
        "pin_memory" in names,
        # The meta kernel of quantizing gives no quantized tensor.
        bool(schema.returns)
        and all("Tensor" in str(r.type) for r in schema.returns)
        and "quantize" not in schema.name,
        torch.Tag.nondeterministic_seeded in operation.tags,
        written,
        schema.name in _FILLS,
        schema.name == "aten::set_",
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
        if traits.takes_device:  # meta: asked for with the device of a parameter, or of the log
            args = tuple(map(_on_host, args))
            kwargs = {name: _on_host(value) for name, value in kwargs.items()}
        tensors = [*flat_tensors(args), *flat_tensors(list(kwargs.values()))]
        if log.calls:
            return self._dispatch(func, traits, args, kwargs, tensors)
        # Some do not come through the function mode: `torch.Tensor(2, 3)`, `Tensor.set_`.
        with torch._C.DisableTorchFunction():
            result = self._dispatch(func, traits, args, kwargs, tensors)
        if type(result) is torch.Tensor:
            log.hold(result)
        return result

    def _dispatch(
        self,
        func: Any,
        traits: _Traits,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[torch.Tensor],
    ) -> Any:
        """Put an operation off, or run it with values."""
        log = self.log
        known = [tensor for tensor in tensors if tensor in log]
        if not log.is_eager and (
            known or (not tensors and traits.takes_device and _can_wait(traits, kwargs))
        ):
            try:
                return self._put_off(func, traits, args, kwargs, tensors)
            except NeedsValues:
                if log.calls:
                    raise
        if traits.draws and log.calls and not log.is_eager:
            raise NeedsValues  # a call that runs once more must not draw twice
        if known:
            args, kwargs = map_call(self._value, args, kwargs, torch.Tensor)
        if traits.draws:
            log.catch_up(_generator(args, kwargs))
        return func(*args, **kwargs)

    def _value(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.log.value(tensor) if tensor in self.log else tensor

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
        written = list(flat_tensors(kept))
        if not _can_wait(traits, kwargs) or not all(t in log for t in written):
            raise NeedsValues
        sees_other = traits.sets_storage
        views: dict[int, Any] = {}
        stand_ins: dict[int, torch.Tensor] = {}
        for tensor in tensors:
            if not _is_simple(tensor):
                raise NeedsValues
            if tensor in log:
                views[id(tensor)] = log.view(tensor)
            elif tensor.is_meta:
                return func(*args, **kwargs)  # not ours, and without values
            elif sees_other:  # the two share memory afterwards
                views[id(tensor)] = tensor.detach()
                stand_ins[id(tensor)] = tensor.to(_META)
            elif tensor.nbytes > MAX_CONSTANT:
                raise NeedsValues
            else:
                views[id(tensor)] = tensor.detach().clone()
                stand_ins[id(tensor)] = tensor.to(_META)
        real_kwargs = dict(kwargs)
        if traits.takes_device:
            real_kwargs["device"], kwargs = _CPU, {**kwargs, "device": _META}
        if traits.takes_pin_memory:
            real_kwargs["pin_memory"] = kwargs["pin_memory"] = False
        meta_args = tuple(map(_storage_on_meta, args)) if sees_other else args
        with _undrawn(args, real_kwargs) if traits.draws else contextlib.nullcontext():
            result = args[0] if traits.fills else _on_meta(func, meta_args, kwargs, stand_ins)
        results = list(flat_tensors(result))
        if not all(_is_simple(tensor) for tensor in results):
            raise NeedsValues
        if not (log.calls or tensors) and not any(tensor.numel() for tensor in results):
            raise NeedsValues  # it costs nothing; torch makes one itself, to see a storage through
        new = [log.view(t) if t not in log else None for t in results]
        if sees_other:
            log.follow(args[0], views[id(args[0])])
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


def _storage_on_meta(argument: Any) -> Any:
    if not isinstance(argument, torch.UntypedStorage):
        return argument
    return torch.UntypedStorage(argument.nbytes(), device="meta")  # type: ignore[no-untyped-call]


def _is_simple(tensor: torch.Tensor) -> bool:
    """Whether a tensor is nothing but a view of one storage."""
    plain = type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided
    return plain and not tensor.is_quantized and not tensor.is_nested


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
