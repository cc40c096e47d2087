"""Device memory has a cap, a cache and statistics; pinned memory has a limit."""

import gc

import pytest
import torch

MiB = 1 << 20


def block(mebibytes, device="sim:0"):
    return torch.empty(int(mebibytes * MiB), dtype=torch.uint8, device=device)


def test_each_device_has_its_own_cap(machine):
    machine.configure(memory=["16MiB", "64MiB"], mode="lazy")
    with pytest.raises(torch.OutOfMemoryError, match=r"Device 0 has a total capacity of 16777216"):
        block(17)
    kept = block(60, "sim:1")
    assert torch.sim.mem_get_info(1) == (4 * MiB, 64 * MiB)
    assert torch.accelerator.get_memory_info("sim:0") == (16 * MiB, 16 * MiB)
    with pytest.raises(torch.OutOfMemoryError):
        block(5, "sim:1")
    del kept
    block(64, "sim:1")


def test_freed_memory_stays_cached_until_it_is_given_back(machine):
    a = block(10)
    assert torch.sim.memory_allocated(0) == torch.sim.memory_reserved(0) == 10 * MiB
    del a
    assert torch.sim.memory_allocated(0) == 0
    assert torch.sim.memory_reserved(0) == 10 * MiB
    assert torch.sim.mem_get_info(0)[0] == 54 * MiB
    torch.sim.empty_cache()
    assert torch.sim.memory_reserved(0) == 0
    assert torch.sim.mem_get_info(0)[0] == 64 * MiB


def test_cached_blocks_of_other_sizes_make_room_when_they_must(machine):
    small = [block(4) for _ in range(16)]
    del small
    assert torch.sim.memory_reserved(0) == 64 * MiB
    big = block(48)
    assert big.numel() == 48 * MiB
    assert torch.sim.memory_stats(0)["num_alloc_retries"] == 1


def test_live_blocks_never_make_room(machine):
    kept = [block(4) for _ in range(15)]
    with pytest.raises(torch.OutOfMemoryError, match="62914560 bytes is allocated"):
        block(8)
    assert len(kept) == 15
    assert torch.sim.memory_stats(0)["num_ooms"] >= 1


def test_peaks_are_kept_until_reset(machine):
    torch.sim.reset_peak_memory_stats(0)
    a = block(8)
    del a
    assert torch.sim.max_memory_allocated(0) == 8 * MiB
    assert torch.sim.max_memory_reserved("sim:0") == 8 * MiB
    torch.sim.reset_peak_memory_stats(0)
    assert torch.sim.max_memory_allocated(0) == 0
    torch.sim.reset_accumulated_memory_stats(0)


def test_a_steady_state_takes_nothing_from_the_device(machine):
    def step():
        a = torch.ones(1000, device="sim:0")
        return (a * 2 + 1).sum().item()

    step()
    machine.reset_counters()
    for _ in range(5):
        assert step() == 3000.0
    counters = machine.counters(0)
    assert counters["allocs"] == counters["frees"] > 0
    assert counters["device_allocs"] == counters["device_frees"] == counters["cache_clears"] == 0


def test_giving_the_cache_back_is_counted(machine):
    block(4)
    torch.sim.empty_cache()
    torch.accelerator.empty_cache()
    counters = machine.counters(0)
    assert (counters["device_allocs"], counters["device_frees"]) == (1, 1)
    assert counters["cache_clears"] == 2


def test_record_stream_holds_memory_back(simulator):
    side = torch.sim.Stream(0)
    a = torch.ones(MiB, device="sim:0")
    address = a.data_ptr()
    side.wait_stream(torch.sim.current_stream(0))
    with side:
        b = a * 2
    a.record_stream(side)
    del a
    assert torch.empty(MiB, device="sim:0").data_ptr() != address
    side.synchronize()
    assert torch.empty(MiB, device="sim:0").data_ptr() == address
    assert bool((b.cpu() == 2).all())


def test_new_and_freed_memory_reads_as_nan(simulator):
    assert bool(torch.empty(8, device="sim:0").isnan().all())
    torch.ones(8, device="sim:0")
    assert bool(torch.empty(8, device="sim:0").isnan().all())
    simulator.configure(poison=False)
    a = torch.ones(8, device="sim:0")
    del a
    assert torch.empty(8, device="sim:0").tolist() == [1.0] * 8


def test_pinned_memory_is_known_and_limited(machine):
    start = machine.pinned_bytes()
    assert not torch.ones(8).is_pinned()
    pinned = torch.ones(8).pin_memory()
    assert pinned.is_pinned()
    assert pinned[3:].is_pinned()
    assert torch.empty(3, pin_memory=True).is_pinned()
    assert machine.pinned_bytes() == start + 32
    del pinned
    assert machine.pinned_bytes() == start
    machine.configure(pinned_limit=start + 64)
    with pytest.raises(RuntimeError, match="pinned host memory limit"):
        torch.empty(65, dtype=torch.uint8, pin_memory=True)


def test_a_machine_can_be_made_smaller_under_live_tensors(simulator):
    simulator.configure(devices=3)
    a = torch.ones(4, device="sim:2")
    simulator.configure(devices=2)
    del a
    gc.collect()
    with pytest.raises(RuntimeError, match="invalid device ordinal 2"):
        torch.ones(4, device="sim:2")
    simulator.configure(devices=3)
    assert torch.sim.memory_reserved(2) == 0


def test_freed_memory_is_whole_for_other_streams_until_its_own_hands_it_out(sim):
    """As on hardware; sharding engines rely on it for gradients."""
    side = torch.sim.Stream()
    with torch.sim.stream(side):
        given = torch.ones(1000, device="sim")
    torch.sim.synchronize()
    twice = given * 2  # queued on the default stream
    del given
    side.synchronize()
    assert twice.tolist() == [2] * 1000
    with torch.sim.stream(side):
        assert torch.empty(1000, device="sim").isnan().all()
