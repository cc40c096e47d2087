"""The table of the reference's names: each can be imported from where the page says."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("make_names", ROOT / "scripts" / "make_names.py")
make_names = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make_names)
WRITTEN = make_names.PAGE.read_text(encoding="utf-8")
NAMES = [name for found in make_names.names(WRITTEN).values() for name in found]


def test_the_page_has_every_name_once():
    assert len(NAMES) == len(set(NAMES)) == 106


@pytest.mark.parametrize("name", NAMES)
def test_each_name_can_be_imported(name):
    assert make_names.resolve(make_names.here(name)) is not None
    assert make_names.resolve(make_names.home_of(make_names.here(name))) is not None


def test_the_page_is_up_to_date():
    assert make_names.page() == WRITTEN, "run: python scripts/make_names.py"
