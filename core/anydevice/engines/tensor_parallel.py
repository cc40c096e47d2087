"""Tensor parallelism: each layer divided over processes, by the plan that the model brings."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from anydevice.engines.fsdp2 import FSDP2Engine
from anydevice.engines.renaming import follow
from anydevice.errors import ModelError, OptionError

__all__ = ["TensorParallelEngine", "plan_of"]

#: How transformers' plans name styles for the experts of a mixture.
_EXPERTS: Final = ("ep_", "grouped_gemm", "moe_", "packed_")


class TensorParallelEngine(FSDP2Engine):
    """torch's `parallelize_module` by the model's plan; with `fully_shard` over the rest of a mesh.

    A plan is the model's attribute ``tp_plan``: module names, in which ``*`` stands for a number,
    to a name such as "colwise" or "rowwise", or to a torch `ParallelStyle`.
    """

    name = "tp"

    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
        """Divide each model's layers in place, then shard it over the data-parallel processes."""
        from torch.distributed.tensor.parallel import parallelize_module

        for model in models:
            plan = plan_of(model, self.setup.mesh["tp"].size())
            with follow(model, optimizers):
                self.before(model)
                parallelize_module(model, self.setup.mesh["tp"], plan)
                if self._shards:
                    self._shard(model)
        for optimizer in optimizers:
            _step_one_by_one(optimizer)
        if self._shards:
            return list(models), list(optimizers)
        return [self.wrap(model) for model in models], list(optimizers)

    @property
    def _shards(self) -> bool:
        return any(name != "tp" for name in self.setup.mesh.mesh_dim_names)

    def no_sync(self, model: nn.Module) -> Any:
        """Gradients stay unreduced where they would be reduced."""
        return super().no_sync(model) if self._shards else contextlib.nullcontext()


def _step_one_by_one(optimizer: torch.optim.Optimizer) -> None:
    """Keep an optimizer from stepping divided and undivided parameters in one operation."""
    for group in optimizer.param_groups:
        meshes = {getattr(parameter, "device_mesh", None) for parameter in group["params"]}
        if len(meshes) < 2:
            continue
        if group.get("fused"):
            raise OptionError(
                f"{type(optimizer).__name__}(fused=True) cannot step layers that are divided "
                "together with others that are not. Give each kind a parameter group of its own, "
                "or leave fused out"
            )
        if "foreach" in group:
            group["foreach"] = False


def plan_of(model: nn.Module, size: int, left_out: Collection[str] = frozenset()) -> dict[str, Any]:
    """The model's plan as torch takes it.

    Args:
        model: with a plan.
        size: how many processes divide each layer.
        left_out: names of styles whose modules stay whole.

    Raises:
        ModelError: the model brings none, or a layer cannot be divided among ``size`` processes, or
            it has experts.
        OptionError: a style that is not known.
    """
    plan = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    if not isinstance(plan, Mapping) or not plan:
        raise ModelError(
            f"{type(model).__name__} brings no plan for tensor parallelism. Set model.tp_plan = "
            "{'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'}, with the names of your "
            "modules; or use dp_shard_size instead of tp_size"
        )
    chosen: dict[str, Any] = {}
    names = dict(model.named_modules())
    for pattern, style in plan.items():
        matched = [name for name in names if _matches(pattern, name)]
        if isinstance(style, str) and style in left_out:
            continue
        if not matched and "*" not in pattern:
            raise ModelError(f"tp_plan names {pattern!r}, and the model has no such module")
        for name in matched:
            _check_divisible(name, names[name], style, size)
        if matched:
            chosen[pattern] = _style(style, pattern)
    return chosen


def _matches(pattern: str, name: str) -> bool:
    wanted, have = pattern.split("."), name.split(".")
    return len(wanted) == len(have) and all(
        w == h or w == "*" for w, h in zip(wanted, have, strict=True)
    )


def _style(style: Any, pattern: str) -> Any:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        ParallelStyle,
        RowwiseParallel,
        SequenceParallel,
    )

    if isinstance(style, ParallelStyle):
        return style
    known: dict[str, Callable[[], ParallelStyle]] = {
        "colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
        "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
        "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
        "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
        "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
        "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
        "sequence_parallel": lambda: SequenceParallel(sequence_dim=1, use_local_output=True),
    }
    if str(style).startswith(_EXPERTS):
        raise ModelError(
            f"tp_plan[{pattern!r}] = {style!r}: the experts of a mixture, several weights in one "
            "tensor, cannot be divided among processes here. Divide the model by its blocks "
            "(anydevice.distributed.load_pipeline), or train it with FSDP2 (dp_shard_size instead "
            "of tp_size)"
        )
    if style not in known:
        raise OptionError(
            f"tp_plan[{pattern!r}] = {style!r}: known are {', '.join(sorted(known))}, and torch's "
            "ParallelStyle objects"
        )
    return known[style]()


def _check_divisible(name: str, module: nn.Module, style: Any, size: int) -> None:
    weight = getattr(module, "weight", None)
    if not isinstance(style, str) or not isinstance(weight, torch.Tensor) or weight.dim() != 2:
        return
    columns = style.startswith("colwise") or isinstance(module, nn.Embedding)
    length = weight.shape[0] if columns else weight.shape[1]
    if length % size:
        raise ModelError(
            f"{name}: {length} {'rows' if columns else 'columns'} of its weight cannot be divided "
            f"evenly among tp_size={size} processes. Choose a tp_size that divides them"
        )
