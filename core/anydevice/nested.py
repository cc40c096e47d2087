"""Nested data: finding the tensors in it, applying functions to them, building it again.

A container that holds nothing to change is returned as it is, the same object: a cache or dict that
one layer writes to is then seen by the next.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from anydevice.devices import Device

__all__ = [
    "all_on_device",
    "concatenate",
    "find_device",
    "is_torch_tensor",
    "iter_tensors",
    "listify",
    "map_tensors",
    "recursively_apply",
]

#: What holds no tensor, by exact type: the common case is decided without a search.
_PLAIN = frozenset({type(None), bool, int, float, str, bytes, torch.dtype, torch.device, slice})


def map_tensors(
    function: Callable[[torch.Tensor], torch.Tensor],
    data: Any,
    skip_keys: frozenset[str] = frozenset(),
    device: Device | None = None,
) -> Any:
    """Apply ``function`` to every tensor in nested data; unchanged containers keep their identity.

    Args:
        function: tensor to tensor.
        data: see `send_to_device`.
        skip_keys: keys of mappings that are left alone.
        device: where objects with their own ``to`` method are sent; None leaves them alone.
    """
    if isinstance(data, torch.Tensor):
        return function(data)
    if data is None or isinstance(data, (str, bytes, int, float, bool, complex)):
        return data

    def recurse(item: Any) -> Any:
        return map_tensors(function, item, skip_keys, device)

    if isinstance(data, Mapping):
        new = {k: (v if k in skip_keys else recurse(v)) for k, v in data.items()}
        return data if all(new[k] is v for k, v in data.items()) else _rebuild_mapping(data, new)
    if isinstance(data, (list, tuple)) and hasattr(data, "to"):
        # It knows better what belongs where: a packed sequence keeps its lengths on the host.
        return data if device is None else _send_object(data, device, recurse)
    if isinstance(data, (list, tuple, set, frozenset, collections.deque)):
        items = [recurse(item) for item in data]
        return (
            data
            if all(a is b for a, b in zip(items, data, strict=True))
            else _rebuild_sequence(data, items)
        )
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        return _map_attributes(data, [f.name for f in dataclasses.fields(data)], recurse, skip_keys)
    if device is not None and not isinstance(data, (type, torch.nn.Module)):
        return _send_object(data, device, recurse)
    return data


def iter_tensors(data: Any, depth: int = 8) -> Iterator[torch.Tensor]:
    """Every tensor in nested data, in order."""
    if isinstance(data, torch.Tensor):
        yield data
    elif depth <= 0 or data is None or isinstance(data, (str, bytes, int, float)):
        return
    elif isinstance(data, Mapping):
        for value in data.values():
            yield from iter_tensors(value, depth - 1)
    elif isinstance(data, (list, tuple, set, frozenset, collections.deque)):
        for item in data:
            yield from iter_tensors(item, depth - 1)
    elif dataclasses.is_dataclass(data) and not isinstance(data, type):
        for field in dataclasses.fields(data):
            yield from iter_tensors(getattr(data, field.name, None), depth - 1)


def is_torch_tensor(data: Any) -> bool:
    """Whether something is a tensor.

    Example:
        >>> import torch
        >>> from anydevice.utils import is_torch_tensor
        >>> is_torch_tensor(torch.ones(1)), is_torch_tensor([1])
        (True, False)
    """
    return isinstance(data, torch.Tensor)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Apply a function to what passes a test in nested lists, tuples and mappings.

    Args:
        func: called with an object, ``*args`` and ``**kwargs``.
        data: the nested data; its containers keep their types.
        *args: passed on.
        test_type: whether an object is one to apply ``func`` to.
        error_on_other_type: raise where an object is neither that nor a container.
        **kwargs: passed on.

    Raises:
        TypeError: ``error_on_other_type``, and there is another type.

    Example:
        >>> import torch
        >>> from anydevice.utils import recursively_apply
        >>> recursively_apply(torch.neg, {"x": torch.ones(2)})
        {'x': tensor([-1., -1.])}
    """

    def recurse(item: Any) -> Any:
        return recursively_apply(
            func,
            item,
            *args,
            test_type=test_type,
            error_on_other_type=error_on_other_type,
            **kwargs,
        )

    if isinstance(data, (tuple, list)):
        return _rebuild_sequence(data, [recurse(item) for item in data])
    if isinstance(data, Mapping):
        return _rebuild_mapping(data, {key: recurse(value) for key, value in data.items()})
    if test_type(data):
        return func(data, *args, **kwargs)
    if error_on_other_type:
        raise TypeError(
            f"{getattr(func, '__name__', func)} is for nested lists, tuples and mappings of "
            f"objects that pass {getattr(test_type, '__name__', test_type)}; "
            f"found a {type(data).__name__}"
        )
    return data


def concatenate(data: Any, dim: int = 0) -> Any:
    """Concatenate a list of tensors, or of equally nested tuples, lists and mappings of tensors.

    Args:
        data: the batches, such as a model's outputs.
        dim: the dimension along which.

    Raises:
        TypeError: the batches hold something else than tensors.

    Example:
        >>> import torch
        >>> from anydevice.utils import concatenate
        >>> concatenate([{"x": torch.ones(1)}, {"x": torch.zeros(1)}])
        {'x': tensor([1., 0.])}
    """
    first = data[0]
    if isinstance(first, (tuple, list)):
        columns = [concatenate([d[i] for d in data], dim) for i in range(len(first))]
        return _rebuild_sequence(first, columns)
    if isinstance(first, Mapping):
        return _rebuild_mapping(first, {k: concatenate([d[k] for d in data], dim) for k in first})
    if not isinstance(first, torch.Tensor):
        raise TypeError(f"only tensors can be concatenated, not {type(first).__name__}")
    return torch.cat(list(data), dim=dim)


def listify(data: Any) -> Any:
    """Turn every tensor in nested data into a (nested) list of numbers.

    Example:
        >>> import torch
        >>> from anydevice.utils import listify
        >>> listify({"x": torch.arange(3)})
        {'x': [0, 1, 2]}
    """
    return recursively_apply(lambda tensor: tensor.detach().cpu().tolist(), data)


def all_on_device(data: Any, device: torch.device) -> bool:
    """Whether nothing in nested data has to move to ``device``; quick, and False when in doubt.

    Args:
        data: a tensor, plain value, list, tuple or dict of them; nested to any depth.
        device: with its index.
    """
    kind = type(data)
    if kind is torch.Tensor:
        return bool(data.device == device)
    if kind in _PLAIN:
        return True
    if kind is tuple or kind is list:
        for item in data:  # noqa: SIM110 - a generator would cost as much as the rest
            if not all_on_device(item, device):
                return False
        return True
    if kind is dict:
        for item in data.values():  # noqa: SIM110
            if not all_on_device(item, device):
                return False
        return True
    if isinstance(data, torch.Tensor):
        return bool(data.device == device)
    return False


def find_device(data: Any) -> torch.device | None:
    """The device of the first tensor in nested data; None when there is none.

    Example:
        >>> import torch
        >>> from anydevice.utils import find_device
        >>> find_device([1, {"x": torch.ones(1)}])
        device(type='cpu')
    """
    first = next(iter_tensors(data), None)
    return None if first is None else first.device


def _rebuild_mapping(data: Mapping[Any, Any], new: dict[Any, Any]) -> Any:
    if isinstance(data, collections.defaultdict):
        return collections.defaultdict(data.default_factory, new)
    if type(data) is dict:
        return new
    if isinstance(data, collections.abc.MutableMapping):
        # Subclasses (a tokenizer's batch, a model's output) keep state next to their items.
        result = copy.copy(data)
        for key, value in new.items():
            result[key] = value
        return result
    return type(data)(new)  # type: ignore[call-arg]


def _rebuild_sequence(data: Any, items: list[Any]) -> Any:
    if hasattr(data, "_make"):  # a namedtuple, perhaps with a constructor of its own
        return type(data)._make(items)
    if isinstance(data, (list, collections.deque)):
        result = copy.copy(data)  # subclasses keep state next to their items
        result.clear()
        result.extend(items)
        return result
    try:
        return type(data)(items)
    except TypeError:  # a subclass of tuple with a constructor of its own
        result = tuple.__new__(type(data), items)
        getattr(result, "__dict__", {}).update(getattr(data, "__dict__", {}))
        return result


def _map_attributes(
    data: Any, names: list[str], recurse: Callable[[Any], Any], skip_keys: frozenset[str]
) -> Any:
    old = {name: getattr(data, name) for name in names if hasattr(data, name)}
    new = {name: (v if name in skip_keys else recurse(v)) for name, v in old.items()}
    if all(new[name] is old[name] for name in old):
        return data
    result = copy.copy(data)
    for name, value in new.items():
        object.__setattr__(result, name, value)  # also where the dataclass is frozen
    return result


def _send_object(data: Any, device: Device, recurse: Callable[[Any], Any]) -> Any:
    """An object of unknown class: its own ``to`` method, where something must move."""
    to = getattr(data, "to", None)
    if not callable(to):
        return data
    attributes = getattr(data, "__dict__", {})
    tensors = list(iter_tensors(attributes))
    if tensors and all(t.device == device.torch for t in tensors):
        return data
    try:
        return to(device.torch)
    except TypeError:  # a `to` that means something else
        return data
