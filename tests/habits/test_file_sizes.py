"""A file is one concept: none has more than 300 lines."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT = 300
#: Files that may be longer, each with the reason.
LONGER = {
    "core/anydevice/backend.py": "the one interface of all devices, read from top to bottom",
}
FOLDERS = ("core", "backends", "conformance")


def lines_of(path):
    return len(path.read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_file_is_too_long(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    sizes = {path.relative_to(ROOT).as_posix(): lines_of(path) for path in files}
    long = {name: size for name, size in sizes.items() if size > LIMIT and name not in LONGER}
    assert not long, f"divide what is more than one concept: {long}"


@pytest.mark.parametrize("name", LONGER)
def test_an_exception_is_still_needed(name):
    assert lines_of(ROOT / name) > LIMIT
