"""What happens in a run, as it happens: a list of events, which outlives a crash of the process.

An event is a dict with the key ``event``:

======================  ===================================================================
``stamps``              what the process knows of versions and devices
``collected``           ``checks``: the checks that pytest found
``deselected``          ``checks``: those that an option left out
``override``            ``what``: something outside the suite that changed it
``start``               ``check``, ``case``, ``needs`` (capabilities)
``result``              ``check``, ``case``, ``needs``, ``status``, ``message``, ``seconds``
``flag``                ``what``, ``message``: it works, and is not claimed
``finish``              the process came to its end
======================  ===================================================================
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["Journal"]


class Journal:
    """Events in memory, and in a file where one is named."""

    def __init__(self, path: Path | None = None) -> None:
        self.events: list[dict[str, Any]] = []
        self._path = path

    def write(self, event: str, **values: Any) -> None:
        """Add an event; it is in the file before this returns."""
        entry = {"event": event, **values}
        self.events.append(entry)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")

    def earlier(self) -> list[dict[str, Any]]:
        """What a process before this one wrote to the same file."""
        return self.read(self._path) if self._path is not None else []

    @staticmethod
    def read(path: Path) -> list[dict[str, Any]]:
        """The events in a file; a last line cut short by a crash is left out."""
        events = []
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            try:
                events.append(json.loads(line))
            except json.JSONDecodeError:
                break
        return events
