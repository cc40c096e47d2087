"""A store that is interrupted at any instruction is complete and right, or not there."""

import os
import random
import sys
import threading
import time
from functools import partial

import filelock
import pytest
import torch

from anydevice.errors import OffloadStoreError
from anydevice.offload_store import tensor_bytes, writing
from anydevice.offload_store.manifest import LOCK_NAME
from anydevice.offload_store.store import open_store, write_store

if sys.platform == "win32":
    pytest.skip("signals", allow_module_level=True)

WEIGHTS = {f"w{i}": torch.full((64, 64), float(i)) for i in range(6)}


def is_right(store):
    return store.keys() == WEIGHTS.keys() and all(torch.equal(store[n], WEIGHTS[n]) for n in store)


def test_at_random_moments(tmp_path, monkeypatch, interrupted):
    monkeypatch.setattr(writing, "LARGEST_FILE", 32 << 10)
    monkeypatch.setattr(tensor_bytes, "PIECE", 4 << 10)
    write_store(tmp_path / "first", WEIGHTS)
    start = time.perf_counter()
    write_store(tmp_path / "second", WEIGHTS)
    usual = time.perf_counter() - start
    chance = random.Random(11)
    threads, descriptors = threading.enumerate(), os.listdir("/dev/fd")
    stopped = 0
    for number in range(150):
        folder = tmp_path / str(number)
        error = interrupted(partial(write_store, folder, WEIGHTS), 2 * usual * chance.random())
        stopped += error is not None
        if error is not None:
            assert error.args == ()
        assert threading.enumerate() == threads
        assert len(os.listdir("/dev/fd")) == len(descriptors)
        names = {p.name for p in folder.iterdir()} if folder.exists() else set()
        try:
            assert is_right(open_store(folder))
        except OffloadStoreError:
            assert names <= {LOCK_NAME}
        if folder.exists():
            with filelock.FileLock(folder / LOCK_NAME).acquire(timeout=0):
                pass
        assert is_right(write_store(folder, WEIGHTS))
    assert stopped


def test_while_another_process_has_the_folder(tmp_path, interrupted):
    with filelock.FileLock(tmp_path / LOCK_NAME):
        assert interrupted(lambda: write_store(tmp_path, WEIGHTS), 0.05)
        assert {p.name for p in tmp_path.iterdir()} == {LOCK_NAME}
    assert is_right(write_store(tmp_path, WEIGHTS))


def test_while_a_source_is_made(tmp_path, interrupted):
    """What a source raises comes out as itself, and leaves nothing."""

    def load():
        raise SystemExit(3)

    source = tensor_bytes.WeightSource(torch.float32, (4,), load)
    with pytest.raises(SystemExit):
        write_store(tmp_path, {"a": torch.ones(3), "b": source})
    assert {p.name for p in tmp_path.iterdir()} == {LOCK_NAME}
