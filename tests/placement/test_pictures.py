"""The pictures of a placement: text, HTML, PNG, and files by their names."""

from __future__ import annotations

import builtins
import io
import runpy
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from torch import nn

from anydevice import AnyDeviceError
from anydevice.errors import MissingDependencyError, OptionError
from anydevice.placement import Placement, infer_auto_device_map

SCRIPTS = Path(__file__).parents[2] / "scripts"
#: Where bars begin and the first is, in pixels of a PNG (two for each of the SVG).
LEFT, MIDDLE, PITCH = 2 * 150, 2 * (64 + 17), 2 * 74


@pytest.fixture
def placement() -> Placement:
    """8 layers of 16 KiB: two on each accelerator, one on the host, the others on the disk."""
    model = nn.Sequential(*(nn.Linear(64, 63, bias=False) for _ in range(8)))
    budgets = {0: 80_000, 1: 40_000, "cpu": 40_000, "disk": 10**6}
    return infer_auto_device_map(model, budgets)


def test_bars_of_text_are_to_scale(placement: Placement) -> None:
    lines = placement.to_text(80).splitlines()
    assert lines[0].startswith("Sequential: 126 KiB over 4 devices")
    rows = {line.split()[0]: line[8:88] for line in lines[1:-1]}
    assert list(rows) == ["0", "1", "cpu", "disk"]
    assert len(rows["0"].rstrip()) == 80
    assert len(rows["1"].rstrip()) == 40
    used = {name: row.count("█") / 80 * 80_000 for name, row in rows.items()}
    for name in rows:
        assert used[name] == pytest.approx(placement.bytes_on(_key(name)), abs=1000)
    assert rows["0"].count("░") / 80 * 80_000 == pytest.approx(placement.reserve[0], abs=1000)


def _key(name: str) -> int | str:
    return int(name) if name.isdecimal() else name


class _Page(HTMLParser):
    """Tags, texts, and addresses that a page would ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self.loaded += [value for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_page_has_the_picture_the_table_and_the_reasons(placement: Placement) -> None:
    page = _Page()
    page.feed(placement.to_html())
    assert page.tags.count("svg") == 1
    assert page.loaded == []
    assert placement.table() in page.text
    assert placement.explain() in page.text


def test_a_png_shows_the_bars(placement: Placement) -> None:
    image = Image.open(io.BytesIO(placement.to_png())).convert("RGB")
    assert image.width == 1840

    def block_pixels(row: int) -> int:
        y = MIDDLE + row * PITCH - 24  # above the names on the blocks
        blue = (0x44, 0x77, 0xAA)
        return sum(image.getpixel((x, y)) == blue for x in range(LEFT, image.width))

    found = [block_pixels(row) for row in range(4)]
    longest = 2 * (920 - 150 - 24)
    for pixels, device in zip(found, (0, 1, "cpu", "disk"), strict=True):
        scaled = placement.bytes_on(device) / 80_000 * longest
        assert pixels == pytest.approx(scaled, rel=0.05), device


def test_files_are_written_by_the_ends_of_their_names(placement: Placement, tmp_path: Path) -> None:
    begins = {"a.svg": b"<svg", "b.HTML": b"<!doctype html>", "c.png": b"\x89PNG", "d.txt": b"Seq"}
    for name, begin in begins.items():
        file = placement.save_picture(tmp_path / name)
        assert file == tmp_path / name
        assert file.read_bytes().startswith(begin)


@pytest.mark.parametrize("name", ["a.jpeg", "plan", "x.svgz", "nowhere/a.svg"])
def test_a_file_that_cannot_be_is_named(placement: Placement, tmp_path: Path, name: str) -> None:
    with pytest.raises(OptionError, match=name):
        placement.save_picture(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_png_without_pillow(placement: Placement, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == "PIL":
            raise ImportError("No module named 'PIL'")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(
        MissingDependencyError, match=r"pip install 'anydevice\[pictures\]'"
    ) as caught:
        placement.to_png()
    assert isinstance(caught.value, AnyDeviceError)
    assert placement.to_svg()


def test_the_pictures_of_the_documentation_are_what_is_drawn_today() -> None:
    script = runpy.run_path(str(SCRIPTS / "make_pictures.py"))
    assert (script["FOLDER"] / "overview.svg").read_text("utf-8") == script[
        "placement"
    ]().to_svg() + "\n"
