"""A store is used at once; after the machine has stopped, only what its checksums confirm."""

import os
import threading

import filelock
import pytest
import torch

from anydevice.errors import OffloadStoreError
from anydevice.offload_store import manifest, reuse
from anydevice.offload_store.manifest import DATA_PREFIX, LOCK_NAME, MANIFEST_NAME, Manifest
from anydevice.offload_store.store import open_store, write_store

WEIGHTS = {"a": torch.arange(12.0).view(3, 4), "b": torch.ones(5, dtype=torch.bfloat16)}


@pytest.fixture(autouse=True)
def known_boot(monkeypatch):
    boot(monkeypatch, "this boot")


def boot(monkeypatch, name):
    for module in (manifest, reuse):
        monkeypatch.setattr(module, "current_boot", lambda: name)


def is_right(found):
    return found.keys() == WEIGHTS.keys() and all(torch.equal(found[n], WEIGHTS[n]) for n in found)


def data_file(folder):
    (path,) = folder.glob(f"{DATA_PREFIX}*.safetensors")
    return path


def lose(path, start=-4):
    """Bytes that never came to the disk; the file's size and times did."""
    state = path.stat()
    data = bytearray(path.read_bytes())
    data[start:] = bytes(len(data[start:]))
    path.write_bytes(data)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


def test_nothing_waits_for_the_disk_and_no_thread_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: pytest.fail("waits for the disk"))
    before = threading.enumerate()
    assert is_right(write_store(tmp_path, WEIGHTS))
    assert threading.enumerate() == before


def test_a_store_of_another_boot_is_verified_once(tmp_path, monkeypatch):
    write_store(tmp_path, WEIGHTS)
    boot(monkeypatch, "another boot")
    assert is_right(open_store(tmp_path))
    assert Manifest.read(tmp_path).boot == "another boot"
    monkeypatch.setattr(reuse, "checksum", lambda _: pytest.fail("verified again"))
    assert is_right(open_store(tmp_path))


def test_of_the_same_boot_nothing_is_read(tmp_path, monkeypatch):
    write_store(tmp_path, WEIGHTS)
    monkeypatch.setattr(reuse, "checksum", lambda _: pytest.fail("verified"))
    assert open_store(tmp_path).keys() == WEIGHTS.keys()


def test_what_was_lost_when_the_machine_stopped_is_refused_and_written_again(tmp_path, monkeypatch):
    write_store(tmp_path, WEIGHTS)
    lose(data_file(tmp_path))
    boot(monkeypatch, "another boot")
    with pytest.raises(OffloadStoreError, match=r"damaged: 1 weights, 'b' among them"):
        open_store(tmp_path)
    assert is_right(write_store(tmp_path, WEIGHTS))
    assert is_right(open_store(tmp_path))


@pytest.mark.parametrize("weights", [{"a": WEIGHTS["a"]}, WEIGHTS])
def test_the_next_writer_verifies_too(tmp_path, monkeypatch, weights):
    write_store(tmp_path, {"a": WEIGHTS["a"]})
    boot(monkeypatch, "another boot")
    lose(data_file(tmp_path))
    found = write_store(tmp_path, weights)
    assert all(torch.equal(found[name], value) for name, value in weights.items())
    assert Manifest.read(tmp_path).boot == "another boot"


def test_a_folder_that_cannot_be_written_to_is_verified_each_time(tmp_path, monkeypatch):
    write_store(tmp_path, WEIGHTS)
    boot(monkeypatch, "another boot")

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(reuse, "write_atomically", refuse)
    assert is_right(open_store(tmp_path))
    assert Manifest.read(tmp_path).boot == "this boot"


def test_verifying_waits_for_no_writer(tmp_path, monkeypatch):
    write_store(tmp_path, WEIGHTS)
    boot(monkeypatch, "another boot")
    with filelock.FileLock(tmp_path / LOCK_NAME):
        assert is_right(open_store(tmp_path))
    assert Manifest.read(tmp_path).boot == "this boot"


def test_tied_weights_are_verified_once(tmp_path, monkeypatch):
    weight = torch.arange(6.0)
    write_store(tmp_path, {"a": weight, "b": weight})
    boot(monkeypatch, "another boot")
    calls, real = [], reuse.checksum
    monkeypatch.setattr(reuse, "checksum", lambda value: calls.append(value) or real(value))
    open_store(tmp_path)
    assert len(calls) == 1


@pytest.mark.parametrize("left", [b"", bytes(4096), b'{"format": "anyd', b'{"format": "f\0\0'])
def test_a_manifest_that_lost_its_bytes_is_none(tmp_path, left):
    write_store(tmp_path, WEIGHTS)
    (tmp_path / MANIFEST_NAME).write_bytes(left)
    with pytest.raises(OffloadStoreError, match="not a complete offload store"):
        open_store(tmp_path)
    assert is_right(write_store(tmp_path, WEIGHTS))
