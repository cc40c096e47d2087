"""Small budgets: blocks that were found are divided where that keeps more on the accelerator."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from anydevice import infer_auto_device_map


class Block(nn.Module):
    def __init__(self, layers: list[int]) -> None:
        super().__init__()
        for i, width in enumerate(layers):
            setattr(self, f"layer{i}", nn.Linear(width, 1, bias=False))


def greedy(sizes: list[int], budget: int) -> int:
    """Bytes that a plain fill by layers keeps, with a reserve for the largest layer."""
    if sum(sizes) <= budget:
        return sum(sizes)
    used = 0
    for size in sizes:
        if used + size > budget - max(sizes):
            break
        used += size
    return used


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 9), min_size=2, max_size=3), min_size=3, max_size=4),
    st.integers(0, 120),
    st.booleans(),
)
def test_never_fewer_bytes_than_a_greedy_fill_by_layers(widths, budget, prefetch):
    model = nn.Sequential(*[Block(layers) for layers in widths])
    sizes = [4 * width for layers in widths for width in layers]
    placement = infer_auto_device_map(model, {0: 4 * budget, "cpu": 10**6}, prefetch=prefetch)
    assert placement.bytes_on(0) >= greedy(sizes, 4 * budget)


@pytest.mark.parametrize("layers", range(13))
def test_prefetching_takes_nothing_from_small_devices(layers):
    model = nn.Sequential(*[Block([8, 8]) for _ in range(6)])
    placement = infer_auto_device_map(model, {0: 32 * layers, "cpu": 10**6})
    assert placement.bytes_on(0) >= greedy([32] * 12, 32 * layers)


def test_room_for_one_block_and_a_half():
    model = nn.Sequential(*[Block([8, 8]) for _ in range(3)])
    placement = infer_auto_device_map(model, {0: 3 * 32 - 1, "cpu": 10**6})
    assert placement.bytes_on(0) >= 32
