"""A placement as shapes: devices as bars, blocks in order. `drawing` and `painting` show them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final

from anydevice.placement.placed import Facts, Placed, Share
from anydevice.text import format_bytes

__all__ = [
    "RESERVE",
    "Box",
    "Label",
    "Scene",
    "compose",
    "extent",
    "share_text",
    "shown_shares",
    "title_of",
]

_WIDTH: Final = 920
_LEFT: Final = 150  # where bars begin
_RIGHT: Final = 24
_TOP: Final = 64
_BAR: Final = 34
_PITCH: Final = 74
_LEGEND: Final = 24
#: Narrower than this (pixels), neighbouring blocks of one class are drawn as one.
_NARROW: Final = 3.0
#: Colour-blind safe hues, readable on white and on black; classes beyond these share the last.
_HUES: Final = ("#4477aa", "#ee8866", "#228833", "#aa3377", "#ccaa22", "#66ccee", "#8888a0")
#: The fill of what is reserved: hatched.
RESERVE: Final = "reserve"


@dataclasses.dataclass(frozen=True, slots=True)
class Box:
    """A rectangle, in pixels.

    Attributes:
        x, y: its upper left corner.
        width, height: its size.
        radius: of its corners.
        look: ``"background"``, ``"budget"``, ``"block"`` or ``"plain"``.
        fill: a colour such as ``"#4477aa"``, or `RESERVE`; empty: as its look says.
        tip: text that is shown on hovering.
    """

    x: float
    y: float
    width: float
    height: float
    radius: int
    look: str
    fill: str = ""
    tip: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Label:
    """A line of text.

    Attributes:
        x, y: where its baseline begins, in pixels.
        look: ``"title"``, ``"name"``, ``"note"``, or ``"inside"`` for one on a block.
        text: the words.
    """

    x: float
    y: float
    look: str
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Scene:
    """All shapes, those in front last; sizes in pixels."""

    title: str
    width: int
    height: int
    shapes: tuple[Box | Label, ...]


def compose(facts: Facts) -> Scene:
    """Lay a placement out.

    Accelerators are as long as their budgets, on one scale; the host and the disk, whose budgets
    would dwarf them, as long as what they hold. Hovering over a block shows its name and size.
    """
    rows = shown_shares(facts)
    longest = max((extent(name, share) for name, share in rows), default=0) or 1
    scale = (_WIDTH - _LEFT - _RIGHT) / longest
    colours = _colours(facts.blocks)
    shapes: list[Box | Label] = []
    for i, (name, share) in enumerate(rows):
        blocks = [p for p in facts.blocks if p.device == name and p.size]
        shapes += _bar(facts, name, share, blocks, _TOP + i * _PITCH, scale, colours)
    has_reserve = any(share.reserve for share in facts.shares.values())
    legend = _TOP + len(rows) * _PITCH + 8
    shapes += _legend(colours, facts, legend)
    entries = min(len(colours), len(_HUES)) + has_reserve
    height = legend + _LEGEND * -(-entries // 4) + 8
    title = title_of(facts)
    first = (Box(0, 0, _WIDTH, height, 8, "background"), Label(24, 36, "title", title))
    return Scene(title, _WIDTH, height, (*first, *shapes))


def title_of(facts: Facts) -> str:
    """The model, its bytes, and over how many devices."""
    rows = shown_shares(facts)
    total = format_bytes(sum(p.size for p in facts.blocks if p.tied_to is None))
    return f"{facts.model}: {total} over {len(rows)} device{'s' * (len(rows) != 1)}"


def shown_shares(facts: Facts) -> list[tuple[str, Share]]:
    """The devices that are drawn: accelerators, and the host and disk where they hold something."""
    return [
        (name, share)
        for name, share in facts.shares.items()
        if share.used or share.reserve or name not in ("cpu", "disk")
    ]


def extent(name: str, share: Share) -> int:
    """Bytes that a bar is long."""
    needed = share.used + share.reserve
    return needed if share.budget is None or name in ("cpu", "disk") else max(share.budget, needed)


def share_text(facts: Facts, share: Share) -> str:
    """What a device holds, in words."""
    runs = " (runs offloaded blocks)" if share.key == facts.main_device else ""
    budget = "" if share.budget is None else f" of {format_bytes(share.budget)}"
    kept = f", {format_bytes(share.reserve)} reserved" if share.reserve else ""
    return f"{format_bytes(share.used)}{budget}{kept}{runs}"


def _colours(blocks: Sequence[Placed]) -> dict[str, str]:
    """A hue for each class of block, the class with most bytes first."""
    sizes: dict[str, int] = {}
    for placed in blocks:
        if placed.size and placed.tied_to is None:
            sizes[placed.kind] = sizes.get(placed.kind, 0) + placed.size
    least = sum(sizes.values()) / (_WIDTH * 2)  # half a pixel, were the whole model one bar
    kinds = sorted((k for k in sizes if sizes[k] >= least), key=lambda kind: -sizes[kind])
    return {kind: _HUES[min(i, len(_HUES) - 1)] for i, kind in enumerate(kinds)}


def _bar(
    facts: Facts,
    name: str,
    share: Share,
    blocks: Sequence[Placed],
    y: int,
    scale: float,
    colours: dict[str, str],
) -> Iterator[Box | Label]:
    length = max(extent(name, share) * scale, 1.0)
    yield Label(24, y + 22, "name", str(share.key))
    yield Box(_LEFT, y, length, _BAR, 4, "budget")
    x = float(_LEFT)
    for kind, size, label, tip in _segments(blocks, scale):
        width = size * scale
        yield Box(x, y, width, _BAR, 2, "block", colours.get(kind, _HUES[-1]), tip)
        if len(label) * 6.6 + 8 < width:
            yield Label(x + 5, y + 21, "inside", label)
        x += width
    if share.reserve:
        x = min(x, _LEFT + length - share.reserve * scale)
        kept = f"{format_bytes(share.reserve)} reserved"
        yield Box(x, y, share.reserve * scale, _BAR, 0, "plain", RESERVE, kept)
    yield Label(_LEFT, y + _BAR + 17, "note", share_text(facts, share))


def _segments(blocks: Sequence[Placed], scale: float) -> Iterator[tuple[str, int, str, str]]:
    """What to draw of a device: class, bytes, label and tip; narrow neighbours as one."""

    def group(placed: Placed) -> tuple[str, str]:
        narrow = placed.size * scale < _NARROW
        return placed.kind, "" if narrow else placed.name

    drawn = (
        p for p in blocks if p.tied_to is None
    )  # the others' bytes are in what they are tied to
    for (kind, _), same in groupby(drawn, group):
        members = list(same)
        size = sum(p.size for p in members)
        first = members[0].name or "the whole model"
        name = first if len(members) == 1 else f"{first} ... {members[-1].name}"
        yield kind, size, name.rpartition(".")[2], f"{name} ({kind}), {format_bytes(size)}"


def _legend(colours: dict[str, str], facts: Facts, y: int) -> Iterator[Box | Label]:
    named = [*colours.items()][: len(_HUES)]
    if len(colours) > len(_HUES):
        named[-1] = ("other", named[-1][1])
    if any(share.reserve for share in facts.shares.values()):
        named.append(("reserved", RESERVE))
    step = (_WIDTH - 48) // 4
    for i, (label, fill) in enumerate(named):
        x, line = 24 + i % 4 * step, y + i // 4 * _LEGEND
        yield Box(x, line, 14, 14, 3, "plain", fill)
        yield Label(x + 20, line + 12, "note", label)
