"""A store is used at once, and brought to the disk meanwhile."""

import logging
import os
import threading

import pytest
import torch

from anydevice.errors import OffloadStoreError
from anydevice.offload_store import manifest, store, syncing
from anydevice.offload_store.manifest import LOCK_NAME, MANIFEST_NAME, Manifest
from anydevice.offload_store.store import open_store, write_store

WEIGHTS = {"a": torch.arange(12.0).view(3, 4), "b": torch.ones(5, dtype=torch.bfloat16)}


def join():
    for thread in threading.enumerate():
        if thread.name.startswith("anydevice-sync"):
            thread.join()


@pytest.fixture
def slow_disk(monkeypatch):
    """A disk that syncs nothing until it is let go."""
    go, real = threading.Event(), os.fsync

    def fsync(descriptor):
        assert go.wait(60)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    yield go
    go.set()
    join()


@pytest.fixture(autouse=True)
def known_boot(monkeypatch):
    """Not every system can tell one boot from another."""
    boot(monkeypatch, "this boot")


def boot(monkeypatch, name):
    for module in (manifest, store):
        monkeypatch.setattr(module, "current_boot", lambda: name)


def is_right(found):
    return found.keys() == WEIGHTS.keys() and all(torch.equal(found[n], WEIGHTS[n]) for n in found)


def test_it_is_complete_before_it_is_on_the_disk(tmp_path, slow_disk):
    assert is_right(write_store(tmp_path, WEIGHTS))
    assert is_right(open_store(tmp_path))
    assert (tmp_path / MANIFEST_NAME).read_bytes().startswith(b'{"synced": 0,')
    before = sorted(p.name for p in tmp_path.iterdir())
    slow_disk.set()
    join()
    assert (tmp_path / MANIFEST_NAME).read_bytes().startswith(b'{"synced": 1,')
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_what_was_not_on_the_disk_when_the_machine_stopped_is_refused_and_written_anew(
    tmp_path, slow_disk, monkeypatch
):
    write_store(tmp_path, WEIGHTS)
    boot(monkeypatch, "another boot")
    with pytest.raises(OffloadStoreError, match="not yet on the disk when the machine stopped"):
        open_store(tmp_path)
    slow_disk.set()
    assert is_right(write_store(tmp_path, WEIGHTS))
    join()
    assert is_right(open_store(tmp_path))


def test_what_was_on_the_disk_outlives_the_boot(tmp_path, monkeypatch):
    write_store(tmp_path, WEIGHTS)
    join()
    boot(monkeypatch, "another boot")
    assert is_right(open_store(tmp_path))
    assert Manifest.read(tmp_path).boot is None


def test_where_boots_cannot_be_told_apart_the_sync_comes_first(tmp_path, monkeypatch):
    boot(monkeypatch, None)
    steps = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)

        def noted(*args, real=real, name=name):
            steps.append(name)
            return real(*args)

        monkeypatch.setattr(os, name, noted)
    write_store(tmp_path, WEIGHTS)
    # The data file; it and the folder; the manifest; the folder.
    assert steps == ["replace", "fsync", "fsync", "fsync", "replace", "fsync"]
    assert (tmp_path / MANIFEST_NAME).read_bytes().startswith(b'{"synced": 1,')


def test_where_boots_cannot_be_told_apart_a_disk_that_refuses_is_an_error(tmp_path, monkeypatch):
    boot(monkeypatch, None)
    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OffloadStoreError, match="Input/output error"):
        write_store(tmp_path, WEIGHTS)
    assert [p.name for p in tmp_path.iterdir()] == [LOCK_NAME]


def refuse(_descriptor):
    raise OSError(5, "Input/output error")


def test_a_disk_that_refuses_later_is_told_and_the_store_does_not_outlive_the_boot(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(os, "fsync", refuse)
    with caplog.at_level(logging.ERROR):
        write_store(tmp_path, WEIGHTS)
        join()
    (record,) = caplog.records
    assert str(tmp_path) in record.getMessage()
    assert "Input/output error" in record.getMessage()
    monkeypatch.undo()
    with pytest.raises(OffloadStoreError, match="not a complete offload store"):
        open_store(tmp_path)  # the system may give other bytes than were written
    assert is_right(write_store(tmp_path, WEIGHTS))


def test_a_folder_that_is_removed_meanwhile_stays_removed(tmp_path, slow_disk, caplog):
    folder = tmp_path / "store"
    write_store(folder, WEIGHTS)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    slow_disk.set()
    join()
    assert not folder.exists()
    assert not caplog.records


@pytest.mark.parametrize("weights", [{"a": WEIGHTS["a"]}, WEIGHTS])
def test_the_next_writer_syncs_what_a_killed_one_had_not(tmp_path, monkeypatch, weights):
    with monkeypatch.context() as killed:
        killed.setattr(syncing, "sync_later", lambda *_: None)
        write_store(tmp_path, {"a": WEIGHTS["a"]})
    assert Manifest.read(tmp_path).boot is not None
    synced, real = set(), os.fsync

    def fsync(descriptor):
        synced.add(os.fstat(descriptor).st_ino)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    write_store(tmp_path, weights)
    join()
    files = {path.stat().st_ino for path in tmp_path.glob(f"{manifest.DATA_PREFIX}*")}
    assert len(files) == len(weights)
    assert files <= synced
    assert Manifest.read(tmp_path).boot is None


def test_a_store_that_is_on_the_disk_stays_so_when_it_is_added_to(tmp_path, monkeypatch):
    write_store(tmp_path, {"a": WEIGHTS["a"]})
    join()
    write_store(tmp_path, WEIGHTS)
    boot(monkeypatch, "another boot")
    assert is_right(open_store(tmp_path))


def test_a_manifest_that_another_writer_replaced_is_left_alone(tmp_path, slow_disk):
    write_store(tmp_path, {"a": WEIGHTS["a"]})
    path = tmp_path / MANIFEST_NAME
    other = Manifest({}, "this boot").dump()
    path.write_bytes(other)
    slow_disk.set()
    join()
    assert path.read_bytes() == other


@pytest.mark.parametrize(
    "left", [b"", bytes(4096), b'{"synced": 0, "format": "anyd', b'{"synced": 0, "f\0\0']
)
def test_a_manifest_that_lost_its_bytes_is_none(tmp_path, left):
    write_store(tmp_path, WEIGHTS)
    join()
    (tmp_path / MANIFEST_NAME).write_bytes(left)
    with pytest.raises(OffloadStoreError, match="not a complete offload store"):
        open_store(tmp_path)
    assert is_right(write_store(tmp_path, WEIGHTS))
