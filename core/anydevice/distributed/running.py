"""Running a pipeline: each rank's part of a forward, by a schedule of ``torch.distributed``.

[Note: how a forward goes]
Every rank calls the model with the same inputs. Each runs the model's own code, which computes
masks and positions from the inputs, up to its first block; there the hidden states of the stage
before take the place of the block's input. After its last block a rank leaves the model's code, and
the hidden states go to the next stage. The last rank runs the code to its end, and its output is
sent to all, so that all go on alike: sampling a token, say.

The shape of what a stage receives must be known before. So each rank first runs the code up to its
first block, and no farther, and takes the shape there; blocks that change it are run on meta.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from anydevice.distributed.chain import Chain
from anydevice.distributed.failing import Failing, stand_in
from anydevice.distributed.inputs import PLAIN, refuse, shapes, split
from anydevice.distributed.outputs import Failure, join, share
from anydevice.distributed.stages import Stage
from anydevice.distributed.tracing import first_tensor, to_meta
from anydevice.errors import ModelError, OptionError
from anydevice.processes import PartialState

__all__ = ["Pipeline"]


class _Leave(BaseException):
    """The stage's last block has run."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


class _Measured(BaseException):
    """The stage's first block was about to run."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs


class Pipeline:
    """The forward of a model that is cut into stages.

    Args:
        model: cut, and with its weights.
        chain: of the whole model.
        stage: of this rank.
        state: of this process.
        microbatches: how many parts a batch is divided into, where no cache is used.
    """

    def __init__(
        self,
        model: nn.Module,
        chain: Chain,
        stage: Stage,
        state: PartialState,
        microbatches: int,
    ) -> None:
        self.chain, self.stage, self.state = chain, stage, state
        self.microbatches = microbatches
        self.is_trusted = False
        self.has_begun = False
        self._forward = model.forward
        self._takes_cache = "use_cache" in inspect.signature(model.forward).parameters
        self._schedules: dict[Any, Any] = {}
        self._chunks: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._index = 0
        self._received: torch.Tensor | None = None
        self._measuring = False
        self._failing = Failing(state)
        self._given: Any = None
        self._outputs: list[Any] = []
        #: What blocks were given besides tensors, by argument: caches that the model made itself.
        self._own: dict[str, Any] = {}
        first, last = chain.blocks[stage.start], chain.blocks[stage.stop - 1]
        model.get_submodule(first).register_forward_pre_hook(self._enter, with_kwargs=True)
        if not stage.is_last:
            model.get_submodule(last).register_forward_hook(self._exit)

    # ------------------------------------------------------------------ one forward

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output, on every rank."""
        refuse(kwargs)
        self._chunks = split(args, kwargs, self.microbatches, self._takes_cache)
        self._own = {k: v for k, v in kwargs.items() if not isinstance(v, PLAIN)}
        if self.state.num_processes == 1:
            return join([self._run(*chunk) for chunk in self._chunks])
        schedule: Any = None
        if self.is_trusted:
            schedule = self._schedule()
        else:
            with self._failing.kept():
                schedule = self._schedule()
            self._failing.tell("forward of a pipeline", shapes(args, kwargs))
        self._step(schedule)
        self._failing.tell("forward of a pipeline, done")
        output = self._joined() if self.stage.is_last else None
        with self.state.collective("forward of a pipeline"):
            output = share(output, self._own, self.state.num_processes - 1, self.state.device)
        if isinstance(output, Failure):
            raise ModelError(f"the last stage of the pipeline failed: {output.reason}")
        return output

    def _joined(self) -> Any:
        try:
            return join(self._outputs)
        except OptionError as error:
            return Failure.of(error)
        finally:
            self._outputs = []

    def _step(self, schedule: Any, **kwargs: Any) -> None:
        """Run this rank's part; ``kwargs`` are for the schedule. Errors of the stage are kept.

        Raises:
            ProcessGroupError: hidden states could not be sent or received.
        """
        self._index, self._outputs = 0, []
        with self.state.collective("forward of a pipeline"):
            schedule.step(**kwargs)

    def run_or_stand_in(self, *received: torch.Tensor) -> torch.Tensor:
        """`run_chunk`, and zeros in its place from an error on."""
        if self._failing.error is None:
            with self._failing.kept():
                return self.run_chunk(*received)
        given = torch.empty(1, device="meta") if self.stage.is_last else self._given
        return stand_in(given, received, self.state.device)

    def run_chunk(self, *received: torch.Tensor) -> torch.Tensor:
        """What the schedule calls for each microbatch: hidden states in, hidden states out."""
        args, kwargs = self._chunks[self._index]
        self._index += 1
        # Cloned: the schedule receives the next ones into the same memory.
        self._received = received[0].clone() if received else None
        try:
            output = self._run(args, kwargs)
        except _Leave as leave:
            return self._sent(leave.hidden).to(self.state.device).contiguous()
        finally:
            self._received = None
        if not self.stage.is_last:
            raise ModelError(
                f"the forward ended without {self.chain.blocks[self.stage.stop - 1]}, the last "
                f"block of rank {self.stage.rank}"
            )
        return self._finish(output)

    def _finish(self, output: Any) -> torch.Tensor:
        """What the last stage gives the schedule for one microbatch."""
        self._outputs.append(output)
        return torch.zeros(1, device=self.state.device)

    def _sent(self, hidden: torch.Tensor) -> torch.Tensor:
        """The hidden states as they travel."""
        return hidden

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.has_begun = False
        return self._forward(*args, **kwargs)

    # ------------------------------------------------------------------ at the blocks

    def _enter(
        self, _block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._measuring:
            raise _Measured(args, kwargs)
        self.has_begun = True
        for name, value in kwargs.items():
            if name not in self._own and not isinstance(value, PLAIN):
                self._own[name] = value
        if self._received is None:
            return None
        return _put(args, kwargs, self.chain.slot, self._received)

    def _exit(self, block: nn.Module, _args: Any, output: Any) -> None:
        hidden = first_tensor(output)
        if hidden is None:
            raise ModelError(f"{type(block).__name__} returned no tensor to go on with")
        raise _Leave(hidden)

    # ------------------------------------------------------------------ shapes

    def _schedule(self) -> Any:
        """A schedule for hidden states of this shape, with memory to receive them."""
        from torch.distributed.pipelining import ScheduleGPipe

        args, kwargs, hidden = self._measure()
        key = (tuple(hidden.shape), hidden.dtype, len(self._chunks))
        if key not in self._schedules:
            stage = self._new_stage(args, kwargs, hidden)
            self._schedules.clear()  # decoding repeats one shape; others would only hold memory
            self._schedules[key] = ScheduleGPipe(stage, len(self._chunks))
        return self._schedules[key]

    def _new_stage(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], hidden: torch.Tensor
    ) -> Any:
        """The rank's part as torch takes it, with memory to receive hidden states."""
        from torch.distributed.pipelining import PipelineStage

        inward, outward = self._stage_shapes(args, kwargs, hidden)
        self._given = outward
        return PipelineStage(
            _Part(self),
            self.stage.rank,
            self.state.num_processes,
            self.state.device,
            input_args=inward,
            output_args=outward,
        )

    def _measure(self) -> tuple[tuple[Any, ...], dict[str, Any], torch.Tensor]:
        """What the first block of this stage is called with, and the hidden states among it."""
        self._measuring = True
        slot = self.chain.slot
        try:
            self._run(*self._chunks[0])
        except _Measured as measured:
            hidden = measured.args[slot] if isinstance(slot, int) else measured.kwargs[slot]
            return measured.args, measured.kwargs, self._sent(hidden)
        finally:
            self._measuring = False
        raise ModelError(f"the forward ended without {self.chain.blocks[self.stage.start]}")

    def _stage_shapes(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What comes in and goes out, on meta."""
        here = torch.empty_like(hidden, device="meta")
        if self.chain.keeps_shape:
            return here, here
        shapes = [here]
        for name in self.chain.blocks[: self.stage.stop]:
            given, named = _put(to_meta(args), to_meta(kwargs), self.chain.slot, shapes[-1])
            result = first_tensor(self.chain.bare.get_submodule(name)(*given, **named))
            assert result is not None
            shapes.append(result)
        return shapes[self.stage.start], shapes[self.stage.stop]

    @contextlib.contextmanager
    def trusted(self) -> Iterator[None]:
        """Inside, forwards are not compared between the ranks: the caller has seen to it."""
        before, self.is_trusted = self.is_trusted, True
        try:
            yield
        finally:
            self.is_trusted = before


class _Part(nn.Module):
    """A rank's part of the model, as torch's stages take it."""

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__()
        self.__dict__["_pipeline"] = pipeline

    def forward(self, *received: torch.Tensor) -> torch.Tensor:
        pipeline: Pipeline = self.__dict__["_pipeline"]
        return pipeline.run_or_stand_in(*received)


def _put(
    args: tuple[Any, ...], kwargs: dict[str, Any], slot: int | str, hidden: torch.Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A block's arguments with other hidden states."""
    if isinstance(slot, str):
        return args, {**kwargs, slot: hidden}
    return (*args[:slot], hidden, *args[slot + 1 :]), kwargs
