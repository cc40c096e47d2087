"""Searching the code of a module's class for what hooks must take care of.

``pack_padded_sequence`` needs its lengths on the host; a hook has all arguments on the device. The
code of such modules runs aligned (`anydevice.hooks.cross_device`), which sends these tensors back.
A function compiled by TorchScript cannot be aligned, nor can code that is run again in backward: a
module that uses weights of its parts there has all of them where it runs.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Final, TypeAlias

import torch
from torch import nn

__all__ = ["needs_all_weights", "runs_in_backward", "uses_host_operators"]

_Functions: TypeAlias = "tuple[tuple[frozenset[str], bool], ...]"

#: Names in the code of modules that have code run in backward.
_IN_BACKWARD = frozenset({"checkpoint", "checkpoint_sequential", "apply"})

#: Names in the code of modules that use an operator which needs host tensors.
_HOST_OPERATORS = frozenset(
    {"pack_padded_sequence", "pad_packed_sequence", "tensor_split", "numpy", "asarray", "array"}
)
#: Names of weights in the code of modules that use those of a part.
_WEIGHTS = frozenset({"weight", "bias"})
#: Most functions that are looked at for one class.
_MOST = 300


def uses_host_operators(module: nn.Module) -> bool:
    """Whether the code of a module's class, or a function that it calls, names such an operator."""
    kind: Any = type(module)
    return any(names & _HOST_OPERATORS for names, _ in _functions_of(kind))


def needs_all_weights(module: nn.Module) -> bool:
    """Whether the code of a module's class uses weights where they cannot be aligned.

    That is, it gives them to a function compiled by TorchScript, or uses them in code that
    `torch.utils.checkpoint` runs again in backward.
    """
    kind: Any = type(module)
    functions = _functions_of(kind)
    if any(scripted and names & _WEIGHTS for names, scripted in functions):
        return True
    recomputes = any("checkpoint" in names for names, _ in functions)
    return recomputes and any(names & _WEIGHTS for names, _ in functions)


def runs_in_backward(module: nn.Module) -> bool:
    """Whether backward may run code of a module: recomputation, or an autograd function."""
    kind: Any = type(module)
    return any(names & _IN_BACKWARD for names, _ in _functions_of(kind))


#: Weak: torch's parametrizations make a class for a module, and its functions hold that module.
_found: Final[weakref.WeakKeyDictionary[type, _Functions]] = weakref.WeakKeyDictionary()


def _functions_of(kind: type) -> _Functions:
    """Names in the code of a class's forward, and of the methods and helpers that it calls.

    And whether one of the names stands for a function compiled by TorchScript.
    """
    found = _found.get(kind)
    if found is None:
        found = _found[kind] = tuple(_search(kind))
    return found


def _search(kind: type) -> Iterable[tuple[frozenset[str], bool]]:
    package = kind.__module__.partition(".")[0]
    seen: dict[int, tuple[frozenset[str], bool]] = {}
    methods: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.partition(".")[0] not in ("torch", "builtins", "typing"):
            methods.update(vars(base))
    todo: list[Any] = [methods.get("forward"), methods.get("__call__")]
    while todo and len(seen) < _MOST:
        function = _function(todo.pop())
        if function is None or id(function) in seen:
            continue
        names = frozenset(_names(function.__code__))
        used = [function.__globals__[name] for name in names if name in function.__globals__]
        scripted = any(isinstance(value, torch.jit.ScriptFunction) for value in used)
        seen[id(function)] = (names, scripted)
        todo += [methods[name] for name in names if name in methods]
        helpers = (_function(value) for value in used)
        todo += [h for h in helpers if h is not None and h.__module__.partition(".")[0] == package]
    return seen.values()


def _function(value: Any) -> types.FunctionType | None:
    value = getattr(value, "__func__", value)
    if isinstance(value, torch.jit.ScriptFunction):
        return None
    value = getattr(value, "__wrapped__", value)
    return value if type(value) is types.FunctionType and value.__module__ else None


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    yield from code.co_freevars
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
