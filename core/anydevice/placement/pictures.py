"""The pictures that a placement draws of itself: SVG, HTML, PNG, and text for a terminal."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from anydevice.errors import OptionError
from anydevice.placement.drawing import draw, draw_page, draw_text
from anydevice.placement.painting import paint
from anydevice.placement.placed import Facts

__all__ = ["Pictures", "picture_path"]

_KINDS: Final = (".svg", ".png", ".html", ".txt")


def picture_path(path: str | os.PathLike[str]) -> Path:
    """The path of a picture that is to be written.

    Raises:
        OptionError: its end names no kind of picture.
    """
    file = Path(path)
    if file.suffix.lower() not in _KINDS:
        raise OptionError(
            f"{file}: a picture ends in {', '.join(_KINDS[:-1])} or {_KINDS[-1]}"
            + (f", not in {file.suffix}" if file.suffix else "")
        )
    return file


class Pictures(Facts):
    """The methods of a `Placement` that draw it."""

    def to_svg(self) -> str:
        """Draw the devices as bars with the blocks in order: one self-contained SVG."""
        return draw(self)

    def to_html(self) -> str:
        """A page that needs nothing else: the picture, the table, and the reason for each block."""
        return draw_page(self)

    def to_png(self) -> bytes:
        """The picture as the bytes of a PNG, 1840 pixels wide.

        Raises:
            MissingDependencyError: Pillow is not installed.
        """
        return paint(self)

    def to_text(self, width: int = 40) -> str:
        """The picture for a terminal: a bar for each device.

        Args:
            width: columns of the longest bar.

        Example:
            >>> model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
            >>> print(infer_auto_device_map(model, {"cpu": "20KB", "disk": "1MB"}).to_text(8))
            Sequential: 32.5 KiB over 2 devices
              cpu   ████████  16.2 KiB of 19.5 KiB
              disk  ████████  16.2 KiB of 977 KiB
              █ weights  ░ reserved for offloaded blocks  · free
        """
        return draw_text(self, width)

    def save_picture(self, path: str | os.PathLike[str]) -> Path:
        """Write the picture; the end of the name says as what.

        Args:
            path: a file that ends in ``.svg``, ``.png``, ``.html`` or ``.txt``.

        Returns:
            The file.

        Raises:
            OptionError: the name ends in something else, or the file cannot be written.
            MissingDependencyError: a PNG is asked for, and Pillow is not installed.
        """
        file = picture_path(path)
        kind = file.suffix.lower()
        if kind == ".png":
            data = self.to_png()
        else:
            text = {".svg": self.to_svg, ".html": self.to_html, ".txt": self.to_text}[kind]
            data = f"{text()}\n".encode()
        try:
            file.write_bytes(data)
        except OSError as error:
            raise OptionError(f"{file} cannot be written: {error.strerror}") from error
        return file

    def _repr_svg_(self) -> str:
        """Notebooks show the picture."""
        return self.to_svg()
