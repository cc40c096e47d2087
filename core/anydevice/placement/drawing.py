"""A placement as an SVG, a page of HTML, or lines of text.

The pictures are self-contained and carry their own colours for light and dark, so they look right
in a README, a notebook or a page.
"""

from __future__ import annotations

from html import escape
from typing import Final

from anydevice.placement.explain import explain, table
from anydevice.placement.placed import Facts
from anydevice.placement.scene import (
    RESERVE,
    Box,
    Label,
    compose,
    extent,
    share_text,
    shown_shares,
    title_of,
)

__all__ = ["draw", "draw_page", "draw_text"]

_STYLE: Final = """
.bg{fill:#ffffff}.t{fill:#1f2328;font:600 16px system-ui,sans-serif}
.n{fill:#1f2328;font:600 13px system-ui,sans-serif}.s{fill:#59636e;font:12px system-ui,sans-serif}
.b{fill:#f1f3f5;stroke:#c5ccd3}.k{stroke:#ffffff;stroke-width:1}.h{stroke:#59636e;stroke-width:1.5}
.e{fill:none;stroke:#59636e;stroke-dasharray:4 3}.w{fill:#ffffff;font:600 11px system-ui,sans-serif}
@media (prefers-color-scheme:dark){.bg{fill:#0d1117}.t,.n{fill:#e6edf3}.s{fill:#9198a1}
.b{fill:#1c2128;stroke:#3d444d}.k{stroke:#0d1117}.h,.e{stroke:#9198a1}}
""".strip().replace("\n", "")
_BOXES: Final = {"background": "bg", "budget": "b", "block": "k", "plain": ""}
_LABELS: Final = {"title": "t", "name": "n", "note": "s", "inside": "w"}
_PAGE: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
:root{{color-scheme:light dark}}
body{{max-width:960px;margin:2rem auto;padding:0 1rem;font:15px system-ui,sans-serif}}
svg{{width:100%;height:auto}}pre{{overflow-x:auto}}
</style>
</head>
<body>
{picture}
<pre>{table}</pre>
<pre>{reasons}</pre>
</body>
</html>"""


def draw(facts: Facts) -> str:
    """One SVG. Hovering over a block shows its name and size."""
    scene = compose(facts)
    size = f"{scene.width} {scene.height}"
    title = escape(scene.title)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" '
            f'width="{scene.width}" height="{scene.height}" role="img" aria-label="{title}">',
            f"<style>{_STYLE}</style>",
            f'<defs><pattern id="{RESERVE}" width="7" height="7" patternUnits="userSpaceOnUse" '
            'patternTransform="rotate(45)"><line class="h" x1="0" y1="0" x2="0" y2="7"/>'
            "</pattern></defs>",
            *(_rect(s) if isinstance(s, Box) else _words(s) for s in scene.shapes),
            "</svg>",
        ]
    )


def _rect(box: Box) -> str:
    look = f'class="{_BOXES[box.look]}" ' if _BOXES[box.look] else ""
    fill = f' fill="{f"url(#{RESERVE})" if box.fill == RESERVE else box.fill}"' if box.fill else ""
    place = f'x="{box.x:.1f}" y="{box.y}" width="{box.width:.1f}" height="{box.height}"'
    end = f"><title>{escape(box.tip)}</title></rect>" if box.tip else "/>"
    return f'<rect {look}{place} rx="{box.radius}"{fill}{end}'


def _words(label: Label) -> str:
    where = f'x="{label.x:.1f}" y="{label.y}"'
    return f'<text class="{_LABELS[label.look]}" {where}>{escape(label.text)}</text>'


def draw_page(facts: Facts) -> str:
    """A page of HTML: the picture, the table, and why each block is where it is."""
    return _PAGE.format(
        title=escape(title_of(facts)),
        picture=draw(facts),
        table=escape(table(facts)),
        reasons=escape(explain(facts)),
    )


def draw_text(facts: Facts, width: int) -> str:
    """Lines of text: a bar for each device, with weights, what is reserved, and what is free."""
    rows = shown_shares(facts)
    longest = max((extent(name, share) for name, share in rows), default=0) or 1
    names = max((len(str(share.key)) for _, share in rows), default=0)
    lines = [title_of(facts)]
    for name, share in rows:
        length = max(round(width * extent(name, share) / longest), 1)
        used = min(round(width * share.used / longest) or bool(share.used), length)
        kept = min(round(width * share.reserve / longest) or bool(share.reserve), length - used)
        bar = "█" * used + "░" * kept + "·" * (length - used - kept)
        lines.append(f"  {share.key!s:<{names}}  {bar:<{width}}  {share_text(facts, share)}")
    lines.append("  █ weights  ░ reserved for offloaded blocks  · free")
    return "\n".join(lines)
