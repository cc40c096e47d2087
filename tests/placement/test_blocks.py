"""Blocks that must not be split, found and named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from anydevice.placement import DeviceMap, find_blocks, infer_auto_device_map


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(8, 4)
        self.layers = nn.ModuleList([Block(), Block()])


class Declares(Stack):
    _no_split_modules = ("Linear",)


def test_repeated_children_of_a_list_are_found() -> None:
    assert find_blocks(Stack()) == ["layers.0", "layers.1"]
    assert find_blocks(nn.Sequential(Block(), nn.ReLU(), Block())) == ["0", "2"]
    assert find_blocks(nn.Sequential(Block(), nn.ReLU())) == []


def test_the_outermost_of_nested_lists_counts() -> None:
    model = nn.ModuleList([Stack(), Stack()])
    assert find_blocks(model) == ["0", "1"]


def test_lists_of_lists_are_entered_where_there_is_more_inside() -> None:
    stages = nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block()))
    assert find_blocks(stages) == ["0.0", "0.1", "1.0", "1.1"]
    plain = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2)])
    assert find_blocks(plain) == ["0", "1"]


@pytest.mark.parametrize("declared", [["Block"], ("Block",), {"Block"}])
def test_what_the_model_declares_wins(declared: Any) -> None:
    model = Stack()
    model._no_split_modules = declared
    wrapped = nn.Sequential(model, Stack())
    assert find_blocks(wrapped) == ["0.layers.0", "0.layers.1", "1.layers.0", "1.layers.1"]


def test_a_submodel_declares_for_the_whole_and_other_parts_are_still_found() -> None:
    model = nn.Module()
    model.text = Declares()
    model.vision = nn.ModuleList([Block(), Block()])
    model.sound = nn.ModuleList([nn.MultiheadAttention(4, 1), nn.MultiheadAttention(4, 1)])
    assert find_blocks(model) == [
        *[f"text.layers.{i}.{n}" for i in (0, 1) for n in ("up", "down")],
        *[f"vision.{i}.{n}" for i in (0, 1) for n in ("up", "down")],
        "sound.0",
        "sound.1",
    ]


def test_a_declaration_of_nothing_here_leaves_the_rest_to_be_found() -> None:
    model = Stack()
    model._no_split_modules = ["Gone"]
    assert find_blocks(model) == ["layers.0", "layers.1"]
    model._no_split_modules = None
    assert find_blocks(model) == ["layers.0", "layers.1"]


def test_named_classes_are_all_there_is() -> None:
    assert find_blocks(Stack(), ["Stack"]) == [""]
    assert find_blocks(Stack(), "Block") == ["layers.0", "layers.1"]
    assert find_blocks(Stack(), []) == []


def test_modules_that_use_their_childrens_weights_uncalled_stay_whole() -> None:
    model = nn.Module()
    model.attn = nn.MultiheadAttention(4, 1)
    model.fc = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    assert find_blocks(model, []) == ["attn", "fc"]


def test_a_found_block_that_nothing_can_hold_is_divided_where_there_are_blocks_inside() -> None:
    with torch.device("meta"):
        halves = nn.ModuleList([nn.ModuleList([Block() for _ in range(6)]) for _ in range(2)])
        model = nn.ModuleList([_Half(half) for half in halves])
    one = sum(p.nbytes for p in Block().parameters())
    plan = infer_auto_device_map(model, {0: 4 * one, 1: 4 * one, 2: 4 * one})
    assert [DeviceMap(plan).lookup(f"{i // 6}.inner.{i % 6}").index for i in range(12)] == [
        *[0] * 4,
        *[1] * 4,
        *[2] * 4,
    ]


class _Half(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


def test_a_model_of_a_named_class_is_opened_where_there_are_blocks_inside() -> None:
    rows = [nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(4)]
    assert find_blocks(nn.Sequential(*rows), "Sequential") == ["0", "1", "2", "3"]
    assert find_blocks(rows[0], "Sequential") == [""]
    plan = infer_auto_device_map(
        nn.Sequential(*rows),
        {"cuda:0": 1500, "cuda:1": 2000, "cpu": 10**6},
        no_split_module_classes=["Sequential"],
    )
    assert set(plan.values()) == {"cuda:0", "cuda:1"}
