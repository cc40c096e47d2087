"""The vendors' backends: what differs from the defaults, with stand-ins for what is not here."""

import os
import textwrap
import types
from pathlib import Path

import psutil
import pytest
import torch
from warm import run_python

from anydevice.backend import MemoryInfo
from anydevice.registry import get_backend
from anydevice_backends import cuda, mlu, mps, npu, xpu

GIB = 1 << 30
BACKENDS = [cuda.CudaBackend, mps.MpsBackend, xpu.XpuBackend, npu.NpuBackend, mlu.MluBackend]


@pytest.mark.parametrize("kind", BACKENDS, ids=lambda kind: kind.device_type)
def test_without_a_driver_it_is_simply_not_here(kind):
    backend = kind()
    assert backend.device_count() == 0
    assert backend.is_available() is False
    assert backend.why_unavailable()


@pytest.mark.parametrize("kind", BACKENDS, ids=lambda kind: kind.device_type)
def test_collectives_are_named_where_they_are_claimed(kind):
    assert (kind.collective_backend is not None) == kind.capabilities.collectives


def test_counting_cuda_asks_neither_availability_nor_the_runtime(monkeypatch):
    """``torch.cuda.is_available`` starts CUDA, after which no child can use it."""

    def started():
        raise AssertionError("this would start the runtime")

    monkeypatch.setattr(torch.cuda, "is_available", started)
    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: True)
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: 3)
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", started, raising=False)
    assert get_backend("cuda").device_count() == 3


def test_the_names_of_rocm(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    source = Path(cuda.__file__).read_text()
    on_rocm = types.ModuleType("on_rocm")
    exec(compile(source, "on_rocm", "exec"), vars(on_rocm))  # as if imported on a ROCm build
    assert on_rocm.CudaBackend.visible_devices_env == "HIP_VISIBLE_DEVICES"
    assert cuda.CudaBackend.visible_devices_env == "CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("built_for", "told"),
    [
        ({"cuda": "12.8", "hip": None}, "CUDA runtime 12.8"),
        ({"cuda": None, "hip": "6.4.43482"}, "HIP runtime 6.4.43482"),
        ({"cuda": None, "hip": None}, ""),
    ],
)
def test_the_runtime_of_cuda_and_rocm_is_told(monkeypatch, built_for, told):
    for name, version in built_for.items():
        monkeypatch.setattr(torch.version, name, version)
    assert cuda.CudaBackend().driver_version() == told


def test_the_driver_of_xpu_is_told(monkeypatch):
    properties = types.SimpleNamespace(driver_version="1.6.33578")
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda index: properties)
    assert xpu.XpuBackend().driver_version() == "1.6.33578"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (cuda.CudaBackend, "CUDA error: out of memory\nCUDA kernel errors might be"),
        (cuda.CudaBackend, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"),
        (mps.MpsBackend, "MPS backend out of memory (MPS allocated: 9 GB"),
        (mps.MpsBackend, "Invalid buffer size: 100.00 GiB"),
        (xpu.XpuBackend, "level_zero backend failed: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"),
        (npu.NpuBackend, "NPU out of memory. Tried to allocate 22.00 MiB (NPU 0; 60.97 GiB"),
    ],
)
def test_what_a_vendor_says_when_memory_lacks(kind, text):
    assert kind().is_out_of_memory(RuntimeError(text))
    assert kind().is_out_of_memory(torch.OutOfMemoryError(""))
    others = ["DefaultCPUAllocator: can't allocate memory", "CUDA error: an illegal memory access"]
    assert not any(kind().is_out_of_memory(RuntimeError(other)) for other in others)


# ---------------------------------------------------------------------- mps


@pytest.fixture
def metal(monkeypatch):
    """``torch.mps`` as on a machine where Metal recommends 12 GiB and 16 are available."""
    values = {
        "recommended_max_memory": 12,
        "current_allocated_memory": 0,
        "driver_allocated_memory": 0,
    }
    for name in values:
        monkeypatch.setattr(torch.mps, name, lambda name=name: values[name] * GIB)
    values["available"] = 16
    monkeypatch.setattr(
        psutil, "virtual_memory", lambda: types.SimpleNamespace(available=values["available"] * GIB)
    )
    return values


@pytest.mark.parametrize(
    ("allocated", "driver", "available", "free"),
    [
        (0, 0, 16, 12),  # all that Metal recommends
        (4, 4, 12, 8),  # less what tensors hold
        (4, 6, 10, 8),  # what is cached counts as free
        (0, 0, 5, 5),  # the host has no more: it is the same memory
        (4, 6, 1, 3),  # but the cache is ours already
        (14, 14, 2, 0),  # more than recommended is taken
    ],
)
def test_metal_shares_the_hosts_memory(metal, allocated, driver, available, free):
    metal.update(
        current_allocated_memory=allocated, driver_allocated_memory=driver, available=available
    )
    backend = mps.MpsBackend()
    assert backend.memory_info(0) == MemoryInfo(free * GIB, 12 * GIB)
    assert backend.memory_allocated(0) == allocated * GIB
    assert backend.capabilities.unified_memory


def test_metal_keeps_no_peak(metal):
    for ask in (mps.MpsBackend().peak_memory_allocated, mps.MpsBackend().reset_peak_memory):
        with pytest.raises(NotImplementedError):
            ask(0)


def test_metal_never_copies_later(monkeypatch):
    """A queued copy to Metal reads its source after that may be gone."""
    seen = []
    tensor = torch.ones(2)
    monkeypatch.setattr(
        torch.Tensor, "to", lambda self, *args, **kwargs: seen.append((args, kwargs)) or self
    )
    mps.MpsBackend().move(tensor, torch.device("mps"), non_blocking=True)
    assert seen == [((torch.device("mps"),), {})]


def test_metal_functions_take_no_device(monkeypatch):
    called = []
    monkeypatch.setattr(torch.mps, "synchronize", lambda: called.append("synchronize"))
    monkeypatch.setattr(torch.mps, "manual_seed", lambda seed: called.append(seed))
    monkeypatch.setattr(torch.mps, "empty_cache", lambda: called.append("empty_cache"))
    backend = mps.MpsBackend()
    backend.synchronize(0)
    backend.manual_seed_all(5)
    backend.empty_cache(0)
    assert called == ["synchronize", 5, "empty_cache"]
    assert not backend.capabilities.streams
    assert not backend.supports_dtype(torch.float64)
    assert backend.supports_dtype(torch.float16)


# ---------------------------------------------------------------------- xpu


def test_an_integrated_xpu_that_tells_nothing_says_what_helps(monkeypatch):
    def refuse(device=None):
        raise RuntimeError("The device doesn't support querying the available free memory.")

    monkeypatch.setattr(torch.xpu, "mem_get_info", refuse)
    with pytest.raises(NotImplementedError, match=r"doesn't support.*UR_L0_ENABLE_SYSMAN"):
        xpu.XpuBackend().memory_info(0)


def test_double_precision_needs_every_xpu_to_have_it(monkeypatch):
    have = [types.SimpleNamespace(has_fp64=1), types.SimpleNamespace(has_fp64=1)]
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 2)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda i: have[i])
    backend = xpu.XpuBackend()
    assert backend.supports_dtype(torch.float64) is True
    have[1].has_fp64 = 0
    assert backend.supports_dtype(torch.float64) is False
    assert backend.supports_dtype(torch.float32) is True


# ---------------------------------------------------------------------- npu, mlu, on the simulator

#: What a vendor's package does when it is imported: its device is there from then on.
STAND_IN = """
    from anydevice_conformance import simulator
    simulator.install(name="{kind}")
    simulator.configure(devices=2, memory="64MiB", mode="lazy")
"""
USE = """
    import torch
    import anydevice
    from anydevice.registry import get_backend, list_backends

    torch.set_num_threads(1)
    kind = "{kind}"
    devices = anydevice.available_devices()
    assert [str(d) for d in devices] == [f"{{kind}}:0", f"{{kind}}:1", "cpu"], devices
    backend = get_backend(kind)
    assert type(backend).__module__ == f"anydevice_backends.{{kind}}"
    free = backend.memory_info(1).free
    host = backend.pin_memory(torch.randn(1000, 1000))
    copying, computing = backend.new_stream(1), backend.new_stream(1)
    with backend.use_stream(copying):
        there = backend.move(host, backend.device(1), non_blocking=True)
        event = backend.record_event(copying)
    backend.wait_event(computing, event)
    with backend.use_stream(computing):
        product = there @ there
    backend.synchronize_event(backend.record_event(computing))
    back = backend.move(product, torch.device("cpu"))
    assert torch.allclose(back, host @ host, atol=1e-3)
    assert backend.memory_allocated(1) >= 8_000_000
    assert backend.peak_memory_allocated(1) >= 8_000_000
    del there, product
    backend.synchronize(1)
    assert backend.memory_info(1).free == free
    backend.empty_cache(1)
    assert backend.memory_info(1).free == free == backend.memory_info(1).total
    state = backend.rng_state(1)
    drawn = torch.rand(3, device=backend.device(1)).cpu()
    backend.set_rng_state(state, 1)
    assert torch.equal(torch.rand(3, device=backend.device(1)).cpu(), drawn)
    backend.manual_seed_all(1)
    assert backend.supports_dtype(torch.bfloat16) and not backend.supports_dtype(torch.float64)
    assert backend.device_name(1)
    try:
        torch.empty(1 << 40, dtype=torch.uint8, device=backend.device(0))
    except Exception as error:
        assert backend.is_out_of_memory(error)
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)]).eval()
    x = torch.randn(2, 64)
    with torch.no_grad():
        expected = model(x)
    caps = {{0: "40KiB", 1: "60KiB", "cpu": "1GiB"}}
    anydevice.dispatch_model(model, anydevice.infer_auto_device_map(model, max_memory=caps))
    assert {{p.device.type for p in model.parameters()}} >= {{kind}}
    with torch.no_grad():
        assert torch.allclose(model(x).cpu(), expected, atol=1e-6)
    print("fine")
"""


@pytest.mark.parametrize("kind", ["npu", "mlu"])
def test_a_vendors_backend_runs_on_the_simulator_under_its_name(kind, tmp_path):
    (tmp_path / f"torch_{kind}.py").write_text(textwrap.dedent(STAND_IN).format(kind=kind))
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    env.pop("ANYDEVICE_SIMULATOR", None)
    done = run_python("-W", "error", "-c", textwrap.dedent(USE).format(kind=kind), env=env)
    assert done.stdout.strip().endswith("fine"), done.stderr
