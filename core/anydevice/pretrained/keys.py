"""A checkpoint seen with the names that a transformers model has today.

Names change between releases: a base model's prefix comes or goes, ``gamma`` became ``weight``, a
mixture's experts were stored one by one and are now one tensor. transformers keeps the rules, and
this applies them lazily: a rename costs nothing, so the weight stays mapped from its file; a
conversion (experts joined into one tensor) is computed when the weight is asked for.
"""

from __future__ import annotations

import copy
import re
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from anydevice.checkpoint import Checkpoint, TensorInfo
from anydevice.errors import CheckpointMismatchError

__all__ = ["adapt"]


def adapt(model: Any, checkpoint: Checkpoint) -> Checkpoint:
    """Show ``checkpoint`` with ``model``'s names; the same object where nothing differs."""
    expected = dict(model.state_dict())
    renamed: dict[str, str] = {}
    conversions: dict[str, _Conversion] = {}
    for name, target, converter, pattern in _plan(model, checkpoint, expected):
        if converter is None:
            renamed[target] = name
        else:
            conversions.setdefault(target, _Conversion(target, converter)).add(pattern, name)
    if not conversions and all(target == name for target, name in renamed.items()):
        return checkpoint
    return _AdaptedCheckpoint(checkpoint, renamed, list(conversions.values()), model, expected)


class _Conversion:
    """Tensors of the checkpoint that become one or more tensors of the model.

    Attributes:
        target: the name that transformers gives to the group, one of the results.
        converter: transformers' ``WeightConverter``.
        sources: the checkpoint's names by the pattern that they matched, in natural order.
    """

    def __init__(self, target: str, converter: Any) -> None:
        self.target = target
        self.converter = converter
        self.sources: dict[str, list[str]] = defaultdict(list)

    def add(self, pattern: str, name: str) -> None:
        self.sources[pattern].append(name)

    def names(self) -> list[str]:
        """The names of the results: the group's own, with each of the converter's targets in it."""
        patterns = self.converter.target_patterns
        here = next((p for p in patterns if p in self.target), patterns[0])
        return [self.target.replace(here, pattern) for pattern in patterns]

    def run(self, checkpoint: Checkpoint, model: Any) -> dict[str, torch.Tensor]:
        """Read the sources and compute the results, on the host."""
        converter = copy.deepcopy(self.converter)
        for pattern, names in self.sources.items():
            for name in names:
                converter.add_tensor(self.target, name, pattern, checkpoint.tensor(name))
        results = converter.convert(self.target, model=model, config=model.config)
        return {k: v[0] if isinstance(v, list) else v for k, v in results.items()}


class _AdaptedCheckpoint(Checkpoint):
    """A checkpoint behind other names; see the module."""

    def __init__(
        self,
        inner: Checkpoint,
        renamed: dict[str, str],
        conversions: Iterable[_Conversion],
        model: Any,
        expected: dict[str, torch.Tensor],
    ) -> None:
        self.source = inner.source
        self.extras = inner.extras
        self._inner = inner
        self._renamed = renamed
        self._model = model
        self._expected = expected
        self._group_of = {name: group for group in conversions for name in group.names()}
        self._results: dict[str, torch.Tensor] = {}
        self._lock = threading.Lock()

    def __getitem__(self, name: str) -> TensorInfo:
        if name in self._renamed:
            return self._inner[self._renamed[name]]
        group = self._group_of[name]
        first = self._inner[next(iter(group.sources.values()))[0]]
        shape = tuple(self._expected[name].shape) if name in self._expected else first.shape
        return TensorInfo.describe(dtype=first.dtype, shape=shape, file=first.file)

    def __iter__(self) -> Iterator[str]:
        yield from self._renamed
        yield from self._group_of

    def __len__(self) -> int:
        return len(self._renamed) + len(self._group_of)

    def check(self) -> None:
        """Make sure that the files are those that were opened."""
        self._inner.check()

    def reopened(self) -> Checkpoint:
        """The same names over files mapped again."""
        other = copy.copy(self)
        other._inner = self._inner.reopened()
        other._results = {}
        return other

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor on the host; a conversion's result is kept until it is asked for once."""
        if name in self._renamed:
            return self._inner.tensor(self._renamed[name])
        with self._lock:
            if name not in self._results:
                self._results |= self._group_of[name].run(self._inner, self._model)
            if name not in self._results:
                raise CheckpointMismatchError(
                    f"converting {', '.join(self._group_of[name].sources)} did not give {name!r}"
                )
            return self._results.pop(name)


def _plan(
    model: Any, names: Iterable[str], expected: dict[str, torch.Tensor]
) -> Iterator[tuple[str, str, Any, str]]:
    """For each name: the model's name for it, and the converter and pattern that it belongs to."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )
    except ImportError:  # transformers before 5 knows only renames
        for name in names:
            yield name, _rename(model, name, expected), None, ""
        return
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {p: rule for rule in converters for p in rule.source_patterns}
    prefix = model.base_model_prefix
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, expected)
        if target not in expected and name in expected:
            target, pattern = name, None
        yield name, target, by_pattern[pattern] if pattern else None, pattern or ""


def _rename(model: Any, name: str, expected: dict[str, torch.Tensor]) -> str:
    """The rules of transformers 4: the class's patterns, old spellings, the base's prefix."""
    for pattern, replacement in (
        getattr(model, "_checkpoint_conversion_mapping", None) or {}
    ).items():
        name = re.sub(pattern, replacement, name)
    if name not in expected:
        spelled = re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", name))
        name = spelled if spelled in expected else name
    prefix = f"{model.base_model_prefix}."
    if name not in expected:
        for candidate in (name.removeprefix(prefix), prefix + name):
            if candidate in expected:
                return candidate
    return name
