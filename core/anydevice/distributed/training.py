"""One training step of a pipeline: forward and backward of all microbatches, by torch's schedules.

[Note: gradients of what several stages hold]
A tied weight that two stages need, and what the code around the blocks owns itself, stand on
several ranks. Each has the gradient of its own use; before a step these are added up, so that all
copies take the same step. In norms such a weight counts once, on the first rank that holds it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from anydevice.distributed.chain import Chain
from anydevice.distributed.inputs import refuse, shapes, split
from anydevice.distributed.running import Pipeline
from anydevice.distributed.stages import Stage
from anydevice.engines import PipelineParallelConfig
from anydevice.errors import OptionError
from anydevice.processes import PartialState

__all__ = ["SharedWeights", "TrainingPipeline"]

#: torch's schedules, by the names that a user gives.
_SCHEDULES: Final = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B"}


class TrainingPipeline(Pipeline):
    """A pipeline that also computes gradients.

    Args:
        model: cut, and with its weights.
        chain: of the whole model.
        stage: of this rank.
        state: of this process.
        options: microbatches, and the schedule.
        autocast: the precision of the forward.
    """

    def __init__(
        self,
        model: nn.Module,
        chain: Chain,
        stage: Stage,
        state: PartialState,
        options: PipelineParallelConfig,
        autocast: Any,
    ) -> None:
        microbatches = options.microbatches or state.num_processes
        super().__init__(model, chain, stage, state, microbatches)
        self._kind = _SCHEDULES[options.schedule]
        self._autocast = autocast
        self._for_training: Any = None
        self._loss_of: Callable[[Any, int], torch.Tensor] | None = None
        self._known_shapes: Any = None

    def train_step(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        loss_of: Callable[[Any, Any], torch.Tensor],
        targets: Any,
        factor: Any,
    ) -> torch.Tensor:
        """Add the batch's gradients to those of this rank's weights.

        Args:
            args: of the model's forward, on every rank alike.
            kwargs: of it.
            loss_of: the mean loss of a microbatch from its output and targets; called on the last
                rank.
            targets: tensors that are divided as the inputs are.
            factor: what the loss is multiplied with before backward.

        Returns:
            The mean loss of the batch, on every rank.

        Raises:
            ProcessGroupError: another rank has ended.
            ModelError: the stage of another rank failed; the message names it.
            OptionError: the batch cannot be divided into microbatches.
        """
        given, device = dict(kwargs), self.state.device
        refuse(given)
        if self._takes_cache:
            given["use_cache"] = False
        told = shapes((*args, targets), given)
        chunks = split((*args, targets), given, self.microbatches, takes_cache=False)
        self._chunks = [(a[:-1], k) for a, k in chunks]
        if told != self._known_shapes:
            self._for_training = self._known_shapes = None
            if self.state.num_processes > 1:
                with self._failing.kept():
                    self._training_schedule()
            self._failing.tell("train_step of a pipeline", told)
        parts, count = [a[-1] for a, _ in chunks], len(chunks)
        losses: list[torch.Tensor] = []

        def loss_at(output: Any, index: int) -> torch.Tensor:
            loss = loss_of(output, parts[index])
            if loss.numel() != 1:
                raise OptionError(f"the loss has shape {tuple(loss.shape)}: give one number")
            losses.append(loss.detach().float().reshape(()))
            weighed: torch.Tensor = (loss * factor / count).reshape(1)
            return weighed

        self._loss_of = loss_at
        try:
            self._train(count)
        finally:
            self._loss_of = None
        self._known_shapes = told
        told_loss = torch.stack(losses).mean() if losses else torch.zeros((), device=device)
        if self.state.num_processes > 1:
            with self.state.collective("train_step of a pipeline"):
                dist.broadcast(told_loss, src=self.state.num_processes - 1)
        return told_loss

    def _train(self, count: int) -> None:
        if self.state.num_processes == 1:
            self._index = 0
            for _ in self._chunks:
                torch.autograd.backward(self.run_chunk())
            return
        last = {"target": torch.zeros(count, device=self.state.device)}
        self._step(self._training_schedule(), **(last if self.stage.is_last else {}))
        self._failing.tell("train_step of a pipeline, done")

    # ------------------------------------------------------------------ what the schedule runs

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._autocast.region():
            return super()._run(args, kwargs)

    def _finish(self, output: Any) -> torch.Tensor:
        if self._loss_of is None:
            return super()._finish(output)
        with self._autocast.region():
            return self._loss_of(output, self._index - 1)

    def _sent(self, hidden: torch.Tensor) -> torch.Tensor:
        # Under autocast blocks return what their last operation gave: one dtype for all travels.
        return hidden.float() if self._autocast.active else hidden

    def _stage_shapes(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        inward, outward = super()._stage_shapes(args, kwargs, hidden)
        return inward.requires_grad_(), outward.requires_grad_()  # so torch sends gradients back

    def _training_schedule(self) -> Any:
        from torch.distributed import pipelining

        if self._for_training is None:
            with torch.no_grad():
                stage = self._new_stage(*self._measure())
            count = len(self._chunks)
            few = count < self.state.num_processes  # which "1f1b" does not take
            kind = getattr(pipelining, _SCHEDULES["gpipe"] if few else self._kind)
            self._for_training = kind(
                stage, count, loss_fn=lambda loss, _: loss.sum(), scale_grads=False
            )
        return self._for_training


class SharedWeights:
    """The weights that several ranks hold: see the note above.

    Args:
        model: cut.
        ties: all names of each weight of the whole model, by each of them.
        state: of this process. Every rank makes one.
    """

    def __init__(
        self, model: nn.Module, ties: Mapping[str, list[str]], state: PartialState
    ) -> None:
        self._state = state
        own = {min(ties[n]): p for n, p in model.named_parameters() if p.requires_grad}
        mine = {name: (tuple(p.shape), str(p.dtype)[6:]) for name, p in own.items()}
        told = state.meet("the weights of all stages", payload=json.dumps(mine).encode())
        ranks = [json.loads(names) for names in told]
        kinds = {name: kind for each in ranks for name, kind in each.items()}
        self.own = own
        self._shared = sorted(n for n in kinds if sum(n in each for each in ranks) > 1)
        self._kinds = {n: (kinds[n][0], getattr(torch, kinds[n][1])) for n in self._shared}
        before: set[str] = set().union(*ranks[: state.process_index])
        #: Those that count here in norms over all ranks.
        self.counted = {id(p) for name, p in own.items() if name not in before}

    def add_up(self) -> None:
        """Give each copy the sum of the gradients that all ranks have."""
        for name in self._shared:
            mine = self.own.get(name)
            shape, dtype = self._kinds[name]
            total = torch.zeros(shape, dtype=dtype, device=self._state.device)
            if mine is not None and mine.grad is not None:
                total += mine.grad
            dist.all_reduce(total)
            if mine is not None:
                mine.grad = total
