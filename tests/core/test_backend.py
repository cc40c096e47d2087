"""The defaults of `DeviceBackend`, on the simulator and on devices that lack functions."""

import threading
import types

import pytest
import torch

from anydevice.backend import Capabilities, DeviceBackend, MemoryInfo
from anydevice.registry import get_backend

MIB = 1 << 20


class Backend(DeviceBackend):
    device_type = "sim"
    capabilities = Capabilities(caching_allocator=True, streams=True)


@pytest.fixture
def backend(sim):
    return Backend()


# ---------------------------------------------------------------------- on a device with everything


def test_presence(backend):
    assert backend.is_available() is True
    assert backend.device_count() == 2
    assert backend.device_name(1) == "Simulated accelerator 1"


def test_free_counts_what_is_cached_and_unused(backend):
    before = backend.memory_info(1)
    tensor = torch.ones(4 * MIB, device="sim:1")
    assert backend.memory_allocated(1) == 16 * MIB
    assert backend.memory_allocated(0) == 0
    assert backend.memory_info(1).free == before.free - 16 * MIB
    del tensor
    assert backend.memory_info(1) == before
    backend.empty_cache(1)
    assert backend.memory_info(1) == before == MemoryInfo(64 * MIB, 64 * MIB)


def test_the_peak_is_kept_until_it_is_reset(backend):
    backend.reset_peak_memory(0)
    del_me = torch.ones(MIB, device="sim:0")
    del del_me
    assert backend.peak_memory_allocated(0) == 4 * MIB
    backend.reset_peak_memory(0)
    assert backend.peak_memory_allocated(0) == 0


def test_moves_keep_dtype_strides_and_requires_grad(backend):
    host = torch.randn(3, 4).t().requires_grad_()
    there = backend.move(host, torch.device("sim:1"))
    assert (there.device, there.stride(), there.requires_grad) == (
        torch.device("sim:1"),
        host.stride(),
        True,
    )
    assert torch.equal(backend.move(there, torch.device("cpu")), host)
    assert backend.move(there, torch.device("sim:1")) is there


def test_a_stream_may_be_entered_twice_and_is_left_when_an_error_leaves(backend):
    stream, other = backend.new_stream(1), backend.new_stream(1)
    before = backend.current_stream(1)
    with backend.use_stream(stream), backend.use_stream(other), backend.use_stream(stream):
        assert backend.current_stream(1) == stream
        assert torch.accelerator.current_device_index() == 1
    with pytest.raises(KeyError), backend.use_stream(stream):
        raise KeyError
    assert backend.current_stream(1) == before
    assert torch.accelerator.current_device_index() == 0


def test_one_stream_in_two_threads(backend):
    stream, barrier, seen = backend.new_stream(1), threading.Barrier(2), []

    def use():
        with backend.use_stream(stream):
            barrier.wait()
            seen.append(backend.current_stream(1) == stream)
            barrier.wait()

    threads = [threading.Thread(target=use) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True, True]


def test_an_event_orders_two_streams_without_the_host(sim, backend):
    copying, computing = backend.new_stream(0), backend.new_stream(0)
    host = torch.full((MIB,), 3.0).pin_memory()
    waits = sim.counters(0)["host_syncs"]
    with backend.use_stream(copying):
        there = backend.move(host, torch.device("sim:0"), non_blocking=True)
        event = backend.record_event(copying)
    backend.wait_event(computing, event)
    with backend.use_stream(computing):
        doubled = there * 2
    assert sim.counters(0)["host_syncs"] == waits
    backend.synchronize(0)
    assert doubled.sum().item() == 6.0 * MIB


def test_random_numbers_of_one_device_repeat(backend):
    backend.manual_seed_all(7)
    state = backend.rng_state(1)
    first = torch.rand(4, device="sim:1")
    backend.set_rng_state(state, 1)
    assert torch.equal(torch.rand(4, device="sim:1").cpu(), first.cpu())


def test_out_of_memory_is_told_from_other_errors(backend):
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(65 * MIB, dtype=torch.uint8, device="sim:0")
    assert backend.is_out_of_memory(caught.value) is True
    for error in (RuntimeError("shape"), MemoryError(), ValueError(), KeyboardInterrupt()):
        assert backend.is_out_of_memory(error) is False


# ---------------------------------------------------------------------- on devices with less


class Odd(DeviceBackend):
    """A device whose module the test writes; ``torch.accelerator`` does not speak of it."""

    device_type = "cuda"  # a type that torch knows and this build does not have

    def __init__(self, **functions):
        self.fake = types.SimpleNamespace(__name__="torch.odd", **functions)

    @property
    def module(self):
        return self.fake


def raise_(error):
    raise error


@pytest.mark.parametrize(
    "functions",
    [
        {},
        {"mem_get_info": lambda index: raise_(NotImplementedError("not yet"))},
        {"mem_get_info": lambda index: raise_(RuntimeError("INTERNAL ASSERT FAILED"))},
        {"mem_get_info": lambda index: raise_(AssertionError("not compiled"))},
    ],
)
def test_memory_that_no_one_tells_is_asked_of_the_user(functions):
    with pytest.raises(NotImplementedError, match=r"cuda:1.*max_memory=\{'cuda:1': '8GiB'\}"):
        Odd(**functions).memory_info(1)


def test_another_devices_memory_is_never_taken_for_this_ones(sim):
    with pytest.raises(NotImplementedError):
        Odd().memory_info(0)
    with pytest.raises(NotImplementedError):
        Odd().memory_allocated(0)
    with pytest.raises(AttributeError):
        Odd().synchronize(0)


def test_free_is_never_more_than_total():
    odd = Odd(
        mem_get_info=lambda i: (90, 100), memory_reserved=lambda i: 50, memory_allocated=lambda i: 0
    )
    odd.capabilities = Capabilities(caching_allocator=True)
    assert odd.memory_info(0) == MemoryInfo(100, 100)


def test_torch_accelerator_answers_where_the_module_does_not(sim):
    class Bare(DeviceBackend):
        device_type = "sim"
        module = types.SimpleNamespace(__name__="torch.bare")

    torch.ones(MIB, device="sim:1")
    bare = Bare()
    assert bare.memory_info(1).total == 64 * MIB
    assert bare.memory_allocated(1) == Backend().memory_allocated(1)
    bare.synchronize(1)
    stream = bare.new_stream(1)
    with bare.use_stream(stream):
        assert bare.current_stream(1) == stream
    bare.empty_cache(0)  # nothing to call, and nothing is wrong with that
    assert bare.device_name(1) == "sim:1"


@pytest.mark.parametrize("error", [RuntimeError("no driver"), OSError("libfoo.so"), ImportError()])
def test_a_driver_that_fails_is_a_device_that_is_not_here(error):
    odd = Odd(device_count=lambda: raise_(error))
    assert odd.device_count() == 0
    assert odd.is_available() is False
    assert type(error).__name__ in odd.why_unavailable()


def test_counting_asks_the_count_and_nothing_else():
    odd = Odd(
        device_count=lambda: 3, is_available=lambda: raise_(AssertionError("starts the runtime"))
    )
    assert odd.device_count() == 3


def test_a_package_that_is_not_installed_is_said_so():
    class Missing(DeviceBackend):
        device_type = "missing"
        torch_package = "torch_missing_for_sure"

    assert Missing().device_count() == 0
    assert Missing().why_unavailable() == "torch_missing_for_sure is not installed"


def test_a_package_that_fails_to_import_is_said_so(tmp_path, monkeypatch):
    (tmp_path / "torch_broken_here.py").write_text("raise OSError('libfoo.so: cannot open')")
    monkeypatch.syspath_prepend(tmp_path)

    class Broken(DeviceBackend):
        device_type = "broken"
        torch_package = "torch_broken_here"

    assert Broken().device_count() == 0
    assert Broken().why_unavailable() == "OSError: libfoo.so: cannot open"


def test_words_of_a_plain_error_are_known():
    odd = Odd()
    odd.out_of_memory_words = ("FOO out of memory",)
    assert odd.is_out_of_memory(RuntimeError("x: FOO out of memory. Tried")) is True
    assert odd.is_out_of_memory(RuntimeError("Foo Out Of Memory")) is True
    assert odd.is_out_of_memory(RuntimeError("CUDA out of memory")) is False
    assert odd.is_out_of_memory(ValueError("FOO out of memory")) is False

    class Mute(RuntimeError):
        def __str__(self):
            raise OSError

    assert odd.is_out_of_memory(Mute()) is False


def test_supports_dtype_answers_for_every_dtype(backend):
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    assert {backend.supports_dtype(dtype) for dtype in dtypes} == {True, False}
    assert backend.supports_dtype(torch.float32) is True


def test_capabilities_tell_what_is_claimed():
    assert Capabilities().claimed() == []
    assert Capabilities(streams=True, device_rng=True).claimed() == ["streams", "device_rng"]
    assert get_backend("sim").capabilities.streams
