"""States of models and optimizers by name: whole or in parts, for any engine to read back."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from anydevice.engines.renaming import positions_to_names

__all__ = ["get_state", "inner_optimizer", "is_by_name", "set_state"]


def get_state(model: nn.Module, optimizer: Any = None, *, full: bool = False) -> Any:
    """The state of a model, or of an optimizer of its parameters, by the model's names.

    Args:
        model: the user's own module.
        optimizer: whose state is meant, if it is not the model's.
        full: whole tensors on the host of the main process; else each process's part.
    """
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
    )

    options = StateDictOptions(full_state_dict=full, cpu_offload=full)
    if optimizer is None:
        return get_model_state_dict(model, options=options)
    return get_optimizer_state_dict(model, inner_optimizer(optimizer), options=options)


def set_state(model: nn.Module, state: Any, optimizer: Any = None, *, strict: bool = True) -> Any:
    """Take a state that is whole on each process, or in parts."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        set_model_state_dict,
        set_optimizer_state_dict,
    )
    from torch.distributed.tensor import DTensor

    if optimizer is None:
        parts = any(isinstance(value, DTensor) for value in state.values())
        options = StateDictOptions(full_state_dict=not parts, strict=strict)
        return set_model_state_dict(model, state, options=options)
    plain = inner_optimizer(optimizer)
    state = positions_to_names(model, plain, state)
    values = [value for entry in state["state"].values() for value in entry.values()]
    parts = any(isinstance(value, DTensor) for value in values)
    options = StateDictOptions(full_state_dict=not parts)
    return set_optimizer_state_dict(model, plain, state, options=options)


def inner_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The user's optimizer, out of the prepared one."""
    found: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return found


def is_by_name(state: Any) -> bool:
    """Whether an optimizer's state has its parameters by name, rather than by number."""
    return any(isinstance(key, str) for group in state["param_groups"] for key in group["params"])
