"""The simulator's backend: the defaults of `DeviceBackend`, on a device that keeps them."""

import pytest
import torch

from anydevice_conformance.simulator.backend import SimulatorBackend, anydevice_backends

MiB = 1 << 20


@pytest.fixture
def backend(simulator):
    simulator.configure(memory="64MiB")
    (only,) = anydevice_backends()
    assert isinstance(only, SimulatorBackend)
    return only


def test_it_is_there_once_installed(backend):
    assert backend.is_available()
    assert backend.device_count() == 2
    assert backend.device_name(1) == "Simulated accelerator 1"


def test_memory_that_is_cached_is_free(backend):
    torch.empty(8 * MiB, dtype=torch.uint8, device="sim:0")
    kept = torch.empty(4 * MiB, dtype=torch.uint8, device="sim:0")
    info = backend.memory_info(0)
    assert (info.free, info.total) == (60 * MiB, 64 * MiB)
    assert backend.memory_allocated(0) == kept.nbytes
    backend.empty_cache(0)
    assert torch.sim.memory_reserved(0) == kept.nbytes


def test_lack_of_memory_is_told_from_other_errors(backend):
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(65 * MiB, dtype=torch.uint8, device="sim:0")
    assert backend.is_out_of_memory(caught.value)
    assert not backend.is_out_of_memory(RuntimeError("another"))


def test_weights_travel_on_a_stream_of_their_own(backend, simulator):
    pinned = backend.pin_memory(torch.arange(8.0))
    assert pinned.is_pinned()
    stream = backend.new_stream(1)
    with backend.use_stream(stream):
        moved = backend.move(pinned, torch.device("sim:1"), non_blocking=True)
        event = backend.record_event(stream)
    backend.wait_event(backend.current_stream(1), event)
    result = moved * 2
    assert simulator.counters(1)["host_syncs"] == 0
    backend.synchronize(1)
    assert result.tolist() == (pinned * 2).tolist()
    assert backend.current_stream(1) != stream


def test_generators_are_seeded_and_restored(backend):
    backend.manual_seed_all(3)
    state = backend.rng_state(1)
    first = torch.rand(4, device="sim:1")
    backend.set_rng_state(state, 1)
    assert torch.equal(torch.rand(4, device="sim:1").cpu(), first.cpu())


def test_it_claims_what_it_has(backend):
    assert backend.capabilities.claimed() == [
        "caching_allocator",
        "streams",
        "pinned_memory",
        "device_rng",
        "collectives",
        "grad_scaling",
    ]
    assert backend.supports_dtype(torch.bfloat16)
