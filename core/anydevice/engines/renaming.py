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
def follow(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """Let the context replace the model's parameters; optimizers then have those of the same names.

    Raises:
        OptionError: an optimizer has state already, which would be lost.
    """
    names = {id(p): name for name, p in model.named_parameters(remove_duplicate=False)}
    named: list[tuple[dict[str, Any], list[str | None]]] = []
    for optimizer in optimizers:
        groups = optimizer.param_groups
        mine = [any(id(p) in names for p in group["params"]) for group in groups]
        if any(mine) and any(optimizer.state.get(p) for g in groups for p in g["params"]):
            raise OptionError(
                "the optimizer has state of steps before prepare, which sharding would lose. "
                "Prepare it before its first step, and load its state after"
            )
        named += [(group, [names.get(id(p)) for p in group["params"]]) for group in groups]
    yield
    new = dict(model.named_parameters(remove_duplicate=False))
    for group, its_names in named:
        group["params"] = [
            parameter if name is None else new[name]
            for parameter, name in zip(group["params"], its_names, strict=True)
        ]


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
