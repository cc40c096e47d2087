"""What packages offer by entry point is read once, and again where something has changed."""

from __future__ import annotations

import importlib.metadata
import os

import pytest

from anydevice import installed


def add(folder, name, group="a.group"):
    info = folder / f"{name}-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = module_of_{name}\n")


@pytest.fixture
def reads(monkeypatch):
    """How often the files were read."""
    made = []
    read = importlib.metadata.entry_points
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda: made.append(1) or read())
    installed.forget()
    yield made
    monkeypatch.undo()
    installed.forget()


def test_they_are_those_of_the_standard_library():
    for group in ("anydevice.backends", "anydevice.engines", "console_scripts"):
        wanted = importlib.metadata.entry_points(group=group)
        assert sorted(installed.entry_points(group)) == sorted(wanted)
    (point,) = installed.entry_points("anydevice.engines", "ddp")
    assert (point.name, point.group, point.dist.name) == ("ddp", "anydevice.engines", "anydevice")
    assert installed.entry_points("anydevice.engines", "none") == []
    assert installed.entry_points("no.group") == []


def test_they_are_read_again_where_the_path_or_a_folder_on_it_has_changed(
    reads, tmp_path, monkeypatch
):
    def names():
        return [point.name for point in installed.entry_points("a.group")]

    first, second, empty = (tmp_path / name for name in ("first", "second", "empty"))
    add(first, "a")
    add(second, "b")
    empty.mkdir()
    (tmp_path / "file").touch()
    for folder in (first, empty, tmp_path / "none", tmp_path / "file"):
        monkeypatch.syspath_prepend(folder)
    assert names() == names() == ["a"]
    monkeypatch.syspath_prepend(tmp_path)  # in which no package is
    assert names() == ["a"]
    assert len(reads) == 1
    monkeypatch.syspath_prepend(second)
    assert sorted(names()) == ["a", "b"]
    assert len(reads) == 2
    add(first, "c")
    os.utime(first, ns=(1, 1))  # whatever the clock of this file system counts
    assert sorted(names()) == ["a", "b", "c"]
    assert len(reads) == 3
    installed.forget()
    assert sorted(names()) == ["a", "b", "c"]
    assert len(reads) == 4
