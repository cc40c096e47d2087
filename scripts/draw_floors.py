#!/usr/bin/env python3
"""Write docs/images/floors.svg: the packages of this repository, and the floors of the library.

usage: python scripts/draw_floors.py

The floors are the layers in pyproject.toml that `lint-imports` holds.
"""

from __future__ import annotations

import ast
import html
from pathlib import Path
from typing import Final

import tomllib

ROOT: Final = Path(__file__).parents[1]
PICTURE: Final = ROOT / "docs" / "images" / "floors.svg"
#: Numbers of pixels.
WIDTH: Final = 920
LEFT: Final = 24
ROW: Final = 26
TOP: Final = 132
LETTER: Final = 7.0
SIDE: Final = 250
#: Of a floor's purpose.
LETTERS: Final = 72
_STYLE: Final = (
    ".bg{fill:#ffffff}.t{fill:#1f2328;font:600 14px system-ui,sans-serif}"
    ".s{fill:#59636e;font:12px system-ui,sans-serif}"
    ".n{fill:#1f2328;font:12px ui-monospace,monospace}"
    ".b{fill:#eef3f8;stroke:#4477aa}.v{fill:#fdf1ec;stroke:#ee8866}.c{fill:#eaf5ec;stroke:#228833}"
    ".a{stroke:#59636e;stroke-width:1.5;fill:none}.h{fill:#59636e}"
    "@media (prefers-color-scheme:dark){.bg{fill:#0d1117}.t,.n{fill:#e6edf3}.s{fill:#9198a1}"
    ".b{fill:#16202c}.v{fill:#2b1d17}.c{fill:#152519}.a{stroke:#9198a1}.h{fill:#9198a1}}"
)


def floors() -> list[list[str]]:
    """The modules of the library on each floor, the highest floor first."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    (layers,) = (c["layers"] for c in contracts if c["type"] == "layers")
    return [[name.strip().partition(".")[2] for name in layer.split("|")] for layer in layers]


def purpose(module: str) -> str:
    """The first line of a module's docstring."""
    path = ROOT / "core" / "anydevice" / module
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    line = text.partition("\n")[0].replace("`", "").rstrip(".")
    return line if len(line) <= LETTERS else line[:LETTERS].rpartition(" ")[0] + " ..."


def box(kind: str, x: float, y: float, width: float, height: float) -> str:
    """A rectangle."""
    return (
        f'<rect class="{kind}" x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" rx="4"/>'
    )


def text(kind: str, x: float, y: float, words: str) -> str:
    """A line of text."""
    return f'<text class="{kind}" x="{x:.0f}" y="{y:.0f}">{words}</text>'


def arrow(points: str) -> str:
    """A line along some points, with a head at its end."""
    return f'<polyline class="a" points="{points}" marker-end="url(#head)"/>'


def draw() -> str:
    """The picture."""
    parts: list[str] = []
    inner = WIDTH - SIDE - 2 * LEFT - 40
    parts.append(box("c", LEFT, 20, inner, 58))
    parts.append(text("t", LEFT + 12, 44, "anydevice_conformance"))
    parts.append(text("s", LEFT + 12, 64, "the suite, the simulator, the demo"))
    parts.append(arrow(f"{LEFT + 40},78 {LEFT + 40},{TOP - 34}"))
    parts.append(text("t", LEFT, TOP - 12, "anydevice"))
    parts.append(
        text("s", LEFT + 84, TOP - 12, "a floor imports only lower ones; none names a device")
    )
    y, interface = TOP, 0
    for names in floors():
        x = LEFT
        for name in names:
            width = LETTER * len(name) + 16
            if x > LEFT and x + width > LEFT + inner:
                x, y = LEFT, y + ROW - 2
            parts.append(box("v" if name == "backend" else "b", x, y, width, ROW - 6))
            parts.append(text("n", x + 8, y + 14, name))
            x += width + 4
        if len(names) == 1 and names != ["backend"]:
            parts.append(text("s", LEFT + 136, y + 14, html.escape(purpose(names[0]))))
        if names == ["backend"]:
            interface = y + ROW // 2 - 3
        y += ROW
    right = WIDTH - LEFT - SIDE
    parts.append(box("v", right, interface - 120, SIDE, 76))
    parts.append(text("t", right + 12, interface - 96, "anydevice_backends"))
    parts.append(text("s", right + 12, interface - 76, "cpu, cuda, mps, xpu, npu, mlu"))
    parts.append(text("s", right + 12, interface - 58, "import the interface only"))
    parts.append(box("v", right, interface - 30, SIDE, 60))
    parts.append(text("t", right + 12, interface - 6, "a vendor's package"))
    parts.append(text("s", right + 12, interface + 14, "found in the same way"))
    end = LEFT + LETTER * len("backend") + 22
    parts.append(arrow(f"{right},{interface} {end:.0f},{interface}"))
    parts.append(
        arrow(
            f"{right},{interface - 60} {right - 16},{interface - 60} "
            f"{right - 16},{interface - 6} {end:.0f},{interface - 6}"
        )
    )
    height = y + 20
    marker = (
        '<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" '
        'markerHeight="8" orient="auto"><path class="h" d="M0,0 L8,4 L0,8 z"/></marker></defs>'
    )
    label = "The packages of the repository, and the floors of the library"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'width="{WIDTH}" height="{height}" role="img" aria-label="{label}">',
            f"<style>{_STYLE}</style>",
            marker,
            f'<rect class="bg" width="{WIDTH}" height="{height}" rx="8"/>',
            *parts,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
