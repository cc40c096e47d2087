"""Whether this step's gradients are whole: counted by calls, and told by the loaders' ends."""

from __future__ import annotations

import os
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, ClassVar

from anydevice.arguments import names_unknown_arguments
from anydevice.data import active_iterations, current_iteration
from anydevice.errors import OptionError

__all__ = ["GradientAccumulationPlugin", "GradientState"]


@names_unknown_arguments
@dataclass
class GradientAccumulationPlugin:
    """Choices for accumulating gradients over several batches.

    Args:
        num_steps: how many calls of `accumulate` make one optimizer step.
        adjust_scheduler: count the accumulated calls in the scheduler's ``_step_count``, which
            schedulers with an end (`OneCycleLR`) compare with their total.
        sync_with_dataloader: the last batch of a loader ends a step, however many were counted.
        sync_each_batch: exchange gradients with each batch: more communication, less memory.

    Raises:
        OptionError: ``num_steps`` is no positive number.

    Example:
        >>> from anydevice import GradientAccumulationPlugin
        >>> GradientAccumulationPlugin(num_steps=2).num_steps
        2
    """

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def __post_init__(self) -> None:
        if self.num_steps is None:
            self.num_steps = int(os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1"))
        if not isinstance(self.num_steps, int) or self.num_steps < 1:
            raise OptionError(
                f"gradient accumulation over {self.num_steps!r} steps: give a number from 1"
            )

    def to_kwargs(self) -> dict[str, Any]:
        """All choices by name."""
        return dict(vars(self))


class GradientState:
    """Whether gradients are whole now; shared by everything in this process that asks.

    Attributes:
        sync_gradients: whether this step ends with the optimizer's. True outside `accumulate`.
        plugin_kwargs: the choices of the `GradientAccumulationPlugin`.

    Example:
        >>> from anydevice.state import GradientState
        >>> GradientState().sync_gradients
        True
    """

    _shared_state: ClassVar[dict[str, Any]] = {}

    sync_gradients: bool
    plugin_kwargs: dict[str, Any]
    _counts: dict[Hashable, int]

    def __init__(
        self, gradient_accumulation_plugin: GradientAccumulationPlugin | None = None
    ) -> None:
        self.__dict__ = self._shared_state
        if not self.initialized:
            self.sync_gradients = True
            self._counts = {}
            self._configure(gradient_accumulation_plugin or GradientAccumulationPlugin(1))
        elif gradient_accumulation_plugin is not None:
            self._configure(gradient_accumulation_plugin)

    def _configure(self, plugin: GradientAccumulationPlugin) -> None:
        self.plugin_kwargs = plugin.to_kwargs()

    def __reduce__(self) -> Any:
        """Of a copy, and of what another process reads, the state is that process's own."""
        return _this_process, ()

    @classmethod
    def _reset_state(cls) -> None:
        """Clear the state, so that the next instance starts again."""
        cls._shared_state.clear()

    @property
    def initialized(self) -> bool:
        """Whether some `GradientState` has been made."""
        return "sync_gradients" in self.__dict__

    @property
    def num_steps(self) -> int:
        """How many calls of `accumulate` make one optimizer step."""
        return int(self.plugin_kwargs["num_steps"])

    @property
    def adjust_scheduler(self) -> bool:
        """See `GradientAccumulationPlugin`."""
        return bool(self.plugin_kwargs["adjust_scheduler"])

    @property
    def sync_with_dataloader(self) -> bool:
        """See `GradientAccumulationPlugin`."""
        return bool(self.plugin_kwargs["sync_with_dataloader"])

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the last batch of the loader that is iterated is out."""
        iteration = current_iteration()
        return iteration is not None and iteration.last

    @property
    def remainder(self) -> int:
        """Samples of the last round that are no repeated ones; -1 where none were repeated."""
        iteration = current_iteration()
        if iteration is None or iteration.round is None:
            return -1
        return sum(iteration.round.real)

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared loader is iterated now."""
        return current_iteration() is not None

    @property
    def active_dataloader(self) -> Any:
        """The loader whose batch came out last; None outside of loops."""
        iteration = current_iteration()
        return None if iteration is None else iteration.loader

    @property
    def dataloader_references(self) -> list[Any]:
        """The loaders that are iterated, the outermost first."""
        return [iteration.loader for iteration in active_iterations()]

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        self.sync_gradients = sync_gradients

    def count(self, key: Hashable) -> bool:
        """Count a call of `accumulate` for a set of models; return whether its step ends here.

        With the last batch of a loader it ends once: at the call that is, for this batch, as late
        as the last call was for the batch before.
        """
        calls = self._counts.get(key, 0) + 1
        due: bool = calls >= self.plugin_kwargs["num_steps"]
        iteration = current_iteration()
        if iteration is not None:
            of_batch = iteration.calls[key] = iteration.calls.get(key, 0) + 1
            if (
                iteration.last
                and self.plugin_kwargs["sync_with_dataloader"]
                and key not in iteration.flushed
                and of_batch >= iteration.calls_before.get(key, 1)
            ):
                iteration.flushed.add(key)
                due = True
        self._counts[key] = 0 if due else calls
        self.sync_gradients = due
        return due


def _this_process() -> GradientState:
    made = object.__new__(GradientState)
    made.__dict__ = GradientState._shared_state
    return made
