"""Smaller batches until memory suffices, on a device whose memory really ends."""

import gc
import itertools

import pytest
import torch

from anydevice.errors import DoesNotFitError, OptionError
from anydevice.memory import clear_device_cache, find_executable_batch_size, release_memory
from anydevice.registry import get_backend

MIB = 1 << 20


def test_the_batch_size_falls_until_it_fits(sim):
    tried = []

    @find_executable_batch_size(starting_batch_size=100)
    def train(batch_size, factor, *, more=0):
        tried.append(batch_size)
        big = torch.empty(batch_size * MIB * factor, dtype=torch.uint8, device="sim:0")
        return big.numel() // MIB + more

    assert train(1, more=1000) == 1064 - (64 - tried[-1])
    assert tried[0] == 100
    assert tried == sorted(tried, reverse=True)
    assert all(b == int(a * 0.9) for a, b in itertools.pairwise(tried))
    assert tried[-1] <= 64 < tried[-2]
    assert train.__name__ == "train"


def test_nothing_of_a_failed_try_is_kept(sim):
    backend = get_backend("sim")
    seen = []

    @find_executable_batch_size(starting_batch_size=4, reduce_batch_size_fn=lambda: 1)
    def train(batch_size):
        seen.append(backend.memory_allocated(0))
        kept = [torch.empty(20 * MIB, dtype=torch.uint8, device="sim:0") for _ in range(batch_size)]
        return len(kept)

    assert train() == 1
    assert seen == [0, 0]


def test_errors_of_other_kinds_pass(sim):
    @find_executable_batch_size
    def fails(batch_size):
        raise ValueError(f"not memory: {batch_size}")

    with pytest.raises(ValueError, match="not memory: 128"):
        fails()


def test_an_error_that_was_raised_from_lack_of_memory_counts(sim):
    @find_executable_batch_size(starting_batch_size=2)
    def wraps(batch_size):
        if batch_size > 1:
            try:
                torch.empty(100 * MIB, dtype=torch.uint8, device="sim:0")
            except torch.OutOfMemoryError as error:
                raise RuntimeError("the step failed") from error
        return batch_size

    assert wraps() == 1


def test_no_size_at_all_is_an_error(sim):
    @find_executable_batch_size(starting_batch_size=3)
    def never(batch_size):
        raise torch.OutOfMemoryError("never enough")

    with pytest.raises(DoesNotFitError, match="No executable batch size found, reached zero"):
        never()


def test_misuse_is_named():
    @find_executable_batch_size
    def train(batch_size, model):
        return batch_size

    with pytest.raises(TypeError, match=r"'batch_size', the batch size\) from"):
        train(64, "model")
    with pytest.raises(OptionError, match="starting_batch_size=0"):
        find_executable_batch_size(train, starting_batch_size=0)

    @find_executable_batch_size(reduce_batch_size_fn=lambda: 128)
    def grows(batch_size):
        raise torch.OutOfMemoryError

    with pytest.raises(OptionError, match="returned 128 after 128"):
        grows()


def test_memory_is_given_back(sim):
    backend = get_backend("sim")
    one = torch.empty(8 * MIB, dtype=torch.uint8, device="sim:1")
    cycle = [one]
    cycle.append(cycle)
    gc.collect()
    one, cycle = release_memory(one, cycle)
    assert one is cycle is None
    assert torch.sim.memory_reserved(1) > 0
    clear_device_cache(garbage_collection=True)
    assert backend.memory_allocated(1) == 0
    assert torch.sim.memory_reserved(1) == 0
