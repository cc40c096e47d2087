"""A placement as data, as text and as a picture."""

from __future__ import annotations

import copy
import json
import pickle
import re
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from anydevice.errors import UnknownDeviceError
from anydevice.placement import Placement, infer_auto_device_map, resolve_device_map


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(100, 16)
        self.layers = nn.ModuleList([Block() for _ in range(8)])
        self.head = nn.Linear(16, 100, bias=False)
        self.head.weight = self.emb.weight


@pytest.fixture
def placement() -> Placement:
    with torch.device("meta"):
        model = Model()
        model.head.weight = model.emb.weight
    budgets = {0: "42KB", "1": "20KB", "cpu": "18KB"}
    return infer_auto_device_map(model, budgets, no_split_module_classes=["Block"])


def test_it_is_a_dict_that_survives_json_pickle_and_copies(placement: Placement) -> None:
    assert isinstance(placement, dict)
    assert json.loads(json.dumps(placement)) == placement
    for same in (pickle.loads(pickle.dumps(placement)), copy.deepcopy(placement)):
        assert type(same) is Placement
        assert same == placement
        assert (same.table(), same.reserve, same.blocks) == (
            placement.table(),
            placement.reserve,
            placement.blocks,
        )
    assert type(dict(placement)) is dict


def test_keys_keep_their_spelling_and_bytes_are_found_by_any(placement: Placement) -> None:
    assert list(dict.fromkeys(placement.values())) == [0, "1", "cpu", "disk"]
    assert placement.bytes_on(1) == placement.bytes_on("1") == 17024
    assert placement.bytes_on("cpu:0") == placement.bytes_on(torch.device("cpu")) == 17024 - 8512
    assert placement.bytes_on(7) == 0
    with pytest.raises(UnknownDeviceError):
        placement.bytes_on("qpu")
    assert placement.budgets == {0: 42_000, "1": 20_000, "cpu": 18_000, "disk": None}


def test_the_table_adds_up(placement: Placement) -> None:
    lines = placement.table().splitlines()
    assert lines[0].split() == [
        "DEVICE",
        "BLOCKS",
        "WEIGHTS",
        "RESERVED",
        "FREE",
        "BUDGET",
        "HOLDS",
    ]
    assert [line.split()[0] for line in lines[1:]] == ["0", "1", "cpu", "disk"]
    assert sum(int(line.split()[1]) for line in lines[1:]) == 10
    assert "no limit" in lines[-1]


def test_every_block_is_explained(placement: Placement) -> None:
    text = placement.explain()
    assert text.startswith("Model: ")
    assert "filled in execution order" in text
    assert "tied to emb: the shared weight is stored once" in text
    assert re.search(r"1: layers\.\d ... layers\.\d \(.*\): 0 has .* left of .*", text)
    assert re.search(r"cpu has .* left of", text)
    assert "0 runs offloaded blocks" in text
    assert "reserved" in text


def test_other_reasons() -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU(), nn.Linear(8, 8, bias=False))
    text = infer_auto_device_map(model, {0: 1000, "cpu": 10**6}).explain()
    assert "larger than any accelerator; runs on cpu" in text
    assert "has no weights; goes with its neighbour" in text
    assert "1 blocks too large for any accelerator run on the host" in text
    text = infer_auto_device_map(model, {0: 16400, "cpu": 10**6}, prefetch=False).explain()
    assert "16 KiB does not fit 0: 16 KiB are reserved for offloaded blocks" in text
    assert "as the device map says" in resolve_device_map(model, {"": 0}).explain()


def test_the_picture_is_whole_and_to_scale(placement: Placement) -> None:
    svg = placement.to_svg()
    root = ElementTree.fromstring(svg)
    assert root.tag.endswith("svg")
    assert "prefers-color-scheme:dark" in svg
    assert not re.search(r'(href|src|url)\s*[=(]\s*["\']?https?:', svg)
    tips = [t.text or "" for t in root.iter("{http://www.w3.org/2000/svg}title")]
    drawn = {tip.split(" ")[0] for tip in tips}
    assert drawn >= {"emb", *(f"layers.{i}" for i in range(8))}
    bars = [r for r in root.iter("{http://www.w3.org/2000/svg}rect") if r.get("class") == "b"]
    first, second = (float(bar.get("width", 0)) for bar in bars[:2])
    assert second / first == pytest.approx(20 / 42, abs=0.01)
    assert placement._repr_svg_() == svg


def test_a_picture_of_very_many_blocks_stays_small() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3_000)])
    assert len(infer_auto_device_map(model, {0: "150KB", "cpu": "1GB"}).to_svg()) < 10_000


def test_names_are_escaped() -> None:
    model = nn.Module()
    model.add_module("a<b>&", nn.Linear(2, 2))
    assert "a&lt;b&gt;&amp;" in infer_auto_device_map(model, {0: 100}).to_svg()
