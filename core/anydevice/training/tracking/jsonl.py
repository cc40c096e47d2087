"""A tracker that needs nothing: one line of JSON for each call."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from anydevice.training.tracking.base import GeneralTracker, flat, run_folder

__all__ = ["JSONLinesTracker"]


class JSONLinesTracker(GeneralTracker):
    """Writes ``LOGGING_DIR/RUN_NAME/log.jsonl``: each line has ``time``, ``step`` and the values.

    Args:
        run_name: the folder's name.
        logging_dir: where it stands.
        append: go on with the file that is there.

    Example:
        >>> import tempfile
        >>> from anydevice.tracking import JSONLinesTracker
        >>> tracker = JSONLinesTracker("run", tempfile.mkdtemp())
        >>> tracker.log({"loss": 0.5}, step=1)
        >>> tracker.finish()
    """

    name = "jsonl"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: Any = ".", *, append: bool = True) -> None:
        super().__init__()
        self.folder = Path(run_folder(logging_dir, run_name))
        self._mode = "a" if append else "w"
        self._file: Any = None

    @property
    def tracker(self) -> Path:
        """The file."""
        return self.folder / "log.jsonl"

    def start(self) -> None:
        """Open the file."""
        file: Any = open(self.tracker, self._mode, encoding="utf-8")  # noqa: SIM115 - see finish
        self._file = file

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Write ``config.json`` next to the file."""
        text = json.dumps(flat(values), default=str, indent=2)
        (self.folder / "config.json").write_text(text, encoding="utf-8")

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write a line."""
        if self._file is None:
            self.start()
        line = {"time": time.time(), "step": step, **flat(values)}
        self._file.write(json.dumps(line, default=str) + "\n")
        self._file.flush()

    def finish(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
