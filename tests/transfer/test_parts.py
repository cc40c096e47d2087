"""The parts by themselves: plans, loads, orders, batched copies, profiles."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mutants import installed
from tests.transfer.conftest import Offloaded, make_blocks, same
from torch import nn

from anydevice.devices import CPU, parse_device
from anydevice.tensors import is_dense
from anydevice.transfer import Engine, copy_batch, profile_transfers
from anydevice.transfer.copy_plan import align, plan_copies
from anydevice.transfer.staging import divide
from anydevice.weights import iter_modules, iter_slots

# ---------------------------------------------------------------------- plans

SHAPES = st.lists(st.lists(st.integers(1, 5), max_size=3), max_size=6)
DTYPES = st.sampled_from([torch.float32, torch.int8, torch.bfloat16, torch.float64, torch.bool])


@given(shapes=SHAPES, data=st.data())
def test_pieces_do_not_overlap_and_are_aligned(shapes, data):
    tensors = [torch.zeros(s, dtype=data.draw(DTYPES)) for s in shapes]
    layout = plan_copies(tensors, pins=False)
    spans = sorted((p.offset, p.offset + p.nbytes) for p in layout.pieces)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    assert all(start % 64 == 0 for start, _ in spans)
    assert all(end <= layout.nbytes for _, end in spans)
    assert sorted(p.weight for p in layout.pieces) + layout.loose == list(range(len(tensors)))


def test_neighbours_are_copied_at_once():
    whole = torch.arange(256.0)
    layout = plan_copies([whole[128:], whole[:64]], pins=False)
    assert len(layout.runs) == 1
    assert layout.runs[0].nbytes == 1024


def test_neighbours_that_would_lose_their_alignment_are_not():
    whole = torch.arange(256.0)
    assert len(plan_copies([whole[:100], whole[100:]], pins=False).runs) == 2


@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        (torch.zeros(2, 3), True),
        (torch.zeros(2, 3).t(), True),
        (torch.zeros(2, 3, 4).permute(1, 2, 0), True),
        (torch.zeros(2, 1, 3).transpose(0, 1), True),
        (torch.zeros(4, 3)[:, :2], False),
        (torch.zeros(1, 3).expand(2, 3), False),
        (torch.zeros(6)[::2], False),
    ],
)
def test_dense_tensors_are_known(tensor, dense):
    assert is_dense(tensor) is dense


# ---------------------------------------------------------------------- loads


@given(
    sizes=st.lists(st.tuples(st.integers(1, 50), st.integers(0, 600)), max_size=8),
    chunk=st.integers(1, 64),
)
def test_loads_carry_every_byte_once(sizes, chunk):
    sources, at = [], 0
    for size, gap in sizes:
        at += gap
        sources.append((torch.arange(size, dtype=torch.uint8) + len(sources), at))
        at += size
    wanted = torch.full((at,), 255, dtype=torch.uint8)
    for source, offset in sources:
        wanted[offset : offset + source.numel()] = source
    got, written = torch.full((at,), 255, dtype=torch.uint8), torch.zeros(at, dtype=torch.int)
    for load in divide(sources, chunk):
        assert 0 < load.nbytes <= chunk
        for part, offset in load.parts:
            assert offset + part.numel() <= load.nbytes
            place = slice(load.offset + offset, load.offset + offset + part.numel())
            got[place] = part
            written[place] += 1
    assert torch.equal(got, wanted)
    assert int(written.sum()) == sum(size for size, _ in sizes)


@given(
    weights=st.lists(st.tuples(st.integers(1, 600), st.booleans()), max_size=8),
    chunk=st.integers(1, 1500),
)
def test_loads_leave_alone_what_travels_without_them(weights, chunk):
    sources, others, at = [], [], 0
    for size, staged in weights:
        if staged:
            sources.append((torch.zeros(size, dtype=torch.uint8), at))
        else:
            others.append(range(at, at + size))
        at += align(size)
    for load in divide(sources, chunk):
        for other in others:
            assert load.offset + load.nbytes <= other.start or other.stop <= load.offset


def test_a_page_locked_weight_between_others_arrives(sim):
    """Some weights of a group were page-locked; others, assigned since, are staged around them."""
    module = nn.Module()
    sizes = {"a": 64, "b": 8, "c": 8}
    for name, size in sizes.items():
        module.register_buffer(name, torch.rand(size))
    group = Engine().group("module", list(iter_modules(module)), parse_device("sim:0"))
    with group.call():
        pass
    assert all(t.is_pinned() for t in module.buffers())
    for original in itertools.permutations(sizes):
        new = {
            original[0]: torch.rand(sizes[original[0]]),
            original[1]: torch.rand(sizes[original[1]]),
        }
        module.load_state_dict(new, strict=False, assign=True)
        wanted = {name: tensor.clone() for name, tensor in module.named_buffers()}
        for _ in range(2):
            with group.call():
                got = {name: tensor.cpu() for name, tensor in module.named_buffers()}
            assert all(torch.equal(got[name], wanted[name]) for name in sizes)


def test_units_larger_than_a_chunk_are_staged_in_parts(sim, make, x, monkeypatch):
    monkeypatch.setattr("anydevice.transfer.staging.CHUNK", 4096)
    monkeypatch.setattr("anydevice.transfer.staging._SMALLEST", 4096)
    model = make(pin_budget=0, prefetch_depth=2)
    for _ in range(3):
        assert same(model(x), model.plain(x))
    assert sim.counters(0)["h2d_copies"] > 3 * 4 * len(model.blocks)


def test_what_a_reader_raises_is_raised_where_the_weights_are_needed(make, x, monkeypatch):
    model = make(pin_budget=0, prefetch_depth=2)
    wanted = model.plain(x)
    with monkeypatch.context() as patch:

        def fail(*_):
            raise OSError("the disk is gone")

        patch.setattr("anydevice.transfer.residency.Residency.deliver", fail)
        with pytest.raises(OSError, match="the disk is gone"):
            model(x)
    assert all(p.device == CPU.torch for b in model.blocks for p in b.parameters())
    assert same(model(x), wanted)


# ---------------------------------------------------------------------- backends without streams


@pytest.mark.parametrize("claims", [{}, {"streams": True}, {"pinned_memory": True}])
def test_devices_that_can_less_go_the_same_way(sim, make, x, monkeypatch, claims):
    from anydevice.backend import Capabilities
    from anydevice_conformance.simulator.backend import SimulatorBackend

    monkeypatch.setattr(SimulatorBackend, "capabilities", Capabilities(**claims))
    for name in [] if "streams" in claims else ["new_stream", "current_stream", "record_event"]:
        monkeypatch.setattr(SimulatorBackend, name, None)
    if "pinned_memory" not in claims:
        monkeypatch.setattr(SimulatorBackend, "pin_memory", None)
    model = make(prefetch_depth=2)
    with profile_transfers() as profile:
        for _ in range(2):
            assert same(model(x), model.plain(x))
    assert profile.bytes > 0
    assert model(x, grad=True).requires_grad


# ---------------------------------------------------------------------- batched copies


def test_carried_tensors_are_copies_with_their_strides(sim):
    tensors = [torch.randn(5, 7).t(), torch.arange(9), torch.zeros(0), torch.randn(6)[::2]]
    tensors.append(tensors[0])
    got = copy_batch(tensors, parse_device("sim:0"))
    assert all(str(t.device) == "sim:0" for t in got)
    assert all(torch.equal(g.cpu(), t) for g, t in zip(got, tensors, strict=True))
    assert got[0].stride() == tensors[0].stride()
    assert got[4] is got[0]
    back = copy_batch(got, CPU)
    assert all(torch.equal(b, t) for b, t in zip(back, tensors, strict=True))
    assert copy_batch(got[:1], parse_device("sim:0"))[0] is got[0]


def test_carrying_from_page_locked_memory_stops_nobody(sim):
    tensors = [torch.randn(100, 100).pin_memory() for _ in range(3)]
    sim.reset_counters()
    got = copy_batch(tensors, parse_device("sim:0"))
    assert sim.counters(0)["host_syncs"] == 0
    assert all(torch.equal((g * 1).cpu(), t) for g, t in zip(got, tensors, strict=True))


def test_nothing_of_a_backend_that_was_replaced_is_used(sim):
    """A broken backend that once stood in the registry leaves no queue behind."""
    device, model = parse_device("sim:0"), Offloaded(make_blocks(2), prefetch_depth=2)
    x = torch.rand(3, 32)
    with installed("WaitDoesNothing"):
        copy_batch([torch.randn(4, 4)], device)
        model(x)
    tensor = torch.randn(100, 100).pin_memory()
    for _ in range(4):  # whichever wait a fault leaves out
        (got,) = copy_batch([tensor], device)
        assert torch.equal((got * 1).cpu(), tensor)
        assert same(model(x), model.plain(x))
    model.engine.close()


def test_memory_of_a_batched_copy_that_fails_is_not_written_to_later(sim, monkeypatch):
    sources = [torch.zeros(1 << 20, dtype=torch.uint8).pin_memory() for _ in range(2)]

    def interrupt(tensor, *_):
        if tensor is sources[1]:
            raise KeyboardInterrupt
        return tensor

    monkeypatch.setattr("anydevice.transfer.batched_copy._BATCH", 1 << 20)
    monkeypatch.setattr("anydevice.transfer.copy_plan.bytes_of", interrupt)
    with pytest.raises(KeyboardInterrupt):
        copy_batch(sources, parse_device("sim:0"))
    later = torch.ones(1 << 20, dtype=torch.uint8).pin_memory().to("sim:0", non_blocking=True)
    torch.sim.current_stream(0).synchronize()
    torch.sim.synchronize()  # also what the failed copy queued on its own stream has run
    assert bool(later.cpu().all())


def test_a_transfer_that_fails_to_start_gives_its_buffer_back(make, x, monkeypatch):
    model = make(prefetch_depth=0)
    wanted = model.plain(x)
    assert same(model(x), wanted)
    pool = model.engine._prefetcher.engine(model.device).pool
    total = pool.total
    with monkeypatch.context() as patch:
        patch.setattr("anydevice.transfer.copy_plan.bytes_of", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(x)
    assert same(model(x), wanted)
    assert pool.total == total


# ---------------------------------------------------------------------- profiles


def test_a_profile_counts_what_travelled(sim, make, x):
    model = make(prefetch_depth=1)
    model(x)
    nbytes = sum(t.get().nbytes for b in model.blocks for _, t in iter_slots(b))
    with profile_transfers() as profile:
        model(x)
    assert profile.bytes == nbytes
    assert profile.copies == len(model.blocks)
    assert [u.group for u in profile.groups] == [str(i) for i in range(5)]
    assert [u.ahead for u in profile.groups] == [0, 1, 1, 1, 1]
    assert all(u.uses == 1 and u.device == "sim:0" for u in profile.groups)
    assert 0 <= profile.overlap <= 1
    assert profile.waited >= 0
    lines = str(profile).splitlines()
    assert lines[0].split() == [
        "GROUP",
        "DEVICE",
        "USES",
        "AHEAD",
        "MB",
        "COPIES",
        "COPY",
        "ms",
        "WAITED",
        "ms",
    ]
    assert len(lines) == 1 + 5 + 2


def test_profiles_nest_and_end(sim, make, x):
    model = make()
    with profile_transfers() as outer:
        model(x)
        seen = outer.copies
        with profile_transfers() as inner:
            model(x)
        assert outer.copies == seen
    model(x)
    assert inner.copies == 5
    assert outer.copies == seen


def test_tensors_that_travel_alone_are_counted(sim):
    module = nn.Module()
    module.register_buffer("odd", torch.randn(6)[::2])
    group = Engine().group("odd", list(iter_modules(module)), parse_device("sim:0"))
    with profile_transfers() as profile, torch.no_grad(), group.call():
        pass
    assert profile.bytes == 12
    assert profile.copies == 1


def test_an_empty_profile_prints(sim):
    with profile_transfers() as profile:
        pass
    assert "overlap 0%" in str(profile)
    assert Offloaded(make_blocks(1)).engine is not None


# ---------------------------------------------------------------------- reading ahead


@pytest.fixture
def advice(monkeypatch):
    """What the system was told will be needed: offsets in the file."""
    from anydevice.checkpoint.mapped import MappedFile

    told = []
    monkeypatch.setattr(MappedFile, "will_need", lambda self, offset, nbytes: told.append(offset))
    return told


def mapped_blocks(folder, count, nbytes=1 << 20):
    from anydevice.checkpoint.mapped import map_file

    path = folder / "weights"
    path.write_bytes(bytes(count * nbytes))
    blocks = []
    for i in range(count):
        block = nn.Module()
        value = map_file(path).tensor(i * nbytes, torch.uint8, (nbytes,))
        block.weight = nn.Parameter(value, requires_grad=False)
        blocks.append(block)
    return blocks


def test_files_are_read_ahead_of_the_host_while_the_disk_is_slow(
    sim, tmp_path, advice, monkeypatch
):
    faults = [0]
    monkeypatch.setattr("anydevice.transfer.engine.page_faults", lambda: faults[0])
    model = Offloaded(mapped_blocks(tmp_path, 4), "cpu", prefetch_depth=2)

    def run():
        with model.engine.whole_pass():
            for group, block in zip(model.groups, model.blocks, strict=True):
                weight = block.weight
                with group.call():
                    assert block.weight is weight

    run()
    model.engine.close()
    assert advice == []
    faults[0] = 1
    run()
    model.engine.close()
    assert advice == [1 << 20, 2 << 20]


def test_small_files_are_left_to_the_system(sim, tmp_path, advice, monkeypatch):
    counts = itertools.count()
    monkeypatch.setattr("anydevice.transfer.engine.page_faults", lambda: next(counts))
    model = Offloaded(mapped_blocks(tmp_path, 3, nbytes=4096), "cpu")
    for group in model.groups:
        with group.call():
            pass
    model.engine.close()
    assert advice == []


def test_staged_weights_are_read_ahead(sim, tmp_path, advice):
    model = Offloaded(mapped_blocks(tmp_path, 3), "sim:0", prefetch_depth=1)
    with torch.no_grad(), model.engine.whole_pass():
        for group in model.groups:
            with group.call():
                pass
    model.engine.close()
    assert advice == [0, 1 << 20, 2 << 20]


def test_a_file_that_is_gone_is_found_out_by_who_uses_it(sim, tmp_path):
    model = Offloaded(mapped_blocks(tmp_path, 2), "sim:0")
    (tmp_path / "weights").unlink()
    with torch.no_grad(), model.groups[0].call():  # it is still mapped
        assert not model.blocks[0].weight.any()
    model.engine.close()
