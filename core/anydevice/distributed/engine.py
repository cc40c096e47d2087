"""Pipeline parallelism as an engine: each process trains some of a model's blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from anydevice.distributed.chain import find_chain
from anydevice.distributed.cutting import cut
from anydevice.distributed.part import tied_names
from anydevice.distributed.stages import own_memory, plan_stages, share_memory
from anydevice.distributed.training import SharedWeights, TrainingPipeline
from anydevice.engines import Engine, PipelineParallelConfig
from anydevice.engines.placing import check_placement
from anydevice.engines.states import get_state, inner_optimizer, is_by_name, set_state
from anydevice.errors import ModelError, OptionError
from anydevice.nested import map_tensors

__all__ = ["PipelineEngine"]


class PipelineEngine(Engine):
    """Cuts one model into stages, by ``torch.distributed.pipelining``.

    A backward of a loss cannot be called freely: forwards and backwards of several microbatches
    follow each other in an order that all stages keep. So `train_step` does both.
    """

    name = "pp"
    sharded = True

    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
        """Keep this process's blocks of the model; optimizers keep their parameters.

        Raises:
            ModelError: several models, or one that cannot be cut.
            OptionError: an optimizer has state already.
        """
        if not models:
            return list(models), list(optimizers)
        if len(models) > 1 or hasattr(self, "pipeline"):
            raise ModelError("a pipeline trains one model: make another Accelerator for another")
        model, state = models[0], self.setup.state
        check_placement(model, state)
        options: PipelineParallelConfig = self.setup.option(PipelineParallelConfig)
        chain = find_chain(model, options.example_inputs)
        self._same_start(model)
        names = {id(p): name for name, p in model.named_parameters()}
        held = [
            (group, [names.get(id(p)) for p in group["params"]]) for group in _groups(optimizers)
        ]
        memory = own_memory(state, None, offload=False)
        stages = plan_stages(chain, share_memory(state, memory))
        stage = stages[state.process_index]
        self._ties = tied_names(model)
        whole = set(model.state_dict())
        stand_ins = cut(model, chain, stage, state.device)
        if self.setup.device_placement:
            model.to(state.device)
        self._order = [name for name, _ in chain.bare.named_parameters()]
        self._groups = [[name for name in names if name] for _, names in held]
        self.elsewhere = frozenset(whole - set(model.state_dict()))
        _keep(model, held, self._ties)
        self.shared = SharedWeights(model, self._ties, state)
        self.pipeline = TrainingPipeline(model, chain, stage, state, options, self.setup.autocast)
        for stand_in in stand_ins:
            stand_in.__dict__["may_run"] = lambda: not self.pipeline.has_begun
        _install(model, self.pipeline)
        return [model], list(optimizers)

    def _same_start(self, model: nn.Module) -> None:
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.is_meta and dist.is_initialized():
                dist.broadcast(tensor.data, src=0)

    def train_step(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        loss_of: Callable[[Any, Any], torch.Tensor],
        targets: Any,
        factor: Any,
        boundary: bool,
    ) -> torch.Tensor:
        """Forward and backward of a batch; see `TrainingPipeline.train_step`.

        Before an optimizer step, at a ``boundary``, gradients of weights that several stages hold
        are added up.
        """
        scaler = self.setup.scaler
        if scaler is not None:
            factor = scaler.scale(torch.ones((), device=self.setup.state.device)) * factor
        loss = self.pipeline.train_step(args, kwargs, loss_of, targets, factor)
        if boundary and self.setup.state.num_processes > 1:
            with self.setup.state.collective("train_step of a pipeline"):
                self.shared.add_up()
        return loss

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Refused.

        Raises:
            OptionError: always; it names what to call.
        """
        raise OptionError(
            "backward(loss) does not fit a pipeline, whose stages run forwards and backwards in "
            "turns: call loss = accelerator.train_step(model, inputs, targets=targets, "
            "loss_function=f) instead of the model and backward"
        )

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Scale gradients so that their norm over all stages is at most ``max_norm``."""
        parameters = list(parameters)
        here = [p for p in parameters if id(p) in self.shared.counted]
        counted = [p.grad for p in here if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(counted, norm_type).to(self.setup.state.device)
        if self.setup.state.num_processes > 1:
            if norm_type == float("inf"):
                dist.all_reduce(norm, op=dist.ReduceOp.MAX)
            else:
                norm = norm**norm_type
                dist.all_reduce(norm)
                norm = norm ** (1 / norm_type)
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The user's own module, with this process's blocks."""
        return model

    # ------------------------------------------------------------------ states

    def state_dict(self, model: nn.Module, optimizer: Any = None, *, full: bool = True) -> Any:
        """The state under the plain model's keys: whole on the main process, or this stage's."""
        state = get_state(model, optimizer)
        if optimizer is not None:
            state["state"] = {self._plain(name): e for name, e in state["state"].items()}
            for group, names in zip(state["param_groups"], self._groups, strict=True):
                group["params"] = names
        if not full or self.setup.state.num_processes == 1:
            return state
        own = state if optimizer is None else state["state"]
        is_main = self.setup.state.is_main_process
        parts: list[Any] | None = [None] * self.setup.state.num_processes if is_main else None
        with self.setup.state.collective("get_state_dict of a pipeline"):
            dist.gather_object(map_tensors(lambda t: t.detach().cpu(), own), parts)
        found = {name: value for part in parts or () for name, value in part.items()}
        if optimizer is None:
            return found
        return {"state": found, "param_groups": state["param_groups"]} if is_main else {}

    def load_state_dict(
        self, model: nn.Module, state: Any, optimizer: Any = None, **kwargs: Any
    ) -> Any:
        """Take this stage's part of a state."""
        if optimizer is None:
            own = {n: value for n, value in state.items() if n not in self.elsewhere}
            return set_state(model, own, **kwargs)
        names = {self._plain(name): name for name, _ in model.named_parameters()}
        entries = state["state"]
        if not is_by_name(state):  # another engine's: by place in the whole model's optimizer
            saved = [len(group["params"]) for group in state["param_groups"]]
            if saved != [len(group) for group in self._groups]:
                raise ValueError(f"loaded state dict has groups of {saved} parameters")
            order = [name for group in self._groups for name in group]
            entries = {order[number]: entry for number, entry in entries.items()}
        part = {names[name]: entry for name, entry in entries.items() if name in names}
        groups = [
            {**group, "params": [names[name] for name in mine if name in names]}
            for group, mine in zip(state["param_groups"], self._groups, strict=True)
        ]
        return set_state(model, {"state": part, "param_groups": groups}, optimizer)

    def tied_names(self, model: nn.Module) -> list[list[str]]:
        """Names of one weight in the whole model."""
        return [list(names) for names in {tuple(n) for n in self._ties.values()} if len(names) > 1]

    def _plain(self, name: str) -> str:
        """The name that the whole model's parameter has, of a tied one's several."""
        return next(n for n in self._order if n in self._ties[name])


def _groups(optimizers: Sequence[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    for optimizer in optimizers:
        if any(optimizer.state.values()):
            raise OptionError(
                "the optimizer has state of steps before prepare. Prepare it before its first "
                "step, and load its state after"
            )
    return [group for optimizer in optimizers for group in inner_optimizer(optimizer).param_groups]


def _keep(
    model: nn.Module,
    held: Sequence[tuple[dict[str, Any], list[str | None]]],
    ties: Mapping[str, list[str]],
) -> None:
    """Leave each group those of its parameters that this stage has."""
    new = dict(model.named_parameters(remove_duplicate=False))
    for group, names in held:
        found = [next((n for n in ties[name] if n in new), None) for name in names if name]
        group["params"] = list({id(new[n]): new[n] for n in found if n is not None}.values())


def _install(model: nn.Module, pipeline: TrainingPipeline) -> None:
    own = model.forward

    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and model.training:
            raise OptionError(
                "a pipeline trains by accelerator.train_step(model, ...). To evaluate, call "
                "model.eval(), or the model within torch.no_grad()"
            )
        return pipeline(*args, **kwargs)

    model.forward = forward
