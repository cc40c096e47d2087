"""Each missing synchronisation is seen, and each right one is clean.

A case runs a pattern with or without its wait and says whether the result was right. In mode
``random`` a single order may happen to be harmless, so a fault must show for one of some seeds; in
mode ``thread``, where time is real, for one of some runs.
"""

import pytest
import torch

SIZE = 1 << 16  # floats: 256 KiB, a quarter of a second at 1 MB/s
SEEDS = range(12)
SLOW = {"h2d": 1, "d2h": 1}  # MB/s: in mode "thread" a copy outlasts whatever the host does next
SLOW_KERNELS = {"kernel": 100_000}  # microseconds


def values():
    return torch.arange(SIZE, dtype=torch.float32)


def copy_in_then_use(wait):
    pinned, side = values().pin_memory(), torch.sim.Stream(0)
    with side:
        a = pinned.to("sim:0", non_blocking=True)
    if wait:
        torch.sim.current_stream(0).wait_stream(side)
    return torch.equal((a * 1).cpu(), values())


def copy_in_then_use_by_event(wait):
    pinned, side, event = values().pin_memory(), torch.sim.Stream(0), torch.sim.Event()
    with side:
        a = pinned.to("sim:0", non_blocking=True)
        if wait:
            event.record(side)
    torch.sim.current_stream(0).wait_event(event)
    return torch.equal((a * 1).cpu(), values())


def copy_out_then_read(wait):
    a, out = torch.ones(SIZE, device="sim:0"), torch.zeros(SIZE, pin_memory=True)
    torch.sim.synchronize(0)
    out.copy_(a, non_blocking=True)
    if wait:
        torch.sim.current_stream(0).synchronize()
    right = bool((out == 1).all())
    torch.sim.synchronize(0)
    return right


def overwrite_a_pinned_source(wait):
    pinned = values().pin_memory()
    a = pinned.to("sim:0", non_blocking=True)
    if wait:
        torch.sim.synchronize(0)
    pinned.fill_(-1)
    return torch.equal(a.cpu(), values())


def free_under_a_side_stream(wait):
    side, main = torch.sim.Stream(0), torch.sim.current_stream(0)
    a = torch.ones(SIZE, device="sim:0")
    side.wait_stream(main)
    with side:
        torch.empty(SIZE, pin_memory=True).to("sim:0", non_blocking=True)  # keeps it busy
        b = a * 2
    if wait:
        a.record_stream(side)
    del a
    torch.full((SIZE,), 7.0, device="sim:0").cpu()  # takes its memory, on the main stream
    main.wait_stream(side)
    return bool((b.cpu() == 2).all())


def copy_out_before_the_kernel(wait):
    side, main = torch.sim.Stream(0), torch.sim.current_stream(0)
    a, out = torch.ones(SIZE, device="sim:0"), torch.zeros(SIZE, pin_memory=True)
    torch.sim.synchronize(0)
    for _ in range(4):
        a = a + 1
    with side:
        if wait:
            side.wait_stream(main)
        out.copy_(a, non_blocking=True)
    side.synchronize()
    right = bool((out == 5).all())
    torch.sim.synchronize(0)
    return right


CASES = [
    (copy_in_then_use, SLOW),
    (copy_in_then_use_by_event, SLOW),
    (copy_out_then_read, SLOW),
    (overwrite_a_pinned_source, SLOW),
    (free_under_a_side_stream, SLOW),
    (copy_out_before_the_kernel, SLOW_KERNELS),
]
each_case = pytest.mark.parametrize(
    ("case", "pace"), CASES, ids=lambda v: getattr(v, "__name__", "")
)


def outcomes(simulator, mode, case, pace, *, wait):
    """Whether the case was right, for each order of work that the mode has."""
    results = []
    for seed in SEEDS if mode == "random" else [0]:
        simulator.configure(mode=mode, seed=seed, **(pace if mode == "thread" else {}))
        results.append(case(wait))
    return results


@each_case
@pytest.mark.parametrize("mode", ["lazy", "thread", "random"])
def test_a_missing_wait_is_seen(simulator, mode, case, pace):
    # In mode "thread" a host that stands still for as long as the work takes sees nothing amiss.
    runs = 6 if mode == "thread" else 1
    assert any(not all(outcomes(simulator, mode, case, pace, wait=False)) for _ in range(runs))


@each_case
@pytest.mark.parametrize("mode", ["sync", "lazy", "thread", "random"])
def test_the_right_wait_is_clean(simulator, mode, case, pace):
    assert all(outcomes(simulator, mode, case, pace, wait=True))


@each_case
def test_a_random_order_is_the_same_for_the_same_seed(simulator, case, pace):
    first = outcomes(simulator, "random", case, pace, wait=False)
    assert outcomes(simulator, "random", case, pace, wait=False) == first


def test_a_pageable_source_is_staged(machine):
    source = values()
    a = source.to("sim:0", non_blocking=True)
    source.fill_(-1)
    assert torch.equal(a.cpu(), values())


def test_a_copy_between_devices_is_ordered_on_both(machine):
    a = values().to("sim:0")
    b = a * 3
    c = b.to("sim:1", non_blocking=True)
    del a, b
    torch.zeros(SIZE, device="sim:0")
    assert torch.equal((c * 1).cpu(), values() * 3)


def test_an_error_of_a_queued_kernel_is_raised_at_the_next_wait(simulator):
    weight = torch.randn(4, 4, device="sim:0")
    torch.nn.functional.embedding(torch.tensor([99], device="sim:0"), weight)
    with pytest.raises(IndexError, match="index out of range"):
        torch.sim.synchronize(0)
    torch.sim.synchronize(0)


def test_kernels_can_be_made_synchronous(simulator):
    simulator.configure(async_kernels=False)
    weight = torch.randn(4, 4, device="sim:0")
    with pytest.raises(IndexError, match="index out of range"):
        torch.nn.functional.embedding(torch.tensor([99], device="sim:0"), weight)
