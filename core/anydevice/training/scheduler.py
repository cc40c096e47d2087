"""Prepared schedulers: they step with their optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

from anydevice.errors import OptionError
from anydevice.processes import PartialState
from anydevice.training.gradients import GradientState

__all__ = ["AcceleratedScheduler", "SchedulerUnit"]

#: In what a schedule is counted: in batches of one process, or in optimizer steps.
SchedulerUnit = Literal["batches", "steps"]
_UNITS: Final = ("batches", "steps")


class AcceleratedScheduler:
    """A learning-rate scheduler that follows its optimizers.

    It steps when they do, and not where their step was skipped or gradients accumulate. A schedule
    counted in batches of one process (the default) goes on by as many steps as there are
    processes, since these use so many batches at once. Processes that work on one batch together
    (of tensor parallelism, or of a pipeline) count as one.

    Args:
        scheduler: the user's.
        optimizers: those that it changes.
        step_with_optimizer: follow the optimizers; else each call is one step.
        split_batches: a batch is divided among the processes: then each step is one.
        unit: ``"batches"`` as above; with ``"steps"`` each optimizer step is one.
        num_processes: how many batches a step uses; None: as many as there are processes.

    Raises:
        OptionError: an unknown unit.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: Any,
        step_with_optimizer: bool = True,
        split_batches: bool = False,
        *,
        unit: SchedulerUnit = "batches",
        num_processes: int | None = None,
    ) -> None:
        if unit not in _UNITS:
            raise OptionError(f"scheduler_unit={unit!r}: give 'batches' or 'steps'")
        self.scheduler = scheduler
        several = isinstance(optimizers, (list, tuple))
        self.optimizers: Sequence[Any] = optimizers if several else [optimizers]
        self.step_with_optimizer = step_with_optimizer
        self.split_batches = split_batches
        self.unit = unit
        self.gradient_state = GradientState()
        self._processes = num_processes

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Go on as far as the optimizers did."""
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        if not self.gradient_state.sync_gradients:
            if self.gradient_state.adjust_scheduler and hasattr(self.scheduler, "_step_count"):
                self.scheduler._step_count += 1
            return
        for optimizer in self.optimizers:
            if optimizer.step_was_skipped:
                return
        if self.split_batches or self.unit == "steps":
            self.scheduler.step(*args, **kwargs)
            return
        if self._processes is None:
            self._processes = PartialState().num_processes
        total = getattr(self.scheduler, "total_steps", None)
        for _ in range(self._processes):
            if total is None or self.scheduler._step_count <= total:
                self.scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> Any:
        """The rates of the last step, one for each group."""
        return self.scheduler.get_last_lr()

    def state_dict(self) -> Any:
        """The scheduler's own."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """The scheduler's own."""
        self.scheduler.load_state_dict(state_dict)

    def get_lr(self) -> Any:
        """The scheduler's own."""
        return self.scheduler.get_lr()

    def print_lr(self, *args: Any, **kwargs: Any) -> Any:
        """The scheduler's own."""
        return self.scheduler.print_lr(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)
