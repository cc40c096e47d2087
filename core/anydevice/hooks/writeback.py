"""What a module writes into an argument that was copied for it reaches the caller's own.

A tensor, dict, list or dataclass that is sent to another device is a new one. A module that writes
into it (a cache, a list of hidden states, ``x.add_(1)``) means the one that its caller holds, so
the change is made there too.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch

from anydevice.devices import Device, parse_device
from anydevice.nested import map_tensors
from anydevice.tensors import move_tensor

__all__ = ["SentArguments"]


class SentArguments:
    """Arguments of a call, sent to a device.

    Args:
        args: positional arguments, as they were given.
        kwargs: keyword arguments.
        device: where they are needed.
        skip_keys: keys of mappings, and names of keyword arguments, that stay where they are.

    Attributes:
        args: the positional arguments on the device; what needs no move is the same object.
        kwargs: the keyword arguments.
        have_modules: whether modules are among the arguments: the callee may use their weights,
            wherever these are.
    """

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        device: Device,
        skip_keys: str | list[str] | None,
    ) -> None:
        skip = frozenset([skip_keys] if isinstance(skip_keys, str) else skip_keys or ())
        #: Tensors that were moved, by id: the tensor, its copy, and the copy's version.
        self._tensors: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}
        self._device = device
        self.args, self.kwargs = map_tensors(self._send, (args, kwargs), skip, device)
        self.have_modules = any(
            isinstance(item, torch.nn.Module)
            for value in (*args, *kwargs.values())
            for item in (value if isinstance(value, (list, tuple)) else (value,))
        )
        pairs = _copied((args, kwargs), (self.args, self.kwargs))
        self._containers = [(mine, theirs, _content(theirs)) for mine, theirs in pairs]

    def _send(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device == self._device.torch:
            return tensor
        known = self._tensors.get(id(tensor))
        if known is None:
            # Inference tensors count no versions, and by its version a change is known.
            grad = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
            with torch.inference_mode(False), torch.set_grad_enabled(grad):
                copy = move_tensor(tensor, self._device)
            version = -1 if copy.is_inference() else copy._version
            known = self._tensors[id(tensor)] = (tensor, copy, version)
        return known[1]

    def write_back(self) -> None:
        """Make in the originals the changes that were made in the copies since the last time."""
        for key, (mine, theirs, version) in self._tensors.items():
            if version >= 0 and theirs._version != version and mine.shape == theirs.shape:
                mine.copy_(move_tensor(theirs, parse_device(mine.device)))
                self._tensors[key] = (mine, theirs, theirs._version)
        for mine, theirs, before in self._containers:
            if isinstance(before, list):
                _write_sequence(mine, theirs, before)
            elif isinstance(theirs, MutableMapping):
                _write_mapping(mine, theirs, before)
            else:
                _write_attributes(mine, theirs, before)


def _copied(original: Any, sent: Any) -> Iterator[tuple[Any, Any]]:
    if original is sent or type(original) is not type(sent):
        return
    if isinstance(original, Mapping):
        if isinstance(original, MutableMapping):
            yield original, sent
        for key, value in original.items():
            yield from _copied(value, sent[key])
    elif isinstance(original, (list, tuple, collections.deque)):
        if not isinstance(original, tuple):
            yield original, sent
        for mine, theirs in zip(original, sent, strict=True):
            yield from _copied(mine, theirs)
    elif dataclasses.is_dataclass(original):
        yield original, sent
        attributes = _attributes(sent)
        for name, value in _attributes(original).items():
            yield from _copied(value, attributes[name])


def _content(container: Any) -> dict[Any, Any] | list[Any]:
    """What is in a container now."""
    if isinstance(container, MutableMapping):
        return dict(container)
    if isinstance(container, (list, collections.deque)):
        return list(container)
    return _attributes(container)


def _attributes(data: Any) -> dict[str, Any]:
    if hasattr(data, "__dict__"):
        return dict(data.__dict__)
    names = [field.name for field in dataclasses.fields(data)]
    return {name: getattr(data, name) for name in names if hasattr(data, name)}


def _write_mapping(mine: Any, theirs: Any, before: dict[Any, Any]) -> None:
    for key, value in theirs.items():
        if key not in before or before[key] is not value:
            mine[key] = value
    for key in before.keys() - theirs.keys():
        mine.pop(key, None)


def _write_attributes(mine: Any, theirs: Any, before: dict[str, Any]) -> None:
    now = _attributes(theirs)
    for name, value in now.items():
        if name not in before or before[name] is not value:
            object.__setattr__(mine, name, value)
    for name in before.keys() - now.keys():
        object.__delattr__(mine, name)


def _write_sequence(mine: Any, theirs: Any, before: list[Any]) -> None:
    same = len(theirs) == len(before) and all(a is b for a, b in zip(theirs, before, strict=True))
    if not same:
        own = {id(sent): item for sent, item in zip(before, mine, strict=False)}
        items = [own.get(id(item), item) for item in theirs]
        mine.clear()
        mine.extend(items)
