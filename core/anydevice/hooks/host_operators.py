"""Finding modules whose code uses operators that take some of their tensors on the host only.

``pack_padded_sequence`` wants its lengths on the host; a hook has all arguments on the device. The
code of such modules runs aligned (`anydevice.hooks.cross_device`), which sends these tensors back.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

__all__ = ["uses_host_operators"]

#: Names in the code of who uses such an operator.
_NAMES = frozenset({"pack_padded_sequence", "tensor_split", "numpy", "asarray", "array"})
#: Most functions that are looked at for one class.
_MOST = 300


def uses_host_operators(module: nn.Module) -> bool:
    """Whether the code of a module's class, or a function that it calls, names such an operator.

    Args:
        module: the module; torch's own classes never do.
    """
    kind: Any = type(module)
    return _class_uses(kind)


@functools.lru_cache(maxsize=4096)
def _class_uses(kind: type) -> bool:
    if _is_torch(kind.__module__):
        return False
    package = kind.__module__.partition(".")[0]
    seen: set[int] = set()
    todo: list[Any] = [
        value
        for base in kind.__mro__
        if not _is_torch(base.__module__)
        for value in vars(base).values()
    ]
    while todo and len(seen) < _MOST:
        function = _function(todo.pop())
        if function is None or id(function) in seen:
            continue
        seen.add(id(function))
        names = set(_names(function.__code__))
        if names & _NAMES:
            return True
        for name in names:  # helpers beside the class
            helper = _function(function.__globals__.get(name))
            if helper is not None and helper.__module__.partition(".")[0] == package:
                todo.append(helper)
    return False


def _function(value: Any) -> types.FunctionType | None:
    value = getattr(value, "__func__", value)
    value = getattr(value, "__wrapped__", value)
    return value if type(value) is types.FunctionType and value.__module__ else None


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _is_torch(module: str) -> bool:
    return module.partition(".")[0] in ("torch", "builtins", "typing")
