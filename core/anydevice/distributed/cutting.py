"""Cutting a model down to one stage: other stages' modules hold no weights here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from anydevice.distributed.chain import Chain
from anydevice.distributed.stages import Stage
from anydevice.distributed.tracing import bare_copy, to_meta
from anydevice.errors import ModelError
from anydevice.nested import map_tensors

__all__ = ["Elsewhere", "cut"]


def cut(model: nn.Module, chain: Chain, stage: Stage, device: torch.device) -> list[Elsewhere]:
    """Keep of a model what one stage needs; the names of all that stays are unchanged.

    Blocks of other stages are taken out of their list. Other modules with weights that this stage
    does not need give way to an `Elsewhere`. What the code around the blocks owns itself, and
    modules without parameters, stay on every stage.

    Args:
        model: changed in place.
        chain: of the model.
        stage: what to keep.
        device: where the code around the blocks runs.

    Returns:
        The stand-ins.
    """
    _keep_blocks(model, chain, stage)
    stand_ins = []
    for name in sorted(_not_needed(chain, stage)):
        parent_name, _, own_name = name.rpartition(".")
        parent = model.get_submodule(parent_name)
        original = parent._modules[own_name]
        assert original is not None
        stand_in = Elsewhere(name, original, device, seen=name not in chain.unseen)
        parent._modules[own_name] = stand_in
        stand_ins.append(stand_in)
    return stand_ins


def _not_needed(chain: Chain, stage: Stage) -> set[str]:
    names = [name for name, _ in chain.bare.named_modules()]
    middle = names.index(chain.container)
    early = {name for name in chain.unseen if names.index(name) < middle}
    first = chain.before | early
    last = chain.after | (chain.unseen - early)
    needed = (first if stage.is_first else frozenset()) | (last if stage.is_last else frozenset())
    return set((first | last) - needed)


def _keep_blocks(model: nn.Module, chain: Chain, stage: Stage) -> None:
    container = model.get_submodule(chain.container)
    kept = {name.rpartition(".")[2] for name in chain.blocks[stage.start : stage.stop]}
    blocks = dict(container._modules)
    for index, (name, block) in enumerate(blocks.items()):
        if name in kept:
            _renumber(block, index, stage.start)
        else:
            del container._modules[name]
    if type(container) is nn.ModuleList:
        container.__class__ = _Stretch
    _shorten_config(model, chain, stage)


class _Stretch(nn.ModuleList):
    """Some blocks in a row, under their own names: ``[i]`` counts those that are here."""

    def __getitem__(self, index: Any) -> Any:
        blocks = list(self._modules.values())
        return nn.ModuleList(blocks[index]) if isinstance(index, slice) else blocks[index]


def _renumber(block: nn.Module | None, index: int, start: int) -> None:
    """Let a block's place in the key-value cache be that among the blocks of its stage."""
    for module in block.modules() if block is not None else ():
        if module.__dict__.get("layer_idx") == index:
            module.layer_idx = index - start  # type: ignore[assignment]


def _shorten_config(model: nn.Module, chain: Chain, stage: Stage) -> None:
    """Let a config tell of the stage's blocks: caches are made, and layers chosen, by it."""
    count = len(chain.blocks)
    seen: set[int] = set()
    path = chain.container
    while True:
        config = getattr(model.get_submodule(path), "config", None)
        if config is not None and id(config) not in seen:
            seen.add(id(config))
            _shorten(config, count, stage)
        if not path:
            return
        path = path.rpartition(".")[0]


def _shorten(config: Any, count: int, stage: Stage) -> None:
    if getattr(config, "num_hidden_layers", None) != count:
        return
    for name, value in list(vars(config).items()):
        if isinstance(value, (list, tuple)) and len(value) == count:
            setattr(config, name, value[stage.start : stage.stop])
    config.num_hidden_layers = stage.stop - stage.start


class Elsewhere(nn.Module):
    """Stands for a module whose weights are in another stage.

    Before the blocks, its results have the right shape and no meaning: the hidden states that are
    computed from them are replaced by those of the stage before. After them, a call is an error.

    Attributes:
        may_run: tells whether the blocks have not begun yet.
    """

    may_run: Callable[[], bool]

    def __init__(self, name: str, original: nn.Module, device: torch.device, *, seen: bool) -> None:
        super().__init__()
        self.__dict__["_what"] = _What(name, bare_copy(original).eval(), device, seen)

    def __getattr__(self, name: str) -> Any:
        if name == "_what":
            raise AttributeError(name)
        return getattr(self.__dict__["_what"].original, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's result, of NaNs."""
        what = self.__dict__["_what"]
        if not what.seen:
            raise ModelError(
                f"{what.name} did not run on the example inputs, so it is not known what needs its "
                "results: load the pipeline with example_inputs that it runs on"
            )
        if not self.__dict__["may_run"]():
            raise ModelError(
                f"{what.name} runs after the blocks of this stage have begun, and its weights are "
                "in another stage: the model cannot be cut for these inputs"
            )
        with torch.no_grad():
            return map_tensors(
                lambda t: _meaningless(t, what.device),
                what.original(*to_meta(args), **to_meta(kwargs)),
            )


@dataclasses.dataclass(frozen=True)
class _What:
    name: str
    original: nn.Module
    device: torch.device
    seen: bool


def _meaningless(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    value = float("nan") if tensor.dtype.is_floating_point else 0
    return torch.full(tensor.shape, value, dtype=tensor.dtype, device=device)
