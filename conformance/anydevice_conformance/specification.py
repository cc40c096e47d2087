"""The specification's paragraphs as data.

The pages in ``docs/spec`` are the source; ``specification.json`` next to this file is made from
them, so that an installed package carries it::

    python -m anydevice_conformance.specification docs/spec
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import sys
from pathlib import Path
from typing import Final

__all__ = ["GROUPS", "Paragraph", "load_specification", "parse_pages"]

#: Prefix of the ids to the group's name, in the order of the specification.
GROUPS: Final = {
    "DEV": "Discovery",
    "MEM": "Memory",
    "MOV": "Movement",
    "OOM": "Out of memory",
    "STR": "Streams and events",
    "PIN": "Pinned memory",
    "RNG": "Random numbers",
    "DTY": "Dtypes",
    "COL": "Collectives",
    "INF": "Inference",
    "PRO": "Processes",
    "TRN": "Training",
}
#: The capability that a whole group belongs to.
GROUP_CAPABILITY: Final = {
    "STR": "streams",
    "PIN": "pinned_memory",
    "RNG": "device_rng",
    "COL": "collectives",
}
_FILE: Final = Path(__file__).with_name("specification.json")
_HEADING: Final = re.compile(r"^### ([A-Z]{3}-\d{3}) (.+)$", re.MULTILINE)
_CAPABILITY: Final = re.compile(r"\*Capability: (\w+)\.?\*")
_SINCE: Final = re.compile(r"\*Since: (\d+\.\d+)\.?\*")
_DEVICES: Final = re.compile(r"\*Devices: (\d+)")


@dataclasses.dataclass(frozen=True)
class Paragraph:
    """One testable statement.

    Attributes:
        id: such as ``"MOV-007"``.
        title: in a few words.
        statement: what must hold.
        reason: why.
        capability: the capability that it belongs to; None binds every backend.
        devices: how many devices it needs.
        since: the version of the specification from which it binds a backend that claims its
            capability.
    """

    id: str
    title: str
    statement: str
    reason: str
    capability: str | None = None
    devices: int = 1
    since: str = "1.0"

    @property
    def group(self) -> str:
        """The prefix of its id."""
        return self.id[:3]


@functools.cache
def load_specification() -> dict[str, Paragraph]:
    """All paragraphs by id, in order."""
    entries = json.loads(_FILE.read_text(encoding="utf-8"))
    return {entry["id"]: Paragraph(**entry) for entry in entries}


def parse_pages(folder: Path) -> list[Paragraph]:
    """Read the paragraphs out of the pages.

    Raises:
        ValueError: a paragraph without a reason, or an id that comes twice.
    """
    found: dict[str, Paragraph] = {}
    for page in sorted(folder.glob("[0-9]*.md")):
        pieces = _HEADING.split(page.read_text(encoding="utf-8"))[1:]
        for identity, title, body in zip(pieces[::3], pieces[1::3], pieces[2::3], strict=True):
            if identity in found:
                raise ValueError(f"{page.name}: {identity} comes twice")
            found[identity] = _parse(identity, title, body)
    order = list(GROUPS)
    return sorted(found.values(), key=lambda p: (order.index(p.group), p.id))


def _parse(identity: str, title: str, body: str) -> Paragraph:
    statement, mark, reason = body.partition("*Why:*")
    if not mark:
        raise ValueError(f"{identity} has no *Why:*")
    capability = _CAPABILITY.search(body)
    devices = _DEVICES.search(body)
    for pattern in (_CAPABILITY, _SINCE, re.compile(r"\*Devices: [^*]+\*")):
        reason = pattern.sub("", reason)
    return Paragraph(
        identity,
        title,
        _one_line(statement),
        _one_line(reason),
        capability[1] if capability else GROUP_CAPABILITY.get(identity[:3]),
        # "2 for the index": only some runs of the check need it
        int(devices[1])
        if devices and "for the" not in body[devices.start() : devices.end() + 9]
        else 1,
        since=since[1] if (since := _SINCE.search(body)) else "1.0",
    )


def _one_line(text: str) -> str:
    return " ".join(text.split())


def main(folder: str) -> None:
    """Write ``specification.json`` from the pages."""
    entries = [dataclasses.asdict(paragraph) for paragraph in parse_pages(Path(folder))]
    _FILE.write_text(json.dumps(entries, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
