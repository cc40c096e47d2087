"""`load_tensor_parallel`: each layer of a model divided over the processes."""

from __future__ import annotations

import os
from typing import Any, Final

import torch
from torch import nn

from anydevice.checkpoint import Checkpoint
from anydevice.distributed.generating import let_generate
from anydevice.distributed.opening import open_model
from anydevice.distributed.part import StageCheckpoint, tied_names
from anydevice.engines.tensor_parallel import plan_of
from anydevice.loading import load_checkpoint_in_model
from anydevice.nested import map_tensors
from anydevice.processes import PartialState
from anydevice.ties import find_tied_parameters, retie_parameters
from anydevice.weights import exchange, iter_slots

__all__ = ["load_tensor_parallel"]

#: What matters for gradients only: the module is the same on all ranks.
_SAME_IN_FORWARD: Final = frozenset({"replicated_with_grad_allreduce"})


@torch.inference_mode(False)
def load_tensor_parallel(
    model: nn.Module | str | os.PathLike[str],
    checkpoint: str | os.PathLike[str] | Checkpoint | None = None,
    *,
    model_class: Any = None,
    dtype: str | torch.dtype | None = None,
    **options: Any,
) -> Any:
    """Divide each layer of a model over the processes that were started together.

    The model's own plan says how: its attribute ``tp_plan``, or what transformers knows of it. The
    weights become DTensors, of which each rank reads its own part only, onto this process's device.
    The model is called on every rank alike; ``model.generate`` works, with the tokens that rank 0
    draws. All ranks need the others within each layer, so they belong on one machine, or on a very
    fast network; over slower ones use `load_pipeline`.

    Args:
        model: a folder or Hub repo id of a transformers model; or a model, perhaps built in
            `anydevice.init_empty_weights`, which is changed in place.
        checkpoint: of a model that is given empty.
        model_class: a transformers class, where ``model`` is a path; None takes the config's.
        dtype: the dtype to hold the weights in, where ``model`` is a path.
        **options: see `load_pipeline`.

    Returns:
        The model.

    Raises:
        ModelError: the model brings no plan, or a layer cannot be divided evenly.
        OptionError: the plan names a style that is not known, or an argument cannot be used.
        CollectiveMismatchError: the ranks load different models.
        MissingRankError: a rank did not come in time, or has died.
        CheckpointError: see `anydevice.load_checkpoint_in_model`.

    Example:
        The same lines run in one process, and in several that ``torchrun`` starts.

        >>> import torch
        >>> from torch import nn
        >>> from anydevice import PartialState
        >>> from anydevice.distributed import load_tensor_parallel
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        >>> model.tp_plan = {"0": "colwise", "2": "rowwise"}
        >>> model = load_tensor_parallel(model)
        >>> model(torch.zeros(3, 4, device=PartialState().device)).shape
        torch.Size([3, 4])
    """
    state = PartialState()
    built, source = open_model(model, checkpoint, model_class, dtype, options)
    built.eval()
    size = state.num_processes
    plan = plan_of(built, size, _SAME_IN_FORWARD)
    said = {"model": type(built).__name__, "plan": {key: str(style) for key, style in plan.items()}}
    state.meet("load_tensor_parallel", _shapes(built) | said)
    ties = tied_names(built)
    if size > 1:
        _divide(built, plan, state)
    if source is None:
        _move(built, state.device)
    else:
        part = StageCheckpoint(source, [name for name, _ in iter_slots(built)], ties)
        load_checkpoint_in_model(built, part, device_map=str(state.device), disk=False)
        _move(built, state.device)
    built.register_forward_hook(_wait)
    let_generate(built, state)
    return built


def _wait(_model: nn.Module, _args: Any, output: Any) -> Any:
    """Hand out plain tensors: torch's own wait for a collective only when they are computed with.

    One that is saved or shown before that has no values yet.
    """
    return map_tensors(lambda t: t.trigger_wait() if hasattr(t, "trigger_wait") else t, output)


def _divide(model: nn.Module, plan: dict[str, Any], state: PartialState) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    mesh = init_device_mesh(state.device.type, (state.num_processes,), mesh_dim_names=("tp",))
    tied = find_tied_parameters(model)
    parallelize_module(model, mesh, plan)
    slots = dict(iter_slots(model))
    for names in tied:
        parts: list[Any] = [slots[name].get() for name in names]
        if len({str(getattr(part, "placements", None)) for part in parts}) == 1:
            retie_parameters(model, [names])


def _move(model: nn.Module, device: torch.device) -> None:
    """Bring what the checkpoint does not hold, such as buffers, to this process's device."""
    for _, slot in iter_slots(model):
        tensor = slot.get()
        if tensor is not None and not tensor.is_meta and tensor.device != device:
            exchange(slot, tensor.detach().to(device))


def _shapes(model: nn.Module) -> dict[str, Any]:
    parameters = list(model.parameters())
    return {"parameters": len(parameters), "numbers": sum(p.numel() for p in parameters)}
