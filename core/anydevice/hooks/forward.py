"""What stands as ``forward`` in a hooked module, and as its own forward next to it.

Neither holds the module: a module in a reference cycle would keep its memory, on devices too, until
the garbage collector runs.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from anydevice.errors import ModelError
from anydevice.hooks.compiling import (
    current_compiler,
    is_compiling,
    never_traced,
    run_outside_graph,
    thread,
)

if TYPE_CHECKING:
    from anydevice.hooks.base import ModelHook

__all__ = [
    "HOOK",
    "ORIGINAL",
    "HookedForward",
    "OfModule",
    "OwnForward",
    "PartForward",
    "has_own_forward",
    "own_forward",
]

#: Where a hooked module keeps its hook and its own forward. Other libraries read these names.
HOOK = "_hf_hook"
ORIGINAL = "_old_forward"


class _Presence(Protocol):
    """Says whether weights are on their device now.

    Attributes:
        is_entered: whether they are.
    """

    @property
    def is_entered(self) -> bool: ...


class OfModule:
    """Refers to a module without holding it; a copy refers to the module's copy."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    @property
    def __self__(self) -> nn.Module:
        """The module.

        Raises:
            ModelError: it was deleted.
        """
        module = self._module()
        if module is None:
            raise ModelError(
                "the module of this forward was deleted: keep a reference to the module, not only "
                "to its forward"
            )
        return module

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.__self__,)


class OwnForward(OfModule):
    """A module's own forward, as its class defines it."""

    @property
    def __func__(self) -> Callable[..., Any]:
        """The function."""
        function: Callable[..., Any] = type(self.__self__).forward
        return function

    @property
    def __name__(self) -> str:
        """Its name."""
        return getattr(self.__func__, "__name__", "forward")

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        """Its docstring."""
        return self.__func__.__doc__

    @property
    def __signature__(self) -> inspect.Signature:
        """Its signature, without the module."""
        return inspect.signature(self.__func__.__get__(self.__self__))

    @never_traced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        module = self.__self__
        return type(module).forward(module, *args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return type(other) is OwnForward and other._module == self._module

    def __hash__(self) -> int:
        return hash(self._module)


def own_forward(module: nn.Module) -> Callable[..., Any]:
    """A module's forward, before a hook is attached, in a form that does not hold the module."""
    forward: Callable[..., Any] = module.forward
    function = getattr(forward, "__func__", None)
    if function is not None and function is getattr(type(module), "forward", None):
        return OwnForward(module)
    return forward  # put into the instance by the user


def has_own_forward(module: nn.Module) -> bool:
    """Whether a module can be called; a `ModuleList`, for example, cannot."""
    if isinstance(module, torch.jit.ScriptModule):
        return hasattr(module, "forward")
    return "forward" in module.__dict__ or type(module).forward is not nn.Module.forward


class HookedForward(OfModule):
    """What stands as ``forward`` in a hooked module.

    An object rather than a closure, so that a deep copy or a pickle of the module has one that is
    bound to the copy, and so that `inspect.signature` sees the module's own forward.
    """

    @never_traced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward within its hook."""
        module = self._module()
        if module is None:
            return self.__self__  # raises
        state = module.__dict__
        hook: ModelHook = state[HOOK]
        forward = state[ORIGINAL]
        if current_compiler() is not None or thread.suspended is not None:
            return run_outside_graph(hook.run_forward, module, forward, args, kwargs)
        if type(forward) is OwnForward:
            forward = MethodType(type(module).forward, module)
        return hook.run_forward(module, forward, args, kwargs)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The module's own forward."""
        original: Callable[..., Any] = self.__self__.__dict__[ORIGINAL]
        return original

    @property
    def __name__(self) -> str:
        """As the module's own."""
        return "forward"


class PartForward(HookedForward):
    """`forward` of a module whose weights are loaded for the forward of a module around it.

    The compiler traces it as the module's own forward where these weights are there already, so
    that a block is one graph although its parts are hooked too.

    Args:
        module: the module.
        group: the weights; any object that knows whether they are there.
    """

    def __init__(self, module: nn.Module, group: _Presence) -> None:
        super().__init__(module)
        self.group = group

    @property
    def forward(self) -> MethodType:
        """What stands as ``forward``: the compiler takes methods of several objects for the same.

        Of callable objects it would compile the block around them for each again.
        """
        kind: Any = type(self.__self__)
        return MethodType(_part_function(kind), self)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.__self__, self.group)


#: Weak: torch's parametrizations make a class for a module, and its functions hold that module.
_part_functions: weakref.WeakKeyDictionary[type[nn.Module], Callable[..., Any]]
_part_functions = weakref.WeakKeyDictionary()


def _part_function(kind: type[nn.Module]) -> Callable[..., Any]:
    """The function of modules of one class; with its signature."""
    found = _part_functions.get(kind)
    if found is None:
        found = _part_functions[kind] = _make_part_function(kind)
    return found


def _make_part_function(kind: type[nn.Module]) -> Callable[..., Any]:
    @functools.wraps(kind.forward)
    def forward(part: PartForward, /, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() and part.group.is_entered:
            module: Any = part._module()
            return type(module).forward(module, *args, **kwargs)
        return HookedForward.__call__(part, *args, **kwargs)

    return forward
