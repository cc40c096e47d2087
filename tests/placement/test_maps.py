"""Device maps: read, checked, resolved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from anydevice.devices import CPU, DISK, Device
from anydevice.errors import DeviceMapError, UnknownDeviceError
from anydevice.placement import (
    DeviceMap,
    Placement,
    PlacementOptions,
    check_device_map,
    infer_auto_device_map,
    resolve_device_map,
)


def sequence(n: int = 12) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(n)])  # 288 B each


def test_the_longest_prefix_wins() -> None:
    found = DeviceMap({"": "disk", "h": "cpu", "h.1.fc": 0, "h.10": 1})
    assert found.lookup("h.1.fc.weight") == Device(found.lookup("h.1.fc").type, 0)
    assert [found.lookup(n) for n in ("h.1", "h.1.fcx", "hx", "w")] == [CPU, CPU, DISK, DISK]
    assert found.lookup("h.10.w").index == 1
    assert found.key_of("h.1.fc.weight") == "h.1.fc"
    assert [str(d) for d in found.devices][:2] == ["disk", "cpu"]
    assert found.main_device.index == 0
    assert list(found.entries()) == ["", "h", "h.1.fc", "h.10"]


def test_a_name_without_a_device() -> None:
    with pytest.raises(DeviceMapError, match=r"no device for 'b\.weight'; it names 'a'"):
        DeviceMap({"a": 0}).lookup("b.weight")


@pytest.mark.parametrize(
    ("device_map", "error", "words"),
    [
        ({"a": "qpu:0"}, UnknownDeviceError, r"device_map\['a'\]: 'qpu:0'"),
        ({"a": None}, UnknownDeviceError, r"device_map\['a'\]: None"),
        ({0: "cpu"}, DeviceMapError, "has the key 0"),
        (["cpu"], DeviceMapError, "must be a dict"),
    ],
)
def test_maps_that_cannot_be_read(device_map: Any, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        DeviceMap(device_map)


def test_missing_parameters_are_listed_and_counted() -> None:
    words = r"no device for '2.weight', .*'4.weight' and 15 more of Sequential"
    with pytest.raises(DeviceMapError, match=words):
        check_device_map(sequence(), {"0": 0, "1": "cpu"})
    with pytest.raises(DeviceMapError, match="names 'layers', which match nothing"):
        check_device_map(sequence(), {"layers": 0})


def test_a_buffer_needs_a_place_too() -> None:
    model = nn.BatchNorm1d(2)
    with pytest.raises(DeviceMapError, match="running_var"):
        check_device_map(model, {n: 0 for n in model.state_dict() if n != "running_var"})


def test_names_that_match_nothing_are_said() -> None:
    with pytest.warns(UserWarning, match="names 'gone', which match nothing in Sequential"):
        check_device_map(sequence(), {"": 0, "gone": "cpu"})


def test_modules_without_weights_and_empty_slots_may_be_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU())
    check_device_map(model, {"0.weight": 0, "0.bias": 0, "1": "cpu", "": 0})


# ---------------------------------------------------------------------- resolve


@pytest.mark.parametrize("device", ["cpu", "disk", 0, "0", "meta", torch.device("cpu")])
def test_a_single_device(device: Any) -> None:
    placement = resolve_device_map(sequence(2), device)
    assert placement == {"": device if isinstance(device, (int, str)) else "cpu"}
    assert placement.bytes_on(device) == 576


def test_a_word_that_is_neither_strategy_nor_device() -> None:
    with pytest.raises(UnknownDeviceError, match="neither a device nor one of 'auto', 'balanced'"):
        resolve_device_map(sequence(), "fastest")


def test_a_placement_is_taken_as_it_is_and_a_dict_is_accounted_for() -> None:
    model = sequence(4)
    model.register_buffer("mask", torch.zeros(5))
    plan = infer_auto_device_map(model, {0: 900, "cpu": 10_000})
    assert resolve_device_map(model, plan) is plan
    mine = {"0": 0, "1": "cpu", "2": "disk", "3": 0, "mask": "cpu"}
    placement = resolve_device_map(model, mine)
    assert isinstance(placement, Placement)
    assert placement == mine
    assert [placement.bytes_on(d) for d in (0, "cpu", "disk", 1)] == [596, 288, 288, 0]
    assert placement.main_device == 0
    assert (
        resolve_device_map(model, mine, PlacementOptions(offload_buffers=True)).bytes_on("cpu")
        == 308
    )
    assert (
        resolve_device_map(model, mine, PlacementOptions(dtype="float16")).bytes_on("disk") == 144
    )
    with pytest.raises(DeviceMapError, match=r"'3\.weight'"):
        resolve_device_map(model, {k: v for k, v in mine.items() if k != "3"})


def bytes_by_device(strategy: str, budgets: dict[Any, int]) -> list[int]:
    placement = resolve_device_map(sequence(), strategy, PlacementOptions(budgets))
    return [placement.bytes_on(key) // 288 for key in budgets]


def test_strategies() -> None:
    budgets = {0: 288 * 10, 1: 288 * 10, 2: 288 * 10, "cpu": 10**6}
    assert bytes_by_device("auto", budgets) == [4, 4, 4, 0]
    assert bytes_by_device("balanced", budgets) == [4, 4, 4, 0]
    assert bytes_by_device("balanced_low_0", budgets) == [0, 6, 6, 0]
    assert bytes_by_device("sequential", budgets) == [10, 2, 0, 0]
    tight = {0: 288 * 2, 1: 288 * 9, 2: 288 * 9, "cpu": 10**6}
    assert bytes_by_device("balanced", tight) == [2, 5, 5, 0]
    small = {0: 288 * 4, 1: 288 * 4, "cpu": 10**6}
    assert bytes_by_device("auto", small) == [3, 4, 5]
    assert bytes_by_device("balanced_low_0", {0: 288 * 9, 1: 288 * 7, "cpu": 0}) == [5, 7, 0]


def test_options_reach_the_planner() -> None:
    placement = resolve_device_map(
        sequence(), "auto", PlacementOptions({0: 288 * 12}, headroom=288)
    )
    assert placement.bytes_on("disk") > 0


def test_the_main_device_is_the_first_accelerator_of_the_map() -> None:
    some = {"a": "cpu", "b": "disk", "c": "npu:1", "d": "npu:0"}
    assert DeviceMap(some).main_device == Device("npu", 1)
    assert DeviceMap({"a": "cpu", "b": "disk"}).main_device == CPU
