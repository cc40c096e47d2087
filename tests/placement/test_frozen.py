"""A placement is frozen; a changed one is another, with its own bytes."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
from torch import nn

from anydevice import infer_auto_device_map
from anydevice.errors import DeviceMapError, FrozenPlacementError
from anydevice.placement import Placement, resolve_device_map


def stack() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])


SIZE = (8 * 8 + 8) * 4


@pytest.fixture
def placement() -> Placement:
    return infer_auto_device_map(stack(), {0: 4 * SIZE, "cpu": 10 * SIZE, "disk": 10 * SIZE})


@pytest.mark.parametrize(
    "edit",
    [
        lambda p: p.__setitem__("1", "disk"),
        lambda p: p.__delitem__(""),
        lambda p: p.update({"1": "disk"}),
        lambda p: p.pop(""),
        lambda p: p.popitem(),
        lambda p: p.clear(),
        lambda p: p.setdefault("1", "disk"),
        lambda p: p.__ior__({"1": "disk"}),
        lambda p: setattr(p, "ahead", 2),
        lambda p: setattr(p, "anything", 2),
        lambda p: delattr(p, "blocks"),
    ],
)
def test_an_edit_is_refused_and_names_the_way(placement, edit):
    before = dict(placement)
    with pytest.raises(FrozenPlacementError, match=r"placement\.replace.*dict\(placement\)"):
        edit(placement)
    assert dict(placement) == before
    with pytest.raises(TypeError):
        edit(placement)


def test_what_it_knows_cannot_be_edited_either(placement):
    assert isinstance(placement.blocks, tuple)
    with pytest.raises(TypeError):
        placement.shares["cpu"] = None


def test_a_changed_one_has_its_own_bytes(placement):
    changed = placement.replace({"1": "disk", "3": "cpu"})
    assert [changed.bytes_on(d) for d in (0, "cpu", "disk")] == [2 * SIZE, SIZE, SIZE]
    assert dict(changed) == {"0": 0, "1": "disk", "2": 0, "3": "cpu"}
    assert changed.main_device == 0
    assert changed.reserve[0] >= SIZE
    assert placement.bytes_on(0) == 4 * SIZE
    assert changed.replace({"": 0}).bytes_on(0) == 4 * SIZE
    assert "as the device map says" in changed.explain()


def test_a_block_is_not_divided_by_a_change(placement):
    with pytest.raises(DeviceMapError, match=r"'0\.weight' is no block.*\*\*placement"):
        placement.replace({"0.weight": "cpu"})


def test_copies_are_whole(placement):
    for same in (
        copy.deepcopy(placement),
        copy.copy(placement),
        pickle.loads(pickle.dumps(placement)),
    ):
        assert same == placement
        assert (same.blocks, dict(same.shares)) == (placement.blocks, dict(placement.shares))
    assert json.loads(json.dumps(placement)) == dict(placement)


def test_the_placement_of_another_model_is_counted_anew(placement):
    wide = nn.Sequential(*[nn.Linear(8, 16) for _ in range(4)])
    counted = resolve_device_map(wide, placement)
    assert counted.bytes_on(0) == sum(p.nbytes for p in wide.parameters())
    assert dict(counted) == dict(placement)
