"""``torch.sim`` and ``torch.accelerator``: the surface that code for other devices uses."""

import pytest
import torch


def test_torch_knows_the_device(simulator):
    accelerator = torch.accelerator
    assert accelerator.current_accelerator() == torch.device("sim")
    assert accelerator.is_available()
    assert accelerator.device_count() == torch.sim.device_count() == 2
    assert torch.get_device_module("sim") is torch.sim
    assert torch.device(1) == torch.device("sim:1")
    assert not torch.sim._is_in_bad_fork()


def test_the_current_device_is_set_and_restored(simulator):
    torch.sim.set_device("sim:1")
    assert torch.zeros(1, device="sim").device.index == 1
    assert torch.accelerator.current_device_index() == 1
    with torch.sim.device(0):
        assert torch.sim.current_device() == 0
        with torch.sim.device(torch.device("sim:1")), torch.sim.device(None):
            assert torch.sim.current_device() == 1
    assert torch.sim.current_device() == 1
    with torch.sim.device_of(torch.zeros(1, device="sim:0")):
        assert torch.sim.current_device() == 0
    with torch.device("sim:0"):
        assert torch.nn.Linear(2, 2).weight.device.index == 0
    with pytest.raises(RuntimeError, match="invalid device ordinal 2"):
        torch.sim.set_device(2)
    with pytest.raises(ValueError, match="expected a sim device, got cpu"):
        torch.sim.set_device("cpu")


@pytest.mark.parametrize("make", [lambda: torch.sim.Stream("sim:1"), lambda: torch.Stream("sim:1")])
def test_streams_become_current_with_their_device(simulator, make):
    stream = make()
    before = torch.sim.current_stream()
    with torch.sim.stream(stream):
        assert torch.sim.current_device() == 1
        assert torch.sim.current_stream() == torch.accelerator.current_stream(1) == stream
    with torch.sim.stream(None):
        assert torch.sim.current_stream() == before == torch.sim.default_stream()
    torch.sim.set_stream(stream)
    assert torch.sim.current_stream(1) == stream != torch.sim.default_stream(1)


def test_streams_are_distinct_until_the_pool_is_used_up(simulator):
    streams = [torch.sim.Stream(0) for _ in range(33)]
    assert len({s.stream_id for s in streams[:32]}) == 32
    assert streams[32] == streams[0]


def test_every_stream_and_event_of_the_device_is_an_instance(simulator):
    for stream in (torch.sim.Stream(1), torch.Stream("sim"), torch.sim.current_stream()):
        assert isinstance(stream, torch.sim.Stream)
    for event in (torch.sim.Event(), torch.Event("sim"), torch.sim.Stream().record_event()):
        assert isinstance(event, torch.sim.Event)
    assert not isinstance(torch.sim.Event(), torch.sim.Stream)


def test_events_tell_simulated_time(simulator):
    simulator.configure(h2d=500, copy_latency=0, launch=0)
    pinned = torch.empty(1 << 20, dtype=torch.uint8).pin_memory()
    start, end = (torch.sim.Event(enable_timing=True) for _ in range(2))
    start.record()
    pinned.to("sim:0", non_blocking=True)
    end.record()
    assert not end.query()
    end.synchronize()
    assert end.query()
    assert start.elapsed_time(end) == pytest.approx((1 << 20) / 500 / 1000)


def test_devices_describe_themselves(simulator):
    simulator.configure(memory=["64MiB", "1GiB"])
    assert torch.sim.get_device_properties(1).total_memory == 1 << 30
    assert torch.sim.get_device_name("sim:0") == "Simulated accelerator 0"
    assert torch.bfloat16 in torch.sim.get_amp_supported_dtype()
    assert torch.sim.is_bf16_supported()


def test_seeds_are_set_for_one_or_all(simulator):
    torch.sim.manual_seed(7)
    assert torch.sim.initial_seed() == 7
    states = torch.sim.get_rng_state_all()
    torch.sim.seed_all()
    assert not torch.equal(states[1], torch.sim.get_rng_state(1))
    torch.sim.set_rng_state_all(states)
    assert torch.equal(states[1], torch.sim.get_rng_state(1))
