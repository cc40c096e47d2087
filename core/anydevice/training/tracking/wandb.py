"""Weights & Biases."""

from __future__ import annotations

import importlib.util
from typing import Any

from anydevice.errors import MissingDependencyError
from anydevice.training.tracking.base import GeneralTracker

__all__ = ["WandBTracker"]


class WandBTracker(GeneralTracker):
    """Sends values to a project of Weights & Biases.

    Args:
        run_name: the project.
        **kwargs: for `wandb.init`.

    Raises:
        MissingDependencyError: wandb is not installed.

    Example:
        >>> from anydevice.tracking import WandBTracker
        >>> WandBTracker.name, WandBTracker.requires_logging_directory
        ('wandb', False)
    """

    name = "wandb"
    requires_logging_directory = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        if problem := self.why_not():
            raise MissingDependencyError(problem)
        self.run_name = run_name
        self._kwargs = kwargs
        self.run: Any = None

    @classmethod
    def why_not(cls) -> str | None:
        """What is missing to use it."""
        if importlib.util.find_spec("wandb") is None:
            return "log_with='wandb' needs Weights & Biases: pip install wandb"
        return None

    @property
    def tracker(self) -> Any:
        """The run."""
        return self.run

    def start(self) -> None:
        """Begin the run."""
        import wandb

        self.run = wandb.init(project=self.run_name, **self._kwargs)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep settings in the run's configuration."""
        self.run.config.update(values, allow_val_change=True)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep values of a step."""
        self.run.log(values, step=step, **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep lists of images."""
        import wandb

        for key, images in values.items():
            self.run.log({key: [wandb.Image(image) for image in images]}, step=step, **kwargs)

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Keep a table, of columns and rows or of a data frame."""
        import wandb

        names: Any = columns  # wandb takes numbers too, and mypy holds it to its own list
        table = wandb.Table(columns=names, data=data, dataframe=dataframe)
        self.run.log({table_name: table}, step=step, **kwargs)

    def finish(self) -> None:
        """End the run."""
        if self.run is not None:
            self.run.finish()
