"""From ``log_with`` to trackers."""

from __future__ import annotations

from typing import Any

from anydevice.errors import MissingDependencyError, OptionError
from anydevice.training.tracking.base import GeneralTracker, find_tracker, list_trackers

__all__ = ["choose_trackers"]


def choose_trackers(log_with: Any, logging_dir: Any) -> list[type[GeneralTracker] | GeneralTracker]:
    """The trackers that were asked for: classes by name, and the user's own objects.

    Args:
        log_with: a name, a `LoggerType`, a `GeneralTracker`, or a list of them; "all" is every one
            whose package is installed.
        logging_dir: where those write that write files.

    Raises:
        OptionError: an unknown name; a tracker that writes files, and no folder for them.
        MissingDependencyError: a tracker's package is not installed.
    """
    given = log_with if isinstance(log_with, (list, tuple)) else [log_with]
    chosen: list[type[GeneralTracker] | GeneralTracker] = []
    for each in given:
        if each is None:
            continue
        if isinstance(each, GeneralTracker):
            chosen.append(each)
            continue
        if isinstance(each, type) and issubclass(each, GeneralTracker):
            chosen.append(_usable(each, logging_dir))
            continue
        name = str(getattr(each, "value", each)).lower()
        if name == "all":
            kinds = [find_tracker(one) for one in list_trackers()]
            ready = [k for k in kinds if k.why_not() is None]
            ready = [k for k in ready if logging_dir or not k.requires_logging_directory]
            chosen += [kind for kind in ready if kind not in chosen]
        else:
            chosen.append(_usable(find_tracker(name), logging_dir))
    return chosen


def _usable(kind: type[GeneralTracker], logging_dir: Any) -> type[GeneralTracker]:
    if problem := kind.why_not():
        raise MissingDependencyError(problem)
    if kind.requires_logging_directory and logging_dir is None:
        raise OptionError(
            f"log_with={kind.name!r} writes files: say where with Accelerator(project_dir=...) or "
            "ProjectConfiguration(logging_dir=...)"
        )
    return kind
