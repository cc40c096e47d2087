"""Optimizers whose model gets new parameters: they follow by name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from anydevice.errors import OptionError

__all__ = ["follow", "positions_to_names"]


@contextlib.contextmanager
def follow(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], *, with_state: bool = False
) -> Iterator[None]:
    """Let the context replace the model's parameters; optimizers then have those of the same names.

    A model's parameters become other objects where they are sharded, and also where it is moved to
    a device whose tensors are of another kind than the host's.

    Args:
        model: whose parameters are replaced.
        optimizers: those that may have them.
        with_state: an optimizer's state goes with its parameters: they are moved, not divided.

    Raises:
        OptionError: an optimizer has state already, which would be lost.
    """
    names = {id(p): name for name, p in model.named_parameters(remove_duplicate=False)}
    named: list[tuple[torch.optim.Optimizer, dict[str, Any], list[str | None]]] = []
    for optimizer in optimizers:
        groups = optimizer.param_groups
        mine = [p for group in groups for p in group["params"] if id(p) in names]
        if not with_state and any(optimizer.state.get(p) for p in mine):
            raise OptionError(
                "the optimizer has state of steps before prepare, which sharding would lose. "
                "Prepare it before its first step, and load its state after"
            )
        named += [(optimizer, g, [names.get(id(p)) for p in g["params"]]) for g in groups]
    yield
    new = dict(model.named_parameters(remove_duplicate=False))
    for optimizer, group, its_names in named:
        old = group["params"]
        group["params"] = [
            parameter if name is None else new[name]
            for parameter, name in zip(old, its_names, strict=True)
        ]
        for before, now in zip(old, group["params"], strict=True):
            if before is not now and before in optimizer.state:
                optimizer.state[now] = optimizer.state.pop(before)


def positions_to_names(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> dict[str, Any]:
    """An optimizer's state with parameters by name, from one with them by their number.

    Raises:
        OptionError: the state is of another number of parameters.
    """
    numbers = [n for group in state["param_groups"] for n in group["params"]]
    if not numbers or any(isinstance(number, str) for number in numbers):
        return state
    names = {id(p): name for name, p in model.named_parameters(remove_duplicate=False)}
    order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    if len(order) != len(numbers):
        raise OptionError(
            f"the saved optimizer has {len(numbers)} parameters, this one {len(order)}: it is "
            "another model's"
        )
    by_number = dict(zip(numbers, order, strict=True))
    groups = [
        {**group, "params": [by_number[n] for n in group["params"]]}
        for group in state["param_groups"]
    ]
    return {
        "state": {by_number[n]: entry for n, entry in state["state"].items()},
        "param_groups": groups,
    }
