"""torch.distributed on simulated devices: right, ordered with streams, and loud when it fails."""

import math

import pytest
from launching import run_ranks
from simulator import collective_ranks as ranks

# With the other tests of several processes: one worker has the process that forks them.
pytestmark = pytest.mark.xdist_group("distributed")


@pytest.mark.parametrize("size", [2, 4])
def test_every_collective(size):
    found = run_ranks(ranks.every_kind, size, "sim")
    total = sum(range(1, size + 1))
    for rank, seen in enumerate(found):
        assert seen["config"] == "sim:simccl,cpu:gloo"
        assert seen["all_reduce"] == [total] * 2
        assert (seen["MAX"], seen["MIN"]) == (size, 1)
        assert (seen["PRODUCT"], seen["AVG"]) == (math.factorial(size), total / size)
        assert seen["gather_into"] == [float(r) for r in range(size) for _ in range(2)]
        assert seen["reduce_scatter"] == [size * (2.0 * rank + i) for i in range(2)]
        assert seen["reduce_scatter list"] == [sum(10.0 * r + rank for r in range(size))] * 2
        assert seen["broadcast"] == [size == 1, True]
        assert seen["reduce"] == [total if rank == 1 else rank + 1] * 2
        assert seen["gather"] == ([[r, r] for r in range(size)] if rank == 0 else None)
        assert seen["scatter"] == [rank] * 2
        assert seen["all_to_all"] == [rank + 10 * r for r in range(size)]
        assert seen["all_to_all list"] == [[rank] * (r + 1) for r in range(size)]
        assert seen.get("recv") == ([7, 7] if rank == 1 else None)
        assert seen.get("sender") == (0 if rank == 1 else None)
        assert seen.get("pair") == (2 if rank < 2 else None)


def test_a_result_is_there_when_somebody_waits_and_not_before():
    for seen in run_ranks(ranks.streams, 2, "sim"):
        assert seen["without waiting"] == [1.0] * 4  # the old values, in every run
        assert seen["after waiting"] == [4.0] * 4
        assert seen["host waited"] == 0
        assert seen["after queued work"] == 2 * 2 * 32
        assert seen["trace"] == [("collective", 1024)]
        assert seen["future"] == [3.0, 3.0]


def test_a_rank_that_dies_is_an_error_for_those_that_wait():
    survivor, died = run_ranks(ranks.breaks, 2, "sim", check=False)
    assert survivor.startswith("all_reduce failed on rank 0 of 2: ")
    assert "rank 1:" in survivor
    assert "ended with status" in died.text


def test_tensors_of_two_devices_are_refused():
    for said in run_ranks(ranks.mixes, 2, "sim"):
        assert "one simulated device" in said or "same device" in said, said


@pytest.mark.parametrize("size", [2, 4])
def test_training_equals_one_process(size):
    for differences in run_ranks(ranks.trains, size, "sim", timeout=120):
        assert max(differences) < 1e-6
