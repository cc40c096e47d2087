"""A placement as a picture: devices as bars, blocks in order. One self-contained SVG.

It carries its own colours for light and dark, so it looks right in a README, a notebook or a page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from typing import Final

from anydevice.placement.placed import Facts, Placed, Share
from anydevice.text import format_bytes

__all__ = ["draw"]

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
_STYLE: Final = """
.bg{fill:#ffffff}.t{fill:#1f2328;font:600 16px system-ui,sans-serif}
.n{fill:#1f2328;font:600 13px system-ui,sans-serif}.s{fill:#59636e;font:12px system-ui,sans-serif}
.b{fill:#f1f3f5;stroke:#c5ccd3}.k{stroke:#ffffff;stroke-width:1}.h{stroke:#59636e;stroke-width:1.5}
.e{fill:none;stroke:#59636e;stroke-dasharray:4 3}.w{fill:#ffffff;font:600 11px system-ui,sans-serif}
@media (prefers-color-scheme:dark){.bg{fill:#0d1117}.t,.n{fill:#e6edf3}.s{fill:#9198a1}
.b{fill:#1c2128;stroke:#3d444d}.k{stroke:#0d1117}.h,.e{stroke:#9198a1}}
""".strip().replace("\n", "")


def draw(facts: Facts) -> str:
    """Draw a facts.

    Accelerators are as long as their budgets, on one scale; the host and the disk, whose budgets
    would dwarf them, as long as what they hold. Each block tells its name and size on hovering.
    """
    rows = [(name, share) for name, share in facts.shares.items() if _shown(name, share)]
    longest = max((_extent(name, share) for name, share in rows), default=0) or 1
    scale = (_WIDTH - _LEFT - _RIGHT) / longest
    colours = _colours(facts.blocks)
    parts: list[str] = []
    for i, (name, share) in enumerate(rows):
        blocks = [p for p in facts.blocks if p.device == name and p.size]
        parts += _bar(facts, name, share, blocks, _TOP + i * _PITCH, scale, colours)
    has_reserve = any(share.reserve for share in facts.shares.values())
    legend = _TOP + len(rows) * _PITCH + 8
    parts += _legend(colours, facts, legend)
    entries = min(len(colours), len(_HUES)) + has_reserve
    height = legend + _LEGEND * -(-entries // 4) + 8
    total = format_bytes(sum(p.size for p in facts.blocks if p.tied_to is None))
    title = escape(f"{facts.model}: {total} over {len(rows)} device{'s' * (len(rows) != 1)}")
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
            f'width="{_WIDTH}" height="{height}" role="img" aria-label="{title}">',
            f"<style>{_STYLE}</style>",
            '<defs><pattern id="reserve" width="7" height="7" patternUnits="userSpaceOnUse" '
            'patternTransform="rotate(45)"><line class="h" x1="0" y1="0" x2="0" y2="7"/>'
            "</pattern></defs>",
            f'<rect class="bg" width="{_WIDTH}" height="{height}" rx="8"/>',
            f'<text class="t" x="24" y="36">{title}</text>',
            *parts,
            "</svg>",
        ]
    )


def _shown(name: str, share: Share) -> bool:
    return bool(share.used or share.reserve) or name not in ("cpu", "disk")


def _extent(name: str, share: Share) -> int:
    """Bytes that a bar is long."""
    needed = share.used + share.reserve
    return needed if share.budget is None or name in ("cpu", "disk") else max(share.budget, needed)


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
) -> Iterator[str]:
    length = max(_extent(name, share) * scale, 1.0)
    runs = " (runs offloaded blocks)" if share.key == facts.main_device else ""
    budget = "" if share.budget is None else f" of {format_bytes(share.budget)}"
    kept = f", {format_bytes(share.reserve)} reserved" if share.reserve else ""
    yield f'<text class="n" x="24" y="{y + 22}">{escape(str(share.key))}</text>'
    yield f'<rect class="b" x="{_LEFT}" y="{y}" width="{length:.1f}" height="{_BAR}" rx="4"/>'
    x = float(_LEFT)
    for kind, size, label, tip in _segments(blocks, scale):
        width = size * scale
        yield (
            f'<rect class="k" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}" rx="2" '
            f'fill="{colours.get(kind, _HUES[-1])}"><title>{escape(tip)}</title></rect>'
        )
        if len(label) * 6.6 + 8 < width:
            yield f'<text class="w" x="{x + 5:.1f}" y="{y + 21}">{escape(label)}</text>'
        x += width
    if share.reserve:
        x = min(x, _LEFT + length - share.reserve * scale)
        yield (
            f'<rect x="{x:.1f}" y="{y}" width="{share.reserve * scale:.1f}" height="{_BAR}" '
            f'fill="url(#reserve)"><title>{escape(kept[2:])}</title></rect>'
        )
    text = f"{format_bytes(share.used)}{budget}{kept}{runs}"
    yield f'<text class="s" x="{_LEFT}" y="{y + _BAR + 17}">{escape(text)}</text>'


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


def _legend(colours: dict[str, str], facts: Facts, y: int) -> Iterator[str]:
    named = [(kind, f'fill="{hue}"') for kind, hue in [*colours.items()][: len(_HUES)]]
    if len(colours) > len(_HUES):
        named[-1] = ("other", named[-1][1])
    if any(share.reserve for share in facts.shares.values()):
        named.append(("reserved", 'fill="url(#reserve)"'))
    step = (_WIDTH - 48) // 4
    for i, (label, fill) in enumerate(named):
        x, line = 24 + i % 4 * step, y + i // 4 * _LEGEND
        yield f'<rect x="{x}" y="{line}" width="14" height="14" rx="3" {fill}/>'
        yield f'<text class="s" x="{x + 20}" y="{line + 12}">{escape(label)}</text>'
