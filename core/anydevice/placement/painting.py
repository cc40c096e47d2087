"""A placement as a PNG, painted by Pillow.

Pillow includes a font: no browser, system library or installed font is needed.
"""

from __future__ import annotations

import io
from typing import Any, Final

from anydevice.errors import MissingDependencyError
from anydevice.placement.placed import Facts
from anydevice.placement.scene import RESERVE, Box, Label, Scene, compose

__all__ = ["paint"]

#: Pixels of the image for each of the scene, so that it is sharp on dense screens.
_SCALE: Final = 2
#: Of each look: fill and outline of boxes; size and colour of labels.
_BOXES: Final = {
    "background": ("#ffffff", None),
    "budget": ("#f1f3f5", "#c5ccd3"),
    "block": (None, "#ffffff"),
    "plain": (None, None),
}
_LABELS: Final = {
    "title": (16, "#1f2328"),
    "name": (13, "#1f2328"),
    "note": (12, "#59636e"),
    "inside": (11, "#ffffff"),
}
_HATCH: Final = ("#59636e", 7)


def paint(facts: Facts) -> bytes:
    """The bytes of a PNG with light colours, 1840 pixels wide.

    Raises:
        MissingDependencyError: Pillow is not installed.
    """
    try:
        from PIL import Image, ImageDraw
    except ImportError as error:
        raise MissingDependencyError(
            "a PNG needs Pillow: pip install 'anydevice[pictures]' (or pip install pillow); "
            "SVG and HTML need nothing"
        ) from error
    scene: Scene = compose(facts)
    image = Image.new("RGB", (scene.width * _SCALE, scene.height * _SCALE), "#ffffff")
    brush = ImageDraw.Draw(image)
    for shape in scene.shapes:
        if isinstance(shape, Label):
            _write(brush, shape)
        elif shape.fill == RESERVE:
            image.paste(*_hatched(shape))
        else:
            _fill(brush, shape)
    data = io.BytesIO()
    image.save(data, "PNG", optimize=True)
    return data.getvalue()


def _corners(box: Box) -> tuple[int, int, int, int]:
    left, top = round(box.x * _SCALE), round(box.y * _SCALE)
    right, bottom = round((box.x + box.width) * _SCALE), round((box.y + box.height) * _SCALE)
    return left, top, max(right - 1, left), max(bottom - 1, top)


def _fill(brush: Any, box: Box) -> None:
    fill, outline = _BOXES[box.look]
    left, top, right, bottom = _corners(box)
    # An outline wider than a narrow block would hide it.
    edge = outline if right - left >= 4 * _SCALE else None
    brush.rounded_rectangle(
        (left, top, right, bottom),
        min(box.radius * _SCALE, (right - left) // 2),
        fill=box.fill or fill,
        outline=edge,
        width=_SCALE // 2,
    )


def _hatched(box: Box) -> tuple[Any, tuple[int, int], Any]:
    """What to paste for what is reserved: a colour's image, the place, and the mask of lines."""
    from PIL import Image, ImageDraw

    left, top, right, bottom = _corners(box)
    width, height = right - left + 1, bottom - top + 1
    colour, step = _HATCH
    mask = Image.new("L", (width, height), 0)
    brush = ImageDraw.Draw(mask)
    for x in range(-height, width + height, step * _SCALE):
        brush.line((x, height, x + height, 0), fill=255, width=_SCALE)
    return Image.new("RGB", (width, height), colour), (left, top), mask


def _write(brush: Any, label: Label) -> None:
    from PIL import ImageFont

    size, colour = _LABELS[label.look]
    font = ImageFont.load_default(size * _SCALE)
    brush.text(
        (label.x * _SCALE, label.y * _SCALE), label.text, fill=colour, font=font, anchor="ls"
    )
