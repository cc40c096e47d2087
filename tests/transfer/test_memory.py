"""Memory: how much is taken, what happens when there is none, and that all of it is given back."""

import copy
import gc
import random
import threading
import warnings
import weakref

import pytest
import torch
from tests.transfer.conftest import Block, Offloaded, make_blocks, same
from torch import nn

from anydevice.devices import parse_device
from anydevice.errors import BudgetError, OptionError, UnknownDeviceError
from anydevice.transfer import Engine, profile_transfers
from anydevice.weights import iter_modules, iter_slots

KIB = 1 << 10
MIB = 1 << 20


class Big(nn.Module):
    """1 MiB of weights."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(512, 512))

    def forward(self, x):
        return x @ self.weight / 256


def big_blocks(count):
    torch.manual_seed(0)
    return [Big() for _ in range(count)]


def inputs():
    return torch.rand(4, 512, generator=torch.Generator().manual_seed(2))


def pool_of(model):
    return model.engine._prefetcher.engine(model.device).pool


# ---------------------------------------------------------------------- out of memory


@pytest.mark.parametrize("mode", ["lazy", "thread"])
def test_when_there_is_no_room_for_the_next_unit_it_travels_when_needed(sim, make, mode):
    sim.configure(devices=1, memory="2MiB", mode=mode)
    model = make(big_blocks(4), prefetch_depth=2, reserve={"sim:0": 64 * MIB})
    x = inputs()
    wanted = model.plain(x)
    with pytest.warns(RuntimeWarning, match=r"sim:0 is out of memory .* max_memory"):
        assert torch.allclose(model(x).cpu(), wanted, rtol=1e-4)
    for _ in range(2):  # it is said once: now a warning would be an error
        assert torch.allclose(model(x).cpu(), wanted, rtol=1e-4)
    assert sim.counters(0)["cache_clears"] <= 2


def test_memory_of_units_that_wait_is_given_to_the_one_that_is_needed(sim, make):
    sim.configure(devices=1, memory="5MiB", mode="lazy")
    model = make(big_blocks(4), prefetch_depth=3, reserve={"sim:0": 64 * MIB})
    with torch.no_grad():
        with model.groups[0].call():
            pass
        hog = torch.empty(int(0.5 * MIB), dtype=torch.uint8, device="sim:0")
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            got = model(inputs(), [3, 3, 0])
    assert torch.allclose(got.cpu(), model.plain(inputs(), [3, 3, 0]), rtol=1e-4)
    del hog


def test_a_unit_that_does_not_fit_at_all_says_so_and_leaves_the_model_whole(sim, make):
    sim.configure(devices=1, memory="768KiB", mode="lazy")
    model = make(big_blocks(2))
    weight = model.blocks[0].weight
    with pytest.warns(RuntimeWarning, match="out of memory"), pytest.raises(torch.OutOfMemoryError):
        model(inputs())
    assert model.blocks[0].weight is weight
    assert not model.engine.resident
    sim.configure(devices=1, memory="64MiB")
    assert torch.allclose(model(inputs()).cpu(), model.plain(inputs()), rtol=1e-4)


def test_a_tensor_that_travels_by_itself_gets_memory_too(sim):
    sim.configure(devices=1, memory="3MiB", mode="lazy")
    model = Offloaded(big_blocks(2), prefetch_depth=1)
    loose = nn.Module()
    loose.register_buffer("even", torch.zeros(2 * MIB, dtype=torch.uint8)[::2])
    group = model.engine.group("loose", list(iter_modules(loose)), model.device)
    model(inputs())
    kept = torch.empty(MIB + MIB // 2, dtype=torch.uint8, device="sim:0")
    with pytest.warns(RuntimeWarning, match="out of memory"), torch.no_grad(), group.call():
        assert loose.even.shape == (MIB,)
    del kept
    model.engine.close()


# ---------------------------------------------------------------------- reserve


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_what_travels_ahead_keeps_to_the_room(sim, make, groups):
    reserve = groups * 2 * MIB  # a buffer of 1 MiB of weights is rounded up
    model = make(big_blocks(6), prefetch_depth=3, reserve={0: reserve})
    x = inputs().to("sim:0")
    model(x)
    torch.sim.synchronize(0)
    torch.sim.reset_peak_memory_stats(0)
    before = torch.sim.memory_allocated(0)
    assert same(model(x), model.plain(x.cpu()))
    assert pool_of(model).total <= reserve
    assert torch.sim.max_memory_allocated(0) - before <= 0.25 * MIB
    ahead = sum(group.prefetch_score > 0 for group in model.groups)
    assert ahead > 0


def test_what_must_come_comes_whatever_the_room(make):
    model = make(big_blocks(3), prefetch_depth=2, reserve={"sim:0": 0})
    x = inputs()
    for _ in range(2):
        assert torch.allclose(model(x).cpu(), model.plain(x), rtol=1e-4)
    assert pool_of(model).total <= 2 * MIB


def test_units_of_all_sizes_share_the_buffers(sim, make):
    blocks = [Block(32), Big(), Block(32), Big(), Block(48), Big()]
    model = make(blocks, prefetch_depth=1)
    shapes = [torch.ones(2, 32), inputs(), torch.ones(2, 32), inputs(), torch.ones(2, 48), inputs()]
    shapes = [s.to("sim:0") for s in shapes]

    def run():
        with torch.no_grad(), model.engine.whole_pass():
            for group, block, x in zip(model.groups, blocks, shapes, strict=True):
                with group.call():
                    block(x)

    for _ in range(3):
        run()
    sim.reset_counters()
    for _ in range(3):
        run()
    assert sim.counters(0)["device_allocs"] == 0


@pytest.mark.parametrize("count", [1, 2, 3])
def test_as_many_buffers_find_room_as_units_do(make, count):
    blocks = make_blocks(6)
    reserve = count * sum(slot.get().nbytes for _, slot in iter_slots(blocks[0]))
    model = make(blocks, prefetch_depth=3, reserve={"sim:0": reserve})
    for _ in range(2):
        with profile_transfers() as profile:
            model(torch.randn(2, 32))
    pool = pool_of(model)
    assert pool.total - pool.padding <= reserve
    assert sum(group.ahead for group in profile.groups) >= (4 if count > 1 else 0)


class Odd(nn.Module):
    """Weights of any size."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.bias = nn.Parameter(torch.zeros(size % 7 + 1))

    def forward(self, x):
        return x + self.weight.mean() + self.bias.mean()


@pytest.mark.parametrize("seed", range(12))
def test_whatever_the_sizes_and_the_room_no_memory_is_taken_in_the_end(sim, make, seed):
    draw = random.Random(seed)
    kinds = [int(10 ** draw.uniform(1, 6)) for _ in range(draw.randint(1, 4))]
    blocks = [Odd(draw.choice(kinds)) for _ in range(draw.randint(2, 9))]
    largest = max(sum(p.nbytes for p in block.parameters()) for block in blocks)
    reserve = int(largest * draw.choice([0, 0.5, 1, 1.3, 2, 3, 4.7]))
    model = make(blocks, prefetch_depth=draw.randint(0, 3), reserve={"sim:0": reserve})
    x = torch.ones(2, device="sim:0")
    for _ in range(4):
        model(x)
    pool = pool_of(model)
    assert pool.total - pool.padding <= max(reserve, largest)
    sim.reset_counters()
    for _ in range(3):
        model(x)
    assert sim.counters(0)["device_allocs"] == 0


def test_where_memory_is_short_a_buffer_is_as_small_as_its_unit(sim, make):
    sim.configure(devices=1, memory="1.5MiB", mode="lazy")
    model = make([Odd(300_000), Odd(290_000)], prefetch_depth=0, reserve={"sim:0": 64 * MIB})
    x = torch.ones(2)
    with pytest.warns(RuntimeWarning, match="out of memory"):  # it did not know: now it does
        model(x)
    for _ in range(2):
        assert torch.equal(model(x).cpu(), x)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"prefetch_depth": -1}, OptionError, "prefetch_depth=-1"),
        ({"prefetch_depth": True}, OptionError, "prefetch_depth=True"),
        ({"reserve": {0: -1}}, BudgetError, r"reserve\[0\]: -1 is not a size: it is negative"),
        ({"reserve": {0: 1.5}}, BudgetError, r"reserve\[0\]: 1.5 is not a size"),
        ({"reserve": {0: None}}, BudgetError, r"reserve\[0\]: None is not a size"),
        ({"reserve": "1GiB"}, BudgetError, "reserve is '1GiB'; it must be a dict"),
        ({"reserve": {0: 1, "0": 1}}, UnknownDeviceError, "reserve names .*:0 twice"),
        ({"pin_budget": -1}, BudgetError, "pin_budget: -1 is not a size"),
        ({"pin_budget": "much"}, BudgetError, "pin_budget: 'much' is not a size"),
    ],
)
def test_wrong_settings_are_refused_by_name(options, error, words):
    with pytest.raises(error, match=words):
        Engine(**options)


def test_settings_may_be_text():
    engine = Engine(reserve={"sim:0": "2GiB"}, pin_budget="1.5KB")
    assert (engine.reserve, engine.pin_budget) == ({parse_device("sim:0"): 2 << 30}, 1500)


# ---------------------------------------------------------------------- the end


def readers():
    return [t for t in threading.enumerate() if t.name.startswith("anydevice")]


@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "staged"])
@pytest.mark.parametrize("mode", ["lazy", "thread"])
def test_a_model_that_is_deleted_while_weights_travel_is_gone(sim, mode, pinned):
    sim.configure(devices=1, memory="64MiB", mode=mode, **({"h2d": 20} if mode == "thread" else {}))
    gc.collect()
    others = readers()
    pinned_before = sim.pinned_bytes()
    model = Offloaded(make_blocks(5), prefetch_depth=3, pin_budget=None if pinned else 0)
    with torch.no_grad(), model.groups[0].call():
        pass
    assert model.engine._prefetcher._ahead
    gone = [weakref.ref(p) for b in model.blocks for p in b.parameters()]
    gone += [weakref.ref(model.engine), *(weakref.ref(u) for u in model.groups)]
    threads = [thread for thread in readers() if thread not in others]
    del model
    gc.collect()
    for thread in threads:
        thread.join()
    sim.drain()
    gc.collect()
    assert [r() for r in gone if r() is not None] == []
    assert torch.sim.memory_allocated(0) == 0
    assert sim.pinned_bytes() == pinned_before
    assert set(readers()) <= set(others)


def test_closing_gives_everything_back_and_the_engine_works_on(sim, make, x):
    model = make(prefetch_depth=2, pin_budget=0)
    wanted = model.plain(x)
    for _ in range(2):
        assert same(model(x), wanted)
        model.engine.close()
        torch.sim.synchronize(0)
        assert torch.sim.memory_allocated(0) == 0
        assert readers() == []


def test_a_module_that_is_taken_out_is_gone(sim, make, x):
    model = make()
    model(x)
    gone = weakref.ref(model.groups[2]), weakref.ref(model.blocks[2])
    del model.groups[2], model.blocks[2]
    gc.collect()
    assert [r() for r in gone] == [None, None]
    assert same(model(x), model.plain(x))


def test_memory_that_others_hold_is_not_used_again_and_is_counted_out(make, x):
    model = make(make_blocks(3), prefetch_depth=0)
    kept = []
    for group, block in zip(model.groups, model.blocks, strict=True):
        with torch.no_grad(), group.call():
            kept.append(block.up.weight)
    assert pool_of(model).total == 0
    for tensor, block in zip(kept, model.blocks, strict=True):
        assert torch.equal(tensor.cpu(), block.up.weight)


# ---------------------------------------------------------------------- page-locked memory


def engine_pins(module, **options):
    engine = Engine(**options)
    group = engine.group("m", list(iter_modules(module)), parse_device("sim:0"))
    with torch.no_grad(), group.call():
        pass
    return engine


def test_resting_weights_are_page_locked_once(sim):
    block = Block()
    before = [(id(p), p.detach().clone()) for p in block.parameters()]
    engine = engine_pins(block)
    assert all(t.get().is_pinned() for _, t in iter_slots(block))
    assert [id(p) for p in block.parameters()] == [i for i, _ in before]
    assert all(torch.equal(p, v) for p, (_, v) in zip(block.parameters(), before, strict=True))
    places = [p.data_ptr() for p in block.parameters()]
    again = engine.group("m", list(iter_modules(block)), parse_device("sim:0"))
    with torch.no_grad(), again.call():
        pass
    assert [p.data_ptr() for p in block.parameters()] == places


def test_a_page_locked_weight_has_its_own_storage(sim, tmp_path):
    block = Block()
    engine = engine_pins(block)
    for parameter in block.parameters():
        assert parameter.untyped_storage().nbytes() == parameter.nbytes
    torch.save(block.norm.weight, tmp_path / "weight.pt")
    assert (tmp_path / "weight.pt").stat().st_size < 4 * KIB
    assert torch.equal(copy.deepcopy(block).up.weight, block.up.weight)
    del engine


def test_a_page_locked_weight_outlives_unit_and_engine(sim):
    module = nn.Linear(64, 64)
    value = module.weight.detach().clone()
    engine_pins(module)
    gc.collect()
    torch.empty(1 << 20, dtype=torch.uint8).pin_memory().fill_(255)
    assert torch.equal(module.weight, value)


@pytest.mark.parametrize("keep", ["view", "shared", "storage"])
def test_memory_that_others_see_is_not_moved(sim, keep):
    module = nn.Linear(8, 8)
    if keep == "view":
        held = module.weight.detach()[2:]
    elif keep == "shared":
        held = module.weight.share_memory_()
    else:
        held = torch.nn.Parameter(module.weight.detach())
    engine_pins(module)
    assert not module.weight.is_pinned()
    assert module.bias.is_pinned()
    with torch.no_grad():
        module.weight.zero_()
    assert not held.any()


def test_the_budget_is_kept(sim):
    gc.collect()
    before = sim.pinned_bytes()
    model = Offloaded(make_blocks(4), prefetch_depth=0, pin_budget=40 * KIB)
    x = torch.randn(2, 32)
    for _ in range(2):
        assert same(model(x), model.plain(x))
    pinned = [b for b in model.blocks if b.up.weight.is_pinned()]
    assert len(pinned) == 2  # of 17 KiB each
    del pinned
    model.engine.close()
    del model
    gc.collect()
    assert sim.pinned_bytes() == before


def test_without_page_locked_memory_it_goes_on(sim, x):
    sim.configure(devices=1, pinned_limit=1)
    model = Offloaded(make_blocks(3), prefetch_depth=1)
    for _ in range(2):
        assert same(model(x), model.plain(x))
    model.engine.close()


def test_mapped_weights_stay_mapped_unless_they_shall_rest_in_memory(sim, tmp_path):
    from anydevice.checkpoint.mapped import backing_of, map_file

    path = tmp_path / "weights"
    path.write_bytes(bytes(4096))
    for resting, stays in ((None, True), ("disk", True), ("cpu", False)):
        module = nn.Module()
        module.weight = nn.Parameter(map_file(path).tensor(0, torch.float32, (1024,)))
        group = Engine().group(
            "m",
            list(iter_modules(module)),
            parse_device("sim:0"),
            offload_device=parse_device(resting) if resting else None,
        )
        with torch.no_grad(), group.call():
            assert not module.weight.any()
        assert (backing_of(module.weight) is not None) is stays
        assert module.weight.is_pinned() is not stays


# ---------------------------------------------------------------------- gradients


@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("options", [{}, {"pin_budget": 0}, {"dtype": torch.float64}])
def test_a_forward_with_gradients_on_keeps_no_device_copies(sim, make, x, options, trained):
    model = make(make_blocks(6), **options)
    plain = make_blocks(6)
    for block in (*model.blocks, *plain):
        block.to(torch.float64 if "dtype" in options else None)
        block.requires_grad_(trained)
    x = x.to(model.blocks[0].up.weight.dtype)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    model(x)
    group = sum(t.nbytes for t in model.blocks[0].state_dict().values())
    before = torch.sim.memory_allocated(0)
    output = model(inputs[0], grad=True)
    kept = torch.sim.memory_allocated(0) - before
    assert kept < 2 * group, "activations and their like, not six groups of weights"
    wanted = inputs[1]
    for block in plain:
        wanted = block(wanted)
    output.sum().backward()
    wanted.sum().backward()
    assert torch.allclose(inputs[0].grad, inputs[1].grad, atol=1e-5)
    for block, other in zip(model.blocks, plain, strict=True):
        for got, want in zip(block.parameters(), other.parameters(), strict=True):
            assert (got.grad is None) is (not trained)
            assert not trained or torch.allclose(got.grad, want.grad, atol=1e-5)


def test_a_graph_that_is_dropped_frees_the_device(sim, make, x):
    model = make([nn.Sequential(nn.Linear(32, 32), nn.Sigmoid(), nn.ReLU())])
    output = model(x.requires_grad_(), grad=True)
    model.engine.close()
    del output
    torch.sim.synchronize(0)
    assert torch.sim.memory_allocated(0) == 0


def test_a_second_derivative_is_right(make, x):
    model, plain = make(make_blocks(2)), make_blocks(2)

    def penalty(value, result):
        (slope,) = torch.autograd.grad(result.pow(2).sum(), value, create_graph=True)
        return slope.pow(2).sum()

    inputs, others = x.clone().requires_grad_(), x.clone().requires_grad_()
    wanted = others
    for block in plain:
        wanted = block(wanted)
    penalty(inputs, model(inputs, grad=True)).backward()
    penalty(others, wanted).backward()
    for block, other in zip(model.blocks, plain, strict=True):
        for got, want in zip(block.parameters(), other.parameters(), strict=True):
            assert torch.allclose(got.grad, want.grad, rtol=1e-3, atol=1e-4)


def test_a_weight_that_changes_before_its_backward_is_an_error(make, x):
    model = make(make_blocks(3))
    output = model(x.requires_grad_(), grad=True)
    with torch.no_grad():
        model.blocks[1].up.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_an_activation_that_changes_before_its_backward_is_an_error(make, x):
    model = make([nn.Sequential(nn.Linear(32, 32), nn.Sigmoid())])
    output = model(x.requires_grad_(), grad=True)
    with torch.no_grad():
        output.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_hooks_for_saved_tensors_of_others_go_on_working(make, x):
    model = make(make_blocks(3))
    packed = []

    def pack(tensor):
        packed.append(tensor.shape)
        return tensor.cpu()

    wanted = x.clone().requires_grad_()
    result = model(wanted, grad=True)
    result.sum().backward()
    inputs = x.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor.to("sim:0")):
        output = model(inputs, grad=True)
    output.sum().backward()
    assert packed
    assert torch.Size([64, 32]) not in packed, "weights are not theirs"
    assert torch.allclose(inputs.grad, wanted.grad)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_recomputes_blocks(make, x, reentrant):
    from torch.utils.checkpoint import checkpoint

    model, plain = make(make_blocks(2)), make_blocks(2)
    inputs, others = x.clone().requires_grad_(), x.clone().requires_grad_()

    def part(i, value):
        with model.groups[i].call():
            return model.blocks[i](value)

    value, wanted = inputs.to("sim:0"), others
    for i in range(2):
        value = checkpoint(part, i, value, use_reentrant=reentrant)
        wanted = plain[i](wanted)
    value.sum().backward()
    wanted.sum().backward()
    assert torch.allclose(inputs.grad, others.grad, atol=1e-5)
    got = [p.grad for b in model.blocks for p in b.parameters()]
    want = [p.grad for b in plain for p in b.parameters()]
    assert all(torch.allclose(g, w, atol=1e-5) for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("gaps", [False, True], ids=["together", "alone"])
def test_an_out_of_memory_error_that_is_kept_keeps_no_device_memory(sim, gaps):
    sim.configure(devices=1, memory="3MiB", mode="lazy")
    module = nn.Module()
    for name, size in (("fits", 1 << 19), ("too_large", 1 << 20)):
        module.register_buffer(name, torch.zeros(2 * size)[::2] if gaps else torch.zeros(size))
    engine = Engine()
    group = engine.group("m", list(iter_modules(module)), parse_device("sim:0"))
    with pytest.warns(RuntimeWarning), pytest.raises(torch.OutOfMemoryError) as kept:
        group.call().__enter__()
    engine.close()
    torch.sim.synchronize(0)
    assert torch.sim.memory_allocated(0) == 0, kept


def test_an_out_of_memory_error_names_copies_that_are_still_held(sim, make):
    sim.configure(devices=1, memory="3MiB", mode="lazy")
    model = make(big_blocks(5), prefetch_depth=0)
    held = []

    def keep_all():
        for group, block in zip(model.groups, model.blocks, strict=True):
            with torch.no_grad(), group.call():
                held.extend(p.view(-1) for p in block.parameters())

    words = r"copies of offloaded weights whose calls are over.*torch\.no_grad\(\)"
    with (
        pytest.warns(RuntimeWarning, match="out of memory"),
        pytest.raises(torch.OutOfMemoryError, match=words),
    ):
        keep_all()


def test_statistics_that_a_forward_updates_do_not_spoil_its_backward(sim, make, x):
    def made():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Linear(32, 32))

    model, plain = make([made()]), made()
    for _ in range(2):
        model(x, grad=True).square().sum().backward()
        plain(x).square().sum().backward()
    for got, want in zip(model.blocks[0].parameters(), plain.parameters(), strict=True):
        assert torch.allclose(got.grad, want.grad, rtol=1e-3, atol=1e-3)
    for got, want in zip(model.blocks[0].buffers(), plain.buffers(), strict=True):
        assert torch.allclose(got, want, atol=1e-5)
