"""Which modules stay whole: those of named or declared classes, and repeated layers."""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Collection
from typing import Final

from torch import nn

from anydevice.placement.scripted import is_scripted
from anydevice.text import list_some, suggest
from anydevice.weights import iter_modules

__all__ = ["Splitter", "find_blocks"]

_LISTS: Final = (nn.ModuleList, nn.Sequential)


def find_blocks(
    model: nn.Module, no_split_module_classes: Collection[str] | str | None = None
) -> list[str]:
    """Find the modules that must not be split over devices.

    Args:
        model: the model.
        no_split_module_classes: names of their classes. None finds them: classes that the model or
            a submodule declares as ``_no_split_modules``; where there are none of those, the
            children of one class in a `ModuleList` or `Sequential`.

    Returns:
        Their full names in the model's order, none inside another.

    Example:
        >>> from torch import nn
        >>> from anydevice.placement import find_blocks
        >>> layers = [nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2)]
        >>> find_blocks(nn.Sequential(nn.Embedding(4, 2), nn.ModuleList(layers)))
        ['1.0', '1.1']
    """
    splitter = Splitter(model, no_split_module_classes)
    names = []
    stack: list[tuple[str, nn.Module, bool]] = [("", model, False)]
    while stack:
        name, module, repeated = stack.pop()
        if splitter.is_whole(module, repeated):
            names.append(name)
            continue
        dot = f"{name}." if name else ""
        stack += [
            (dot + n, child, again) for n, child, again in reversed(splitter.children(module))
        ]
    return names


class Splitter:
    """Decides which modules of a model stay whole.

    Args:
        model: the model.
        named: names of classes that stay whole; None finds what stays whole. A name that no module
            has gives a warning.

    Attributes:
        finds: whether repeated layers are found.
        classes: the classes named or declared.
    """

    def __init__(self, model: nn.Module, named: Collection[str] | str | None) -> None:
        self.model = model
        self.finds = named is None
        self.classes = {named} if isinstance(named, str) else set(named or ())
        #: Modules (by id) in which a declared block is, so that repetition says nothing there.
        self.declared: set[int] = set()
        if self.finds:
            self._read_declarations(model)
        elif self.classes:
            _warn_of_strays(model, self.classes)

    def _read_declarations(self, model: nn.Module) -> None:
        seen: set[type] = set()
        stack = [model]
        while stack:
            module = stack.pop()
            stack += [child for child in module._modules.values() if child is not None]
            kind, own = type(module), module.__dict__.get("_no_split_modules")
            if own or kind not in seen:
                seen.add(kind)
                names = own or getattr(kind, "_no_split_modules", None)
                if isinstance(names, (list, tuple, set, frozenset)):
                    self.classes.update(names)
        if self.classes:
            self._mark(model)

    def _mark(self, model: nn.Module) -> None:
        """Mark all modules around one of a declared class."""
        parents: defaultdict[int, list[nn.Module]] = defaultdict(list)
        found = []
        for _, module in iter_modules(model):
            if type(module).__name__ in self.classes:
                found.append(module)
            for child in module._modules.values():
                if child is not None:
                    parents[id(child)].append(module)
        while found:
            for parent in parents.pop(id(found.pop()), ()):
                if id(parent) not in self.declared and type(parent).__name__ not in self.classes:
                    self.declared.add(id(parent))
                found.append(parent)

    def is_whole(self, module: nn.Module, repeated: bool) -> bool:
        """Whether a module must not be split; one without children cannot be in any case."""
        if type(module).__name__ in self.classes:
            # The whole model is opened where it has blocks inside, though it is of their class.
            return module is not self.model or not self.divides(module)
        children = module._modules
        if not children:
            return False
        # These use their children's weights without calling them, or call them without hooks.
        return (
            repeated
            or isinstance(module, nn.MultiheadAttention)
            or "parametrizations" in children
            or is_scripted(module)
        )

    def children(self, module: nn.Module) -> list[tuple[str, nn.Module, bool]]:
        """The children by name, and whether each is one of several of its class in a list."""
        children = [(n, child) for n, child in module._modules.items() if child is not None]
        if not self._finds_in(module):
            return [(n, child, False) for n, child in children]
        counts = Counter(type(child) for _, child in children)
        return [
            (
                n,
                child,
                counts[type(child)] > 1
                # a list of lists: is there more inside?
                and not (isinstance(child, _LISTS) and self.divides(child)),
            )
            for n, child in children
        ]

    def divides(self, module: nn.Module) -> bool:
        """Whether there are blocks inside a module."""
        stack = [module]
        while stack:
            parent = stack.pop()
            children = [child for child in parent._modules.values() if child is not None]
            # Of several alike, each is a block or has one inside.
            if self._finds_in(parent) and len({type(c) for c in children}) < len(children):
                return True
            if any(type(child).__name__ in self.classes for child in children):
                return True
            stack += children
        return False

    def _finds_in(self, module: nn.Module) -> bool:
        """Whether repeated children of a module are blocks."""
        return self.finds and isinstance(module, _LISTS) and id(module) not in self.declared


def _warn_of_strays(model: nn.Module, classes: Collection[str]) -> None:
    """Say which of the named classes no module has: most often a misspelled name."""
    there: set[str] = set()
    stack, left = [model], set(classes)
    while stack and left:  # most often the first layer ends it
        module = stack.pop()
        there.add(type(module).__name__)
        left.discard(type(module).__name__)
        stack += [child for child in module._modules.values() if child is not None]
    declared = getattr(model, "_no_split_modules", None) or ()  # of a family, perhaps
    strays = sorted(name for name in left if name not in declared)
    if not strays:
        return
    warnings.warn(
        f"no_split_module_classes names {list_some([repr(s) for s in strays])}, which "
        f"{type(model).__name__} has no module of{suggest(strays[0], there)}",
        stacklevel=2,
    )
