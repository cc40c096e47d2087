"""Logging in several processes: from process 0 only, or from each in order of rank.

logger = get_logger(__name__)
logger.info("once")
logger.info("from each, in order", main_process_only=False, in_order=True)
"""

from __future__ import annotations

import functools
import logging
from collections.abc import MutableMapping
from typing import Any

from anydevice.processes import PartialState, setting

__all__ = ["MultiProcessAdapter", "get_logger"]


class MultiProcessAdapter(logging.LoggerAdapter[logging.Logger]):
    """A logger that knows which process it is in.

    Each call takes two more keywords: ``main_process_only`` (default True: process 0 alone logs)
    and ``in_order`` (default False; with ``main_process_only=False``: the ranks log one after
    another, so that each of them has to make the call).
    """

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log, where this process is one that does.

        Raises:
            MissingRankError, CollectiveMismatchError: ``in_order``, and not all ranks call it.
        """
        main_only, in_order = kwargs.pop("main_process_only", True), kwargs.pop("in_order", False)
        kwargs.setdefault("stacklevel", 2)
        enabled = self.isEnabledFor(level)
        if not enabled and not (in_order and not main_only):
            return
        state = PartialState()
        if main_only:
            if state.is_main_process:
                self._write(level, msg, args, kwargs)
            return
        if not in_order:
            self._write(level, msg, args, kwargs)
            return
        for rank in range(state.num_processes):
            if enabled and rank == state.process_index:
                self._write(level, msg, args, kwargs)
            state.meet("logger in order")

    def _write(self, level: int, msg: object, args: Any, kwargs: dict[str, Any]) -> None:
        kwargs["stacklevel"] += 1  # this method's frame
        text, options = self.process(msg, kwargs)
        self.logger.log(level, text, *args, **options)

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        """Leave message and keywords as they are."""
        return msg, kwargs

    @functools.lru_cache(None)  # noqa: B019 - a logger lives as long as its process
    def warning_once(self, *args: Any, **kwargs: Any) -> None:
        """Warn, and say nothing when called again with the same arguments."""
        kwargs.setdefault("stacklevel", 3)  # this method's frame
        self.warning(*args, **kwargs)


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """Make a logger that is right in several processes.

    Args:
        name: of the logger, such as ``__name__``.
        log_level: such as ``"INFO"``; None: ``ACCELERATE_LOG_LEVEL`` or ``ANYDEVICE_LOG_LEVEL``,
            or else what the logger has.

    Raises:
        ValueError: there is no such level.

    Example:
        >>> from anydevice import get_logger
        >>> logger = get_logger("training", "INFO")
        >>> logger.info("written by process 0 only")
    """
    logger = logging.getLogger(name)
    level = log_level or setting("LOG_LEVEL")
    if level:
        logger.setLevel(level.upper())
        logger.root.setLevel(level.upper())
    return MultiProcessAdapter(logger, {})
