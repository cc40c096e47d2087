"""A checkpoint as one stage sees it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from anydevice.checkpoint import Checkpoint, TensorInfo
from anydevice.ties import list_weights

__all__ = ["StageCheckpoint", "tied_names"]


def tied_names(model: nn.Module) -> dict[str, list[str]]:
    """All names of each weight of a model, by each of them."""
    return {name: weight.names for weight in list_weights(model) for name in weight.names}


class StageCheckpoint(Checkpoint):
    """The tensors of a checkpoint that one stage needs; nothing else of it is read.

    A tied weight that the checkpoint has under a name of another stage is found by that name.

    Args:
        inner: the whole checkpoint, with the model's names.
        names: of the stage's weights and buffers.
        ties: see `tied_names`; of the whole model.
    """

    def __init__(self, inner: Checkpoint, names: Sequence[str], ties: dict[str, list[str]]) -> None:
        self.source = inner.source
        self.extras = inner.extras
        self.may_share = inner.may_share
        self._inner = inner
        self._names = {}
        for name in names:
            found = next((n for n in [name, *ties.get(name, ())] if n in inner), None)
            if found is not None:
                self._names[name] = found

    def __getitem__(self, name: str) -> TensorInfo:
        return self._inner[self._names[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def tensor(self, name: str) -> torch.Tensor:
        """See `Checkpoint.tensor`."""
        return self._inner.tensor(self._names[name])

    def check(self) -> None:
        """See `Checkpoint.check`."""
        self._inner.check()

    def reopened(self) -> Checkpoint:
        """See `Checkpoint.reopened`."""
        other = copy.copy(self)
        other._inner = self._inner.reopened()
        return other
