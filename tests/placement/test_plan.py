"""Plans of single situations: each pins a decision that the laws leave open, or a user's fault."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from anydevice.errors import DoesNotFitError
from anydevice.placement import get_balanced_memory, infer_auto_device_map
from anydevice.ties import Ties


def linears(*widths: int) -> nn.Sequential:
    """Modules of ``width`` bytes each."""
    model = nn.Sequential()
    for i, width in enumerate(widths):
        part = nn.Module()
        part.w = nn.Parameter(torch.zeros(width, dtype=torch.int8), requires_grad=False)
        model.add_module(f"{'abcdefghijkl'[i]}", part)
    return model


def where(widths: list[int], budgets: dict[Any, int], **options: Any) -> list[Any]:
    plan = infer_auto_device_map(linears(*widths), budgets, clean_result=False, **options)
    return list(plan.values())


def test_a_first_block_too_large_for_one_device_leaves_none_empty() -> None:
    assert where([256, *[16] * 6], {0: 200, 1: 300, "cpu": 10**6}) == [1, 1, 1, 0, 0, 0, 0]
    assert where([256, *[16] * 6], {0: 200, "cpu": 10**6}) == ["cpu", *[0] * 6]
    assert where([16, 256, *[16] * 5], {0: 200, "cpu": 10**6}) == [0, "cpu", *[0] * 5]


def test_devices_are_used_in_another_order_where_only_that_holds_everything() -> None:
    assert where([100, 100, 50], {0: 150, 1: 100}) == [1, 0, 0]


def test_a_run_ends_when_its_device_is_full() -> None:
    widths, budgets = [50, 50, 30, 5], {0: 120, "cpu": 10**6}
    assert where(widths, budgets, prefetch=False) == [0, "cpu", "cpu", "cpu"]
    back = where(widths, budgets, prefetch=False, fallback_allocation=True)
    assert back == [0, "cpu", "cpu", 0]


def test_room_is_for_two_blocks_where_that_costs_little_else_for_one_layer() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = linears(60, 40)

    model = nn.Sequential(*[Block() for _ in range(20)])

    def shape(budget: int) -> tuple[int, bool, int, int]:
        plan = infer_auto_device_map(model, {0: budget, "cpu": 10**6})
        return plan.ahead, plan.whole, plan.share_of(0).reserve, plan.bytes_on(0)  # type: ignore[union-attr]

    assert shape(1000) == (2, True, 200, 800)
    assert shape(250) == (1, True, 60, 160)
    assert shape(170) == (1, False, 60, 100)
    assert shape(1500) == (1, True, 100, 1400)  # little is offloaded: no buffer is worth it
    assert shape(2000) == (0, True, 0, 2000)


def test_when_nothing_can_rest_on_the_accelerator_it_still_runs_everything() -> None:
    plan = infer_auto_device_map(linears(50, 50, 50), {0: 60, "cpu": 10**6})
    assert plan == {"": "cpu"}
    assert plan.main_device == 0
    assert plan.reserve == {0: 50}


def test_the_host_keeps_room_for_what_comes_from_the_disk() -> None:
    plan = infer_auto_device_map(linears(50, 50, 50, 50), {"cpu": 170})
    assert plan.bytes_on("cpu") == 100
    assert plan.reserve == {"cpu": 50}


def test_a_tied_head_goes_with_its_embedding() -> None:
    model = nn.Module()
    model.emb, model.body, model.head = nn.Embedding(10, 8), linears(300, 300), nn.Linear(8, 10)
    model.head.weight = model.emb.weight
    plan = infer_auto_device_map(model, {0: 700, 1: 400})
    assert plan == {"emb": 0, "body.a": 0, "body.b": 1, "head": 0}
    assert [plan.bytes_on(d) for d in (0, 1)] == [320 + 40 + 300, 300]
    assert "head (360 B): tied to emb" in plan.explain()


def test_a_small_tie_does_not_pull_blocks_together_and_counts_on_each_device() -> None:
    model = linears(100, 100)
    bias = nn.Parameter(torch.zeros(10, dtype=torch.int8), requires_grad=False)
    model.a.bias = model.b.bias = bias
    plan = infer_auto_device_map(model, {0: 110, 1: 110})
    assert [plan.bytes_on(d) for d in (0, 1)] == [110, 110]


def test_a_tied_group_that_nothing_can_hold_is_not_formed() -> None:
    model = nn.Module()
    model.emb, model.head = nn.Embedding(10, 8), nn.Linear(8, 10)
    model.head.weight = model.emb.weight
    plan = infer_auto_device_map(model, {0: 330, "cpu": 10**4})
    assert plan["emb"] == 0


def test_buffers_of_offloaded_modules_live_on_the_executing_device() -> None:
    model = linears(50, 50, 50)
    model.c.register_buffer("steps", torch.zeros(30, dtype=torch.int8))
    budgets = {0: 140, "cpu": 10**4}
    stay = infer_auto_device_map(model, budgets, prefetch=False)
    assert (stay.bytes_on(0), stay.bytes_on("cpu")) == (80, 100)
    go = infer_auto_device_map(model, budgets, prefetch=False, offload_buffers=True)
    assert (go.bytes_on(0), go.bytes_on("cpu")) == (50, 130)


def test_buffers_that_fit_nowhere_are_offloaded_and_that_is_said() -> None:
    model = linears(50, 50)
    model.b.register_buffer("cache", torch.zeros(500, dtype=torch.int8))
    with pytest.warns(UserWarning, match="buffers of offloaded modules of Sequential do not fit"):
        plan = infer_auto_device_map(model, {0: 120, "cpu": 10**4})
    assert plan.offload_buffers
    assert plan.bytes_on(0) == 50


def test_special_dtypes_change_the_plan() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    assert infer_auto_device_map(model, {0: 256}, dtype="float16") == {"": 0}
    special = {"1.weight": "float32"}
    with pytest.raises(DoesNotFitError, match="384 B are left over"):
        infer_auto_device_map(model, {0: 383}, None, "float16", special, disk=False, prefetch=False)
    assert infer_auto_device_map(model, {0: 384}, None, "float16", special) == {"": 0}


def test_names_are_grouped_or_not() -> None:
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(2))
    model.fc, model.act = nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Dropout())
    assert infer_auto_device_map(model, {"cpu": 999}) == {"": "cpu"}
    one_by_one = infer_auto_device_map(model, {"cpu": 999}, clean_result=False)
    assert one_by_one == {"w": "cpu", "fc": "cpu", "act.0": "cpu", "act.1": "cpu"}


def test_models_without_a_byte() -> None:
    assert infer_auto_device_map(nn.Identity(), {0: 0, 1: 5, "cpu": 5}) == {"": 1}
    assert infer_auto_device_map(nn.Sequential(nn.ReLU(), nn.ReLU()), {"cpu": 5}) == {"": "cpu"}


def test_devices_of_another_machine_keep_their_spelling() -> None:
    model = linears(50, 50)
    assert infer_auto_device_map(model, {"npu:1": 50, "npu:0": 50}) == {"a": "npu:0", "b": "npu:1"}
    assert infer_auto_device_map(model, {torch.device("cuda", 0): 100}) == {"": "cuda:0"}


def test_balanced_budgets_are_the_lowest_equal_ones_and_the_last_keeps_its_own() -> None:
    model = linears(*[10] * 12)
    mine = {0: 100, 1: "100B", 2: 100, "cpu": 999}
    assert get_balanced_memory(model, mine) == {0: 40, 1: 40, 2: 100, "cpu": 999}
    assert mine[1] == "100B"
    assert get_balanced_memory(model, mine, low_zero=True) == {0: 0, 1: 60, 2: 100, "cpu": 999}
    assert get_balanced_memory(model, {0: 50, 1: 50}) == {0: 50, 1: 50}
    assert get_balanced_memory(model, {"cpu": 50}) == {"cpu": 50}


def test_a_plan_reads_every_tensor_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning is linear in the number of modules: nothing asks a module for all below it."""
    with torch.device("meta"):
        model = nn.ModuleList(
            [nn.ModuleList([linears(1, 1) for _ in range(100)]) for _ in range(5)]
        )
    read = []
    number = Ties.number
    monkeypatch.setattr(Ties, "number", lambda ties, t: read.append(1) or number(ties, t))
    for name in ("named_parameters", "named_buffers", "named_modules", "modules", "state_dict"):
        monkeypatch.setattr(nn.Module, name, None)
    infer_auto_device_map(model, {0: 300, 1: 300, "cpu": 300}, no_split_module_classes=[])
    assert len(read) == 1000
