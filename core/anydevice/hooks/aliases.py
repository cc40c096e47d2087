"""Attributes of modules that refer to one of their weights once more, next to its slot.

Recurrent layers keep their weights in a list of their own; it must refer to the device copies while
these are in the slots.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn

from anydevice.weights import Slot, iter_slots

__all__ = ["Alias", "find_aliases"]


class Alias:
    """An attribute of a module, or an item of one, that holds the tensor of a slot.

    It holds no reference to the module. The list or dict is looked up each time, as the module may
    have made a new one.

    Args:
        slot: the slot.
        attribute: the name of the attribute.
        key: of the item in it; None where the attribute itself holds the tensor.
    """

    def __init__(self, slot: Slot, attribute: str, key: Any) -> None:
        self._module = weakref.ref(slot.module)
        self._name, self._is_buffer = slot.name, slot.is_buffer
        self._attribute, self._key = attribute, key

    def __reduce__(self) -> tuple[Any, ...]:
        module = self._module()
        assert module is not None
        return Alias, (Slot(module, self._name, self._is_buffer), self._attribute, self._key)

    def follow(self) -> None:
        """Let the attribute hold what the slot holds."""
        module = self._module()
        if module is None:
            return
        attributes = module.__dict__
        tensor = (module._buffers if self._is_buffer else module._parameters).get(self._name)
        if self._key is None:
            attributes[self._attribute] = tensor
            return
        holder = attributes.get(self._attribute)
        if isinstance(holder, (list, dict)):
            holder[self._key] = tensor


def find_aliases(modules: Iterable[nn.Module]) -> list[Alias]:
    """Find attributes of modules, and items of lists and dicts in these, that hold own weights."""
    found = []
    for module in modules:
        held = {id(slot.get()): slot for _, slot in iter_slots(module, recurse=False)}
        if not held:
            continue
        for name, value in module.__dict__.items():
            if name in _TABLES:
                continue
            items: Any = [(None, value)]
            if type(value) is list:
                items = enumerate(value)
            elif type(value) is dict:
                items = value.items()
            found += [Alias(held[id(v)], name, k) for k, v in items if id(v) in held]
    return found


_TABLES = frozenset({"_parameters", "_buffers", "_modules", "__class__"})
