"""States of a model and an optimizer of Megatron's, under transformers' names."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from anydevice.engines.megatron.optimizer import MegatronOptimizer
from anydevice.engines.megatron.weights import Piece, pieces_of
from anydevice.engines.renaming import positions_to_names
from anydevice.errors import ModelError, OptionError

__all__ = ["MegatronStates"]


class MegatronStates:
    """Reads and writes the parts of all processes, as those of one transformers model.

    All processes of a model call its methods together.

    Args:
        user: the transformers model.
        stage: this process's stage of Megatron's.
    """

    def __init__(self, user: nn.Module, stage: Any) -> None:
        self._user = user
        state: Any = importlib.import_module("megatron.core.parallel_state")
        self._tensor = state.get_tensor_model_parallel_group()
        self._stages = state.get_pipeline_model_parallel_group()
        self._mine = _numbered(stage)
        self._trained: list[str] = []
        first = {id(p): name for name, p in reversed([*user.named_parameters()])}
        #: Each name, of ties too, to the one that the optimizer knows.
        self._known = {
            name: first[id(p)] for name, p in user.named_parameters(remove_duplicate=False)
        }
        self._like = {name: t.dtype for name, t in user.state_dict().items()}
        self._shapes = {name: t.shape for name, t in user.state_dict().items()}
        held: list[Any] = [None] * self._stages.size()
        torch.distributed.all_gather_object(held, list(self._mine), group=self._stages)
        self._owner = {name: i for i, names in reversed([*enumerate(held)]) for name in names}
        self._pieces = [piece for piece in pieces_of(user.config) if piece.name in self._owner]
        left = self._owner.keys() - {piece.name for piece in self._pieces}
        if left:
            raise ModelError(
                f"MegatronLMPlugin: {type(user).__name__} has no counterpart of Megatron's "
                f"{', '.join(sorted(left)[:3])}"
            )

    # ------------------------------------------------------------------ weights

    def weights(self, keep: bool) -> dict[str, torch.Tensor]:
        """The model's state on the host, where ``keep``; else nothing."""
        found: dict[str, torch.Tensor] = {}
        for piece in self._pieces:
            for name, tensor in self._collect(piece, lambda p: p.detach()):
                if keep:
                    found[name] = tensor.to("cpu", self._like[name], copy=True)
        if not keep:
            return {}
        return {name: found.get(name, found.get(self._known[name])) for name in self._like}  # type: ignore[misc]

    def load_weights(self, state: Mapping[str, torch.Tensor], strict: bool = True) -> None:
        """Take this process's parts of a whole state.

        Raises:
            ModelError: a name is missing, and ``strict``.
        """
        for piece in self._pieces:
            parameter = self._mine.get(piece.name)
            if parameter is None:
                continue
            names = [n if n in state else self._known.get(n, n) for n in piece.sources]
            missing = [name for name in names if name not in state]
            if missing and strict:
                raise ModelError(f"the state has no {missing[0]!r}, of {type(self._user).__name__}")
            if not missing:
                with torch.no_grad():
                    parameter.copy_(self._cut(piece, [state[name] for name in names]))

    # ------------------------------------------------------------------ the optimizer

    def choose_trained(
        self, optimizers: Sequence[torch.optim.Optimizer]
    ) -> dict[nn.Parameter, int]:
        """Have Megatron train what the optimizer has.

        Returns:
            The user's parameter group of each of this process's parameters.

        Raises:
            OptionError: weights that Megatron keeps as one are not trained alike.
        """
        numbers: dict[int, int] = {}
        for optimizer in optimizers:
            for number, group in enumerate(optimizer.param_groups):
                numbers |= {id(p): number for p in group["params"] if p.requires_grad}
        by_name = {n: numbers.get(id(p)) for n, p in self._user.named_parameters()}
        made: dict[nn.Parameter, int] = {}
        for piece in self._pieces:
            chosen = {by_name[self._known[name]] for name in piece.sources}
            if len(chosen) > 1:
                raise OptionError(
                    f"MegatronLMPlugin: {', '.join(piece.sources)} are one weight of Megatron's: "
                    "put them in one parameter group, or freeze all of them"
                )
            (its_group,) = chosen
            if its_group is not None:
                self._trained += piece.sources
            if piece.name in self._mine:
                self._mine[piece.name].requires_grad_(its_group is not None)
                if its_group is not None:
                    made[self._mine[piece.name]] = its_group
        return made

    def optimizer(self, optimizer: MegatronOptimizer, keep: bool) -> dict[str, Any]:
        """The optimizer's state by name, on the host, where ``keep``; else nothing."""
        trained = [p for p in self._mine.values() if p.requires_grad]
        names, step = self._agree(optimizer.state_names(trained), optimizer.steps())
        found: dict[str, dict[str, Any]] = {}
        for piece in self._pieces:
            if piece.sources[0] not in self._trained:
                continue
            for state in names:
                read = functools.partial(optimizer.read, name=state)
                for name, tensor in self._collect(piece, read, torch.float32):
                    if keep and self._known[name] == name:
                        found.setdefault(name, {})[state] = tensor.to("cpu", copy=True)
        if step is not None:
            for entry in found.values():
                entry["step"] = torch.tensor(step)
        return {"state": found, "param_groups": self._groups(optimizer)}

    def no_states(self, optimizer: MegatronOptimizer) -> dict[str, Any]:
        """The optimizer's choices alone."""
        return {"state": {}, "param_groups": self._groups(optimizer)}

    def load_optimizer(self, optimizer: MegatronOptimizer, state: dict[str, Any]) -> None:
        """Take this process's parts of a whole state, by name or by number."""
        plain: Any = optimizer
        state = positions_to_names(self._user, plain, state)
        kept = state["state"]
        for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
            group.update({k: v for k, v in saved.items() if k != "params" and k in group})
        for piece in self._pieces:
            sources = [self._known[name] for name in piece.sources]
            parameter = self._mine.get(piece.name)
            if parameter is None or any(name not in kept for name in sources):
                continue
            entries = [kept[name] for name in sources]
            whole = {
                name: self._cut(piece, [entry[name] for entry in entries])
                for name, value in entries[0].items()
                if torch.is_tensor(value) and value.shape == self._shapes[piece.sources[0]]
            }
            optimizer.write(parameter, whole, entries[0].get("step"))

    def _groups(self, optimizer: MegatronOptimizer) -> list[dict[str, Any]]:
        names = {id(p): name for name, p in self._user.named_parameters()}
        return [
            {**group, "params": [names[id(p)] for p in group["params"]]}
            for group in optimizer.param_groups
        ]

    def _agree(self, names: set[str], step: float | None) -> tuple[list[str], float | None]:
        """The states and steps that any process has."""
        every: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(every, (names, step))
        steps = [known for _, known in every if known is not None]
        return sorted(set().union(*(found for found, _ in every))), max(steps, default=None)

    # ------------------------------------------------------------------ parts

    def _cut(self, piece: Piece, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return piece.cut(tensors, self._tensor.rank(), self._tensor.size())

    def _collect(
        self,
        piece: Piece,
        read: Callable[[nn.Parameter], torch.Tensor],
        dtype: torch.dtype | None = None,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The whole tensors of a piece, on all stages."""
        owner = self._owner[piece.name]
        made: dict[str, torch.Tensor] = {}
        if owner == self._stages.rank():
            made = piece.gather(read(self._mine[piece.name]), self._tensor)
        any_mine = next(iter(self._mine.values()))
        for name in piece.sources:
            if self._stages.size() > 1:
                if name not in made:
                    made[name] = torch.empty(
                        self._shapes[name], dtype=dtype or any_mine.dtype, device=any_mine.device
                    )
                source = torch.distributed.get_global_rank(self._stages, owner)
                torch.distributed.broadcast(made[name], src=source, group=self._stages)
            yield name, made[name]


def _numbered(stage: Any) -> dict[str, nn.Parameter]:
    """A stage's parameters by Megatron's names, with layers numbered over the whole model."""
    first = stage.decoder.layers[0].layer_number - 1
    found = {}
    for name, parameter in stage.named_parameters():
        before, layers, rest = name.partition("decoder.layers.")
        if layers:
            number, _, rest = rest.partition(".")
            name = f"{before}{layers}{int(number) + first}.{rest}"
        found[name] = parameter
    return found
