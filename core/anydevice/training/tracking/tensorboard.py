"""TensorBoard."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anydevice.errors import MissingDependencyError
from anydevice.training.tracking.base import GeneralTracker, flat, run_folder

__all__ = ["TensorBoardTracker"]


class TensorBoardTracker(GeneralTracker):
    """Writes event files into ``LOGGING_DIR/RUN_NAME``, with torch's own writer.

    Args:
        run_name: the folder's name.
        logging_dir: where it stands.
        **kwargs: for `torch.utils.tensorboard.SummaryWriter`.

    Raises:
        MissingDependencyError: TensorBoard is not installed.

    Example:
        >>> import tempfile
        >>> from anydevice.tracking import TensorBoardTracker
        >>> tracker = TensorBoardTracker("run", tempfile.mkdtemp())
        >>> tracker.start()
        >>> tracker.log({"loss": 0.5}, step=1)
        >>> tracker.finish()
    """

    name = "tensorboard"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: Any, **kwargs: Any) -> None:
        super().__init__()
        if problem := self.why_not():
            raise MissingDependencyError(problem)
        self.logging_dir = run_folder(logging_dir, run_name)
        self._kwargs = kwargs
        self.writer: Any = None

    @classmethod
    def why_not(cls) -> str | None:
        """What is missing to use it."""
        if importlib.util.find_spec("tensorboard") is None:
            return "log_with='tensorboard' needs TensorBoard: pip install tensorboard"
        return None

    @property
    def tracker(self) -> Any:
        """The `SummaryWriter`."""
        return self.writer

    def start(self) -> None:
        """Open the writer."""
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(self.logging_dir, **self._kwargs)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep settings as hyperparameters, and as ``hparams.json`` too."""
        plain = {
            key: value if isinstance(value, (bool, int, float, str)) else str(value)
            for key, value in flat(values).items()
        }
        self.writer.add_hparams(plain, metric_dict={}, run_name="hparams")
        self.writer.flush()
        text = json.dumps(plain, indent=2)
        (Path(self.logging_dir) / "hparams.json").write_text(text, encoding="utf-8")

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep numbers as scalars, texts as text, mappings of numbers as one chart; not None."""
        for key, value in values.items():
            if isinstance(value, Mapping):
                self.writer.add_scalars(key, flat(value), global_step=step, **kwargs)
            elif isinstance(value, str):
                self.writer.add_text(key, value, global_step=step, **kwargs)
            elif value is not None:
                self.writer.add_scalar(key, value, global_step=step, **kwargs)
        self.writer.flush()

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep batches of images: arrays or tensors; ``dataformats`` says how, else NHWC."""
        kwargs.setdefault("dataformats", "NHWC")
        for key, images in values.items():
            self.writer.add_images(key, images, global_step=step, **kwargs)
        self.writer.flush()

    def finish(self) -> None:
        """Close the writer."""
        if self.writer is not None:
            self.writer.close()
