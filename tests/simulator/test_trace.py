"""Overlap, copies, host synchronisations and time are asserted without a stopwatch."""

import pytest
import torch

MiB = 1 << 20


def overlap(records):
    copies = [r for r in records if r.kind == "h2d"]
    kernels = [r for r in records if r.kind == "kernel"]
    return any(c.overlaps(k) for c in copies for k in kernels)


@pytest.mark.parametrize("side_stream", [True, False])
def test_a_copy_on_a_side_stream_overlaps_the_kernels(simulator, side_stream):
    simulator.configure(h2d=1000, kernel=200)
    pinned = torch.empty(MiB, dtype=torch.uint8).pin_memory()
    stream = torch.sim.Stream(0) if side_stream else torch.sim.current_stream(0)
    z = torch.ones(8, device="sim:0")
    with simulator.trace() as records:
        with torch.sim.stream(stream):
            pinned.to("sim:0", non_blocking=True)
        for _ in range(3):
            z = z * 2
        assert records == []
    assert overlap(records) is side_stream
    (copy,) = (r for r in records if r.kind == "h2d")
    assert (copy.device, copy.bytes, copy.stream) == (0, MiB, stream.stream_id)
    assert copy.end_us - copy.start_us == pytest.approx(10 + MiB / 1000)
    assert [r.end_us - r.start_us for r in records if r.kind == "kernel"] == [200.0] * 3


def test_copies_of_one_direction_share_an_engine(simulator):
    pinned = torch.empty(MiB, dtype=torch.uint8).pin_memory()
    with simulator.trace() as records:
        for _ in range(2):
            with torch.sim.Stream(0):
                pinned.to("sim:0", non_blocking=True)
        pinned.to("sim:1", non_blocking=True)
    first, second = (r for r in records if r.device == 0)
    (other,) = (r for r in records if r.device == 1)
    assert not first.overlaps(second)
    assert other.overlaps(first)


def test_a_trace_holds_only_what_runs_in_it(simulator):
    torch.ones(4, device="sim:0")
    with simulator.trace() as records:
        pass
    torch.ones(4, device="sim:0")
    assert records == []


def test_a_trace_is_filled_when_the_block_raises(simulator):
    seen = []

    def fail():
        with simulator.trace() as records:
            seen.append(records)
            torch.ones(4, device="sim:0")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [r.kind for r in seen[0]] == ["kernel"]


def test_copies_are_counted_by_direction(machine):
    x = torch.ones(256)
    x.to("sim:0").to("sim:1").cpu()
    x.to("sim:0").clone()
    zero, one = machine.counters(0), machine.counters(1)
    assert (zero["h2d_copies"], zero["h2d_bytes"]) == (2, 2048)
    assert (zero["p2p_copies"], zero["p2p_bytes"]) == (1, 1024)
    assert (zero["d2d_copies"], zero["d2d_bytes"]) == (1, 1024)
    assert (one["d2h_copies"], one["d2h_bytes"]) == (1, 1024)
    assert (zero["d2h_copies"], one["h2d_copies"]) == (0, 0)
    machine.reset_counters()
    assert set(machine.counters(0).values()) == {0}


def test_only_real_waits_count_as_host_synchronisations(machine):
    a = torch.ones(8, device="sim:0")
    b = torch.nn.functional.batch_norm(a.view(2, 4), None, None, training=True)
    (a + 1).mul_(2)
    assert machine.counters(0)["host_syncs"] == 0
    b.sum().item()
    a.nonzero()
    torch.sim.current_stream(0).synchronize()
    assert machine.counters(0)["host_syncs"] == 3
    assert machine.counters(0)["kernels"] >= 5


def test_the_clock_is_the_machines_own(simulator):
    simulator.configure(h2d=1000, copy_latency=0, launch=3)
    assert simulator.clock_us() == 0
    torch.empty(MiB, dtype=torch.uint8).pin_memory().to("sim:0", non_blocking=True)
    assert simulator.clock_us() == 3
    simulator.advance_clock(100)
    torch.sim.synchronize(0)
    assert simulator.clock_us() == pytest.approx(3 + MiB / 1000)
