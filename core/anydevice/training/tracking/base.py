"""What a tracker of experiments is, and finding one by name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from anydevice.errors import OptionError
from anydevice.installed import entry_points

__all__ = [
    "TRACKER_GROUP",
    "GeneralTracker",
    "find_tracker",
    "flat",
    "list_trackers",
    "run_folder",
]

#: The entry-point group in which a package offers its trackers.
TRACKER_GROUP: Final = "anydevice.trackers"


class GeneralTracker:
    """Base of trackers. Subclass it, set the attributes, and override the methods.

    Attributes:
        name: how the tracker is asked for, such as ``"tensorboard"``.
        requires_logging_directory: whether it writes to a folder of this machine; then it is
            made with the argument ``logging_dir``.
        main_process_only: whether only the main process has one.

    Example:
        >>> from anydevice.tracking import GeneralTracker
        >>> class Printing(GeneralTracker):
        ...     name = "printing"
        ...     requires_logging_directory = False
        ...     tracker = None
        ...     def log(self, values, step=None, **kwargs):
        ...         print(step, values)
        >>> Printing().log({"loss": 0.5}, step=3)
        3 {'loss': 0.5}
    """

    name: str = ""
    requires_logging_directory: ClassVar[bool] = False
    main_process_only: ClassVar[bool] = True

    def __init__(self, _blank: bool = False) -> None:
        if not _blank and not self.name:
            raise OptionError(f"{type(self).__name__} has no name: set the class attribute")

    @classmethod
    def why_not(cls) -> str | None:
        """What is missing to use it; None where nothing is."""
        return None

    @property
    def tracker(self) -> Any:
        """The object of the package beneath, for what this protocol does not say."""
        return None

    def start(self) -> None:
        """Begin a run; called once, before anything is logged."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the run's settings: names to numbers, texts or booleans."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep values of a step: names to numbers, texts or mappings of numbers."""

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep images of a step: names to images.

        Raises:
            OptionError: the tracker keeps none.
        """
        raise OptionError(f"the tracker {self.name!r} keeps no images")

    def log_table(self, table_name: str, *args: Any, **kwargs: Any) -> None:
        """Keep a table.

        Raises:
            OptionError: the tracker keeps none.
        """
        raise OptionError(f"the tracker {self.name!r} keeps no tables ({table_name!r})")

    def finish(self) -> None:
        """End the run."""


def list_trackers() -> list[str]:
    """Names of all trackers that packages offer; what they need may not be installed.

    Example:
        >>> {"jsonl", "tensorboard", "wandb"} <= set(list_trackers())
        True
    """
    return sorted({point.name for point in entry_points(TRACKER_GROUP)})


def find_tracker(name: str) -> type[GeneralTracker]:
    """The tracker of that name.

    Raises:
        OptionError: no tracker has this name, or it is not a tracker.
    """
    found = entry_points(TRACKER_GROUP, name)
    if not found:
        raise OptionError(
            f"log_with: no tracker {name!r} is installed; there are "
            f"{', '.join(list_trackers())}. Another package can offer it in the entry-point "
            f"group {TRACKER_GROUP}, or give a GeneralTracker of your own"
        )
    kind = found[0].load()
    if not (isinstance(kind, type) and issubclass(kind, GeneralTracker)):
        raise OptionError(f"the entry point {found[0].value} of {TRACKER_GROUP} is no tracker")
    return kind


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values without nesting: names joined by ``/``; tensors of one element become numbers."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            out |= {f"{key}/{name}": inner for name, inner in flat(value).items()}
        elif hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
            out[key] = value.item()
        else:
            out[key] = value
    return out


def run_folder(logging_dir: Any, run_name: str) -> str:
    """The folder of a run, made."""
    folder = os.path.join(os.fspath(logging_dir), run_name)
    os.makedirs(folder, exist_ok=True)
    return folder
