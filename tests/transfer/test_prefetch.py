"""Groups travel ahead, whatever the order, and every missing wait would be seen.

The simulator runs queued work as late as it may (``lazy``), in random orders, or truly beside
(``thread``); what was not waited for reads as NaN.
"""

import threading

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.transfer.conftest import WIDTH, Block, Offloaded, make_blocks, same

SLOW = {"h2d": 20}  # MB/s


def machine(sim, mode, **options):
    slow = SLOW if mode == "thread" else {}
    sim.configure(devices=2, memory="64MiB", mode=mode, **slow, **options)


@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "staged"])
@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("mode", ["sync", "lazy", "random", "thread"])
def test_outputs_are_those_of_the_plain_model(sim, make, x, mode, depth, pinned):
    for seed in range(4) if mode == "random" else [0]:
        machine(sim, mode, seed=seed)
        model = make(prefetch_depth=depth, pin_budget=None if pinned else 0)
        wanted = model.plain(x)
        for whole in (True, False, True):
            assert same(model(x, whole=whole), wanted)


@pytest.mark.parametrize("mode", ["lazy", "thread"])
def test_results_may_be_read_long_after(sim, make, x, mode):
    machine(sim, mode)
    model = make(prefetch_depth=2)
    inputs = [x * (i + 1) for i in range(4)]
    outputs = [model(i) for i in inputs]  # all of it is queued before any of it is read
    for got, i in zip(outputs, inputs, strict=True):
        assert torch.allclose(got.cpu(), model.plain(i), atol=1e-4)


ORDERS = st.lists(st.lists(st.integers(0, 4), max_size=12), min_size=1, max_size=4)


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(orders=ORDERS, depth=st.integers(0, 3), whole=st.booleans(), pinned=st.booleans())
def test_any_order_gives_the_right_result(sim, make, x, orders, depth, whole, pinned):
    sim.configure(devices=1, memory="64MiB", mode="random", seed=len(orders))
    model = make(prefetch_depth=depth, pin_budget=None if pinned else 0)
    for order in orders:
        got, wanted = model(x, order, whole=whole), model.plain(x, order)
        assert torch.allclose(got.cpu(), wanted, rtol=1e-4, atol=1e-4)


def test_blocks_on_two_devices_take_turns(sim, x):
    blocks = make_blocks(6)
    machine(sim, "lazy")
    one = Offloaded(blocks, "sim:0", prefetch_depth=2)
    for i, group in enumerate(one.groups):
        if i % 2:
            other = Offloaded([blocks[i]], "sim:1").groups[0]
            group.device, group._torch_device = other.device, other._torch_device
    for _ in range(3):
        y = x
        with torch.no_grad(), one.engine.whole_pass():
            for group, block in zip(one.groups, blocks, strict=True):
                with group.call():
                    y = block(y.to(group.device.torch))
        assert same(y, one.plain(x))


# ---------------------------------------------------------------------- the steady state


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_a_steady_state_takes_no_memory_and_never_stops_the_host(sim, make, x, depth):
    sim.configure(devices=1, memory="64MiB")
    model = make(prefetch_depth=depth)
    x = x.to("sim:0")
    for _ in range(2):
        model(x)
    torch.sim.synchronize(0)
    sim.reset_counters()
    for _ in range(3):
        model(x)
    counters = sim.counters(0)
    assert counters["device_allocs"] == counters["device_frees"] == counters["cache_clears"] == 0
    assert counters["host_syncs"] == 0
    assert counters["h2d_copies"] == 3 * len(model.blocks)  # one for each group
    assert counters["d2h_copies"] == 0


class Work(torch.nn.Module):
    """One weight of 256 KiB, and some kernels that use it."""

    def __init__(self, kernels):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(256, 256))
        self.kernels = kernels

    def forward(self, x):
        for _ in range(self.kernels):
            x = x * self.weight
        return x


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("kernel", [5, 100, 400], ids=["copy-bound", "balanced", "compute-bound"])
def test_time_is_that_of_the_slower_of_link_and_compute(sim, make, kernel, depth):
    sim.configure(devices=1, h2d=655, kernel=kernel, launch=0.1, copy_latency=1)
    blocks = [Work(4) for _ in range(8)]
    model = make(blocks, prefetch_depth=depth)
    x = torch.ones(256, 256, device="sim:0")
    model(x)
    torch.sim.synchronize(0)
    start = sim.clock_us()
    with sim.trace() as records:
        model(x)
        torch.sim.synchronize(0)
    took = sim.clock_us() - start
    copies = [r.end_us - r.start_us for r in records if r.kind == "h2d"]
    kernels = [r.end_us - r.start_us for r in records if r.kind == "kernel"]
    assert len(copies) == len(blocks)
    assert took <= 1.05 * max(sum(copies), sum(kernels)) + max(copies)


def test_without_depth_nothing_overlaps(sim, make):
    sim.configure(devices=1, h2d=655, kernel=100)
    model = make([Work(4) for _ in range(4)], prefetch_depth=0)
    x = torch.ones(256, 256, device="sim:0")
    model(x)
    with sim.trace() as records:
        model(x)
    copies = [r for r in records if r.kind == "h2d"]
    kernels = [r for r in records if r.kind == "kernel"]
    assert not any(c.overlaps(k) for c in copies for k in kernels)


def test_the_first_pass_guesses_the_order_of_making(sim, make, x):
    sim.configure(devices=1, h2d=100, kernel=200)
    model = make()
    x = x.to("sim:0")
    with sim.trace() as records:
        model(x)
    copies = [r for r in records if r.kind == "h2d"]
    kernels = [r for r in records if r.kind == "kernel"]
    assert sum(any(c.overlaps(k) for k in kernels) for c in copies) == len(model.blocks) - 1


# ---------------------------------------------------------------------- guesses


def copies_ahead(sim, model, x, order):
    sim.reset_counters()
    model(x, order)
    return sim.counters(0)["h2d_copies"]


def test_a_new_order_is_learned_in_one_pass(sim, make, x):
    model = make()
    x = x.to("sim:0")
    order = [3, 1, 4, 0]
    first = copies_ahead(sim, model, x, order)
    assert first > len(order)  # wrong guesses cost copies
    assert copies_ahead(sim, model, x, order) == len(order)


def test_a_loop_over_blocks_is_learned_with_its_end(sim, make, x):
    model = make()
    x = x.to("sim:0")
    order = [0, 1, 2, 1, 2, 1, 2, 3]
    model(x, order)
    assert copies_ahead(sim, model, x, order) == len(order)


def test_passes_of_several_kinds_are_known_by_their_beginning(sim, make, x):
    model = make()
    x = x.to("sim:0")
    encode, decode = [0, 1, 2], [3, 4]
    for order in (encode, decode):
        model(x, order)
    for order in (encode, decode, decode, encode):
        assert copies_ahead(sim, model, x, order) == len(order)


def test_a_unit_that_is_guessed_wrongly_again_and_again_is_left_out(sim, make, x):
    model = make()
    x = x.to("sim:0")
    for _ in range(6):
        model(x, [0, 1])
        model(x, [0, 2])
    extra = copies_ahead(sim, model, x, [0, 1]) + copies_ahead(sim, model, x, [0, 2]) - 4
    assert extra == 0


def test_nothing_is_left_under_way_when_a_pass_ends_early(sim, make, x):
    model = make(prefetch_depth=3)
    model(x)
    model(x, [0, 1])
    assert not model.engine._prefetcher._ahead


def test_what_was_changed_after_it_set_out_sets_out_again(make, x):
    model = make(prefetch_depth=3)
    with torch.no_grad(), model.engine.whole_pass():
        with model.groups[0].call():  # now the next three are under way
            pass
        wanted = []
        for block in model.blocks[1:]:
            model.engine.settle()
            block.up.weight.mul_(2)
            block.down.bias.data = torch.ones(WIDTH)
            wanted.append(block.up.weight.clone())
        for group, block, weight in zip(model.groups[1:], model.blocks[1:], wanted, strict=True):
            with group.call():
                assert torch.equal(block.up.weight.cpu(), weight)
                assert bool((block.down.bias.cpu() == 1).all())


# ---------------------------------------------------------------------- streams and threads


def test_a_call_on_another_stream_waits_for_the_weights(sim, make, x):
    model = make(prefetch_depth=2)
    wanted = model.plain(x)
    for _ in range(3):
        side = torch.sim.Stream(0)
        side.wait_stream(torch.sim.current_stream(0))
        with torch.sim.stream(side):
            got = model(x)
        torch.sim.current_stream(0).wait_stream(side)
        assert same(got, wanted)


@pytest.mark.parametrize("mode", ["lazy", "thread"])
@pytest.mark.parametrize("streams", [False, True], ids=["one stream", "a stream each"])
def test_threads_share_a_model(sim, make, mode, streams):
    machine(sim, mode)
    model = make(prefetch_depth=1)
    inputs = [torch.randn(2, WIDTH) for _ in range(4)]
    wanted = [model.plain(i) for i in inputs]
    failures = []

    def work(index):
        stream = torch.sim.Stream(0) if streams else torch.sim.default_stream(0)
        try:
            for _ in range(8):
                with torch.sim.stream(stream):
                    got = model(inputs[index], whole=bool(index % 2))
                    good = torch.allclose(got.cpu(), wanted[index], atol=1e-5)
                assert good
        except BaseException as error:  # noqa: BLE001 - handed to the test's thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert all(p.device.type == "cpu" for b in model.blocks for p in b.parameters())
    assert not model.engine.resident


def test_two_models_share_a_device(sim, make, x):
    first, second = make(make_blocks(4, seed=1)), make(make_blocks(4, seed=2))
    wanted = first.plain(x), second.plain(x)
    for _ in range(3):
        got = first(x), second(x)
        assert all(same(g, w) for g, w in zip(got, wanted, strict=True))


def test_an_output_that_is_a_weight_outlives_its_visit(sim, make):
    class Table(torch.nn.Module):
        def __init__(self, value):
            super().__init__()
            self.table = torch.nn.Parameter(torch.full((4, 4), float(value)))

        def forward(self, x):
            self.kept = self.table[:2]  # a view of the weight, as position embeddings give
            return x

    model = make([Table(i) for i in range(6)], prefetch_depth=2)
    for _ in range(2):
        model(torch.ones(1))
    for i, block in enumerate(model.blocks):
        assert bool((block.kept.cpu() == i).all())


def test_an_exception_in_the_middle_spoils_nothing(sim, x):
    class Fails(Block):
        fail = False

        def forward(self, x):
            if self.fail:
                raise KeyError("in the middle")
            return super().forward(x)

    torch.manual_seed(0)
    for mode in ("lazy", "thread"):
        machine(sim, mode)
        model = Offloaded([Fails() for _ in range(5)], prefetch_depth=2)
        wanted = model.plain(x)
        for at in (0, 2, 4):
            model.blocks[at].fail = True
            with pytest.raises(KeyError, match="in the middle"):
                model(x)
            model.blocks[at].fail = False
            assert same(model(x), wanted)
        model.engine.close()


# ---------------------------------------------------------------------- missing waits are seen


def without(monkeypatch, which):
    """Take one kind of wait out of the engine."""
    from anydevice.transfer.queue import DeviceQueue
    from anydevice.transfer.residency import Residency

    wait = DeviceQueue.wait
    if which == "arrival":
        monkeypatch.setattr(Residency, "arrive", lambda self: self.wait_queued())
    elif which == "reuse":

        def forget(self, stream, event):
            if stream is not self.copy_stream:
                wait(self, stream, event)

        monkeypatch.setattr(DeviceQueue, "wait", forget)
    elif which == "chunk":
        monkeypatch.setattr(
            "anydevice_conformance.simulator.backend.SimulatorBackend.synchronize_event",
            lambda self, event: None,
        )


@pytest.mark.parametrize("missing", ["nothing", "arrival", "reuse", "chunk"])
def test_a_missing_wait_is_seen(sim, make, x, monkeypatch, missing):
    monkeypatch.setattr("anydevice.transfer.staging._CHUNKS", 1)
    without(monkeypatch, missing)
    right = [True]
    for seed in range(12):
        if not all(right):
            break  # seen
        sim.configure(devices=1, memory="64MiB", mode="random", seed=seed)
        model = make(prefetch_depth=1, pin_budget=0 if missing == "chunk" else None)
        outputs = [model(x) for _ in range(3)]
        right += [same(got, model.plain(x)) for got in outputs]
    assert all(right) is (missing == "nothing")


@pytest.mark.parametrize("waits", [True, False])
def test_memory_that_was_just_freed_is_not_written_to_while_it_is_read(
    sim, make, x, monkeypatch, waits
):
    if not waits:
        without(monkeypatch, "reuse")
    right = []
    for seed in range(12):
        sim.configure(devices=1, memory="64MiB", mode="random", seed=seed)
        model, inputs = make(make_blocks(1)), x.to("sim:0")
        model(inputs)
        nbytes = model.engine._prefetcher.engine(model.device).pool.total
        model.engine.close()
        torch.sim.empty_cache()
        torch.sim.synchronize(0)
        before = torch.ones(nbytes // 4, device="sim:0")
        after = before
        for _ in range(4):
            after = after * before
        del before  # the group's buffer takes its memory
        model(inputs)
        right.append(bool((after.cpu() == 1).all()))
    assert all(right) is waits


@pytest.mark.parametrize("waits", [True, False])
def test_memory_that_is_given_back_is_not_written_to_any_more(sim, make, x, monkeypatch, waits):
    from anydevice.transfer.queue import DeviceQueue

    wait = DeviceQueue.wait

    def forget(self, stream, event):
        if stream is self.copy_stream:
            wait(self, stream, event)

    right = []
    for seed in range(12):
        sim.configure(devices=1, memory="64MiB", mode="random", seed=seed)
        model = make(make_blocks(3), prefetch_depth=2)
        model(x.to("sim:0"))
        with torch.no_grad(), model.groups[0].call():
            pass
        assert model.engine._prefetcher._ahead
        sizes = [s.buffer.nbytes for s in model.engine._prefetcher._ahead.values()]
        with monkeypatch.context() as patch:
            if not waits:
                patch.setattr(DeviceQueue, "wait", forget)
            model.engine.close()  # what is under way writes to memory that is free now
            others = [torch.full((n // 4,), 7.0, device="sim:0") for n in sizes * 2]
        torch.sim.synchronize(0)
        right += [bool((t.cpu() == 7).all()) for t in others]
    assert all(right) is waits
