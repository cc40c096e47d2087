"""A vendor's list of failures that are known.

A JSON file: an object whose keys are checks (``"test_MOV_007_strides"``) or paragraphs
(``"MOV-007"``), and whose values have a ``reason`` and a ``link`` to the issue::

    {"MOV-020": {"reason": "the driver counts in 32 bits until 4.2", "link": "https://..."}}
"""

from __future__ import annotations

import json
from pathlib import Path

__all__ = ["load_known"]

Known = dict[str, dict[str, str]]


def load_known(path: Path | None) -> tuple[Known, list[str]]:
    """Read the file; what is wrong with it comes next to what is right."""
    if path is None:
        return {}, []
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return {}, [f"known failures {path}: {error}"]
    if not isinstance(entries, dict):
        return {}, [f"known failures {path}: not an object of checks"]
    known: Known = {}
    faults = []
    for name, entry in entries.items():
        words = entry if isinstance(entry, dict) else {}
        reason, link = str(words.get("reason", "")).strip(), str(words.get("link", "")).strip()
        if reason and link.startswith(("http://", "https://")):
            known[name] = {"reason": reason, "link": link}
        else:
            faults.append(f"known failure {name!r} needs a reason and a link (https://...)")
    return known, faults
