"""Where a run keeps its files."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from anydevice.arguments import names_unknown_arguments
from anydevice.errors import OptionError
from anydevice.training.environment import is_set

__all__ = ["ProjectConfiguration"]


@names_unknown_arguments
@dataclass
class ProjectConfiguration:
    """Where a run keeps its files, and how its checkpoints are named.

    Args:
        project_dir: the run's folder.
        logging_dir: where trackers write; None is ``project_dir``.
        automatic_checkpoint_naming: `save_state` writes
            ``project_dir/checkpoints/checkpoint_NUMBER``; the number after the highest on disk.
        total_limit: how many of these are kept; the oldest go when a new one is complete.
        iteration: the least number of the next checkpoint.
        save_on_each_node: the local main process of each machine writes what the main process
            does, for machines that share no disk.
        save_state_alone: `save_state` is the main process's own call, for scripts that make it
            under ``if accelerator.is_main_process``: nobody waits for the others, whose random
            states are not saved. It has no effect where weights or optimizers are sharded: then
            all processes make the call. None: what ``anydevice launch --save_state_alone`` says.

    Raises:
        OptionError: ``total_limit`` is no positive number.

    Example:
        >>> from anydevice import ProjectConfiguration
        >>> ProjectConfiguration("run").logging_dir
        'run'
    """

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False
    save_state_alone: bool | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.total_limit is not None and self.total_limit < 1:
            raise OptionError(f"total_limit={self.total_limit}: keep at least one checkpoint")
        if self.save_state_alone is None:
            self.save_state_alone = is_set("ANYDEVICE_SAVE_STATE_ALONE")
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: Any = None) -> None:
        """Set the run's folder, and the trackers' where none was given."""
        self.project_dir = None if project_dir is None else os.fspath(project_dir)
        if self.logging_dir is None:
            self.logging_dir = self.project_dir
