"""The documentation: no link leads nowhere, and every member of the interface is described."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from anydevice.backend import Capabilities, DeviceBackend

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    local = [t.partition("#")[0] for t in targets if not re.match(r"[a-z]+:", t)]
    missing = [t for t in local if t and not (page.parent / t).exists()]
    assert not missing, f"{page.relative_to(ROOT)} links to {missing}"


def test_every_member_of_the_interface_is_in_the_specification():
    spec = "\n".join(p.read_text(encoding="utf-8") for p in (ROOT / "docs" / "spec").glob("*.md"))
    members = [name for name in vars(DeviceBackend) if not name.startswith("_")]
    members += list(Capabilities.__dataclass_fields__)
    missing = [name for name in members if f"`{name}" not in spec and f"{name}`" not in spec]
    assert not missing, f"docs/spec/ does not name {missing}"


def test_readme_begins_with_the_two_commands():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    top = re.sub(r"!\[.*?\]\(.*?\)", "", text)[:300]  # without the picture
    assert "make demo" in top
    assert "make test" in top


def test_the_picture_of_the_floors_has_every_floor_in_order():
    script = runpy.run_path(str(ROOT / "scripts" / "draw_floors.py"))
    drawn = re.findall(r'<text class="n"[^>]*>(\w+)</text>', script["PICTURE"].read_text("utf-8"))
    assert drawn == [name for floor in script["floors"]() for name in floor], (
        "run: python scripts/draw_floors.py"
    )
