import builtins
import contextlib
import io
import itertools
import threading

import pytest
import torch
from safetensors.torch import save_file

from anydevice.backend import Capabilities, DeviceBackend
from anydevice.checkpoint import open_checkpoint
from anydevice.devices import parse_device
from anydevice.loading import streaming
from anydevice.loading.streaming import Request, stream
from anydevice.registry import get_backend
from anydevice_conformance.simulator.backend import SimulatorBackend

KIB = 1 << 10


@pytest.fixture
def truth():
    torch.manual_seed(2)
    state = {f"small.{i}": torch.randn(7, 3) for i in range(40)}
    state["large"] = torch.randn(300, 401)  # 470 KiB: many runs of a small buffer
    state["ints"] = torch.arange(100_000, dtype=torch.int16)
    state["empty"] = torch.zeros(0, 4)
    state["scalar"] = torch.tensor(3.0, dtype=torch.float64)
    state["odd"] = torch.arange(5, dtype=torch.uint8)
    return state


@pytest.fixture
def checkpoint(truth, tmp_path):
    names = list(truth)
    save_file({n: truth[n] for n in names[:20]}, tmp_path / "m-00001-of-00002.safetensors")
    save_file({n: truth[n] for n in names[20:]}, tmp_path / "m-00002-of-00002.safetensors")
    return open_checkpoint(tmp_path)


def requests_for(checkpoint, device, dtype=None, names=None):
    place = parse_device(device)
    return {
        name: Request(
            info,
            place,
            dtype if dtype is not None and info.dtype.is_floating_point else info.dtype,
            torch.Size(info.shape),
        )
        for name, info in checkpoint.items()
        if names is None or name in names
    }


def require_right(requests, truth):
    for name, request in requests.items():
        assert request.result.dtype == request.dtype
        assert request.result.device == request.device.torch
        assert torch.equal(request.result.cpu(), truth[name].to(request.dtype)), name


@pytest.mark.parametrize("device", ["cpu", "sim:0", "sim:1"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("buffer_bytes", "workers"), [(1, 1), (1, 5), (1 << 20, 2), (1 << 28, 3)])
def test_right_in_every_way(sim, device, dtype, buffer_bytes, workers, checkpoint, truth):
    requests = requests_for(checkpoint, device, dtype)
    stream(list(requests.values()), buffer_bytes=buffer_bytes, workers=workers)
    require_right(requests, truth)


@pytest.mark.parametrize("mode", ["sync", "lazy", "thread", "random"])
def test_no_buffer_is_filled_while_a_device_still_copies_out_of_it(sim, mode, checkpoint, truth):
    """With one buffer for many runs, a wait left out reads later bytes: see the next test."""
    sim.configure(devices=1, memory="64MiB", mode=mode)
    requests = requests_for(checkpoint, "sim:0")
    stream(list(requests.values()), buffer_bytes=1, workers=2)
    require_right(requests, truth)


def test_the_simulator_shows_a_wait_that_is_left_out(sim, checkpoint, truth, monkeypatch):
    monkeypatch.setattr(SimulatorBackend, "synchronize_event", lambda self, event: None)
    requests = requests_for(checkpoint, "sim:0")
    stream(list(requests.values()), buffer_bytes=1, workers=1)
    with pytest.raises(AssertionError, match=r"small|large"):
        require_right(requests, truth)


@pytest.mark.parametrize(
    "capabilities", [Capabilities(), Capabilities(pinned_memory=True), Capabilities(streams=True)]
)
def test_a_device_that_claims_less_is_never_asked_for_it(
    sim, capabilities, checkpoint, truth, monkeypatch
):
    backend = get_backend("sim")

    def never(*args, **kwargs):
        raise AssertionError("called without being claimed")

    moves = []
    real = backend.move

    def move(tensor, device, *, non_blocking=False):
        moves.append(non_blocking)
        return real(tensor, device, non_blocking=non_blocking)

    monkeypatch.setattr(SimulatorBackend, "capabilities", capabilities)
    for name in ("pin_memory", "record_event", "current_stream"):
        monkeypatch.setattr(SimulatorBackend, name, never)
    monkeypatch.setattr(SimulatorBackend, "move", staticmethod(move))
    requests = requests_for(checkpoint, "sim:0", torch.bfloat16)
    stream(list(requests.values()), buffer_bytes=1, workers=2)
    require_right(requests, truth)
    assert moves
    assert not any(moves)


def test_where_no_more_memory_can_be_locked_plain_buffers_do(sim, checkpoint, truth):
    sim.configure(devices=1, memory="64MiB", mode="lazy", pinned_limit=1)
    requests = requests_for(checkpoint, "sim:0")
    stream(list(requests.values()), buffer_bytes=1, workers=2)
    require_right(requests, truth)


def test_events_are_waited_for_through_the_backend(sim, checkpoint, truth, monkeypatch):
    """A vendor's event may be any object: only the backend knows how to wait for it."""
    backend = get_backend("sim")
    record, synchronize = backend.record_event, backend.synchronize_event
    monkeypatch.setattr(SimulatorBackend, "record_event", lambda _, stream: (record(stream),))
    monkeypatch.setattr(SimulatorBackend, "synchronize_event", lambda _, event: synchronize(*event))
    requests = requests_for(checkpoint, "sim:0")
    stream(list(requests.values()), buffer_bytes=1, workers=2)
    require_right(requests, truth)


def test_the_cast_is_made_on_the_host_where_the_device_cannot(sim, checkpoint, truth, monkeypatch):
    seen = set()
    backend = get_backend("sim")
    real = backend.move

    def move(tensor, device, *, non_blocking=False):
        seen.add(tensor.dtype)
        return real(tensor, device, non_blocking=non_blocking)

    monkeypatch.setattr(SimulatorBackend, "move", staticmethod(move))
    stream(list(requests_for(checkpoint, "sim:0", torch.bfloat16, {"large"}).values()))
    assert seen == {torch.float32}  # fewer bytes were read than cast: the device casts
    seen.clear()
    monkeypatch.setattr(
        DeviceBackend, "supports_dtype", lambda self, dtype: dtype is not torch.float32
    )
    requests = requests_for(checkpoint, "sim:0", torch.bfloat16, {"large"})
    stream(list(requests.values()))
    assert seen == {torch.bfloat16}
    require_right(requests, truth)


@contextlib.contextmanager
def watched(monkeypatch):
    """File, position and length of each read inside."""
    reads = []
    lock = threading.Lock()

    class Watched(io.FileIO):
        def readinto(self, memory):
            at = self.tell()
            count = super().readinto(memory)
            with lock:
                reads.append((self.name, at, count))
            return count

    with monkeypatch.context() as patch:
        patch.setattr(
            builtins, "open", lambda path, mode, **_: Watched(path, mode.replace("b", ""))
        )
        yield reads


def test_every_byte_is_read_once_and_in_order(checkpoint, truth, monkeypatch):
    requests = requests_for(checkpoint, "cpu", torch.bfloat16)
    with watched(monkeypatch) as reads:
        stream(list(requests.values()), buffer_bytes=1, workers=1)
    require_right(requests, truth)
    assert sum(count for _, _, count in reads) == checkpoint.nbytes
    assert reads == sorted(reads)
    for (file, at, count), (next_file, next_at, _) in itertools.pairwise(reads):
        assert file != next_file or at + count <= next_at
    # Forty small neighbours are not forty reads.
    assert len(reads) < checkpoint.nbytes // streaming._SMALLEST_RUN + 10


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
def test_names_of_one_storage_are_read_once(sim, device, tmp_path, monkeypatch):
    large = torch.arange(300_000.0)
    state = {"a": large, "b": large, "part": large[1000:2000], "c": torch.ones(3)}
    torch.save(state, tmp_path / "m.bin")
    checkpoint = open_checkpoint(tmp_path / "m.bin")
    requests = requests_for(checkpoint, device, torch.bfloat16)
    with watched(monkeypatch) as reads:
        stream(list(requests.values()), buffer_bytes=1, workers=1)
    require_right(requests, state)
    assert sum(count for _, _, count in reads) <= large.nbytes + 8192


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
def test_memory_is_bounded_by_the_buffers(sim, device, tmp_path, monkeypatch):
    save_file({"w": torch.ones(8 << 20)}, tmp_path / "m.safetensors")  # 32 MiB in one tensor
    checkpoint = open_checkpoint(tmp_path / "m.safetensors")
    sizes = []
    real = torch.empty

    def empty(*args, **kwargs):
        made = real(*args, **kwargs)
        if made.device.type == "cpu":
            sizes.append(made.nbytes)
        return made

    monkeypatch.setattr(torch, "empty", empty)
    request = requests_for(checkpoint, device, torch.bfloat16)["w"]
    stream([request], buffer_bytes=2 << 20, workers=2)
    assert bool((request.result == 1).all())
    results = 16 << 20 if device == "cpu" else 0
    assert sum(sizes) <= results + (2 << 20) + 4 * streaming._ALIGNMENT


def test_existing_memory_is_filled(sim, checkpoint, truth):
    for device in ("cpu", "sim:0"):
        request = requests_for(checkpoint, device, names={"large"})["large"]
        request.into = torch.zeros(300, 401, device=device)
        stream([request], buffer_bytes=1)
        assert request.result is request.into
        assert torch.equal(request.into.cpu(), truth["large"])


def test_progress_counts_every_byte_once(checkpoint):
    counts = []
    stream(list(requests_for(checkpoint, "cpu").values()), buffer_bytes=1, advance=counts.append)
    assert sum(counts) == checkpoint.nbytes
    stream([])


def test_the_first_failure_stops_the_others(checkpoint, monkeypatch):
    done = []

    def fail(part, source, owner, pinned):
        done.append(part)
        raise ValueError("no")

    monkeypatch.setattr(streaming, "_put", fail)
    before = threading.active_count()
    with pytest.raises(ValueError, match="no"):
        stream(list(requests_for(checkpoint, "cpu").values()), buffer_bytes=1, workers=3)
    assert len(done) <= 3
    assert threading.active_count() == before
