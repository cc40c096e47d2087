"""Nested data on its way to a device."""

from __future__ import annotations

import collections

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from anydevice.errors import ModelError
from anydevice.modules import set_module_tensor_to_device
from anydevice.tensors import send_to_device


class Tagged(list):
    tag = None


class Pair(tuple):
    def __new__(cls, first, second):
        return super().__new__(cls, (first, second))


class Point(collections.namedtuple("Point", "x y")):
    def __new__(cls, x):
        return super().__new__(cls, x, 0)


def test_a_packed_sequence_keeps_its_lengths_on_the_host(sim):
    packed = pack_sequence([torch.rand(3, 2), torch.rand(1, 2)])
    sent = send_to_device({"x": packed}, 0)["x"]
    assert sent.data.device == torch.device("sim:0")
    assert sent.batch_sizes.device == torch.device("cpu")
    assert send_to_device(packed, "cpu") is packed
    lstm = torch.nn.LSTM(2, 4).to("sim:0")
    assert lstm(sent)[0].data.device == torch.device("sim:0")


def test_subclasses_of_lists_and_tuples_are_rebuilt(sim):
    x = torch.ones(2)
    tagged = Tagged([x])
    tagged.tag = "mine"
    pair = Pair(x, 1)
    pair.note = "kept"
    for data in (tagged, pair, Point(x), x.expand(2, 2).max(0), collections.deque([x], 3)):
        sent = send_to_device(data, 0)
        assert type(sent) is type(data)
        assert sent[0].device == torch.device("sim:0")
        assert len(sent) == len(data)
        assert getattr(sent, "__dict__", None) == getattr(data, "__dict__", None)


def test_meta_is_a_place_to_send_to():
    assert send_to_device([torch.ones(2)], "meta")[0].is_meta
    layer = torch.nn.Linear(2, 2)
    weight = layer.weight
    set_module_tensor_to_device(layer, "weight", "meta")
    assert layer.weight is weight
    assert weight.is_meta
    set_module_tensor_to_device(layer, "weight", "cpu", value=torch.ones(2, 2))
    assert torch.equal(weight, torch.ones(2, 2))


def test_a_tensor_is_not_set_on_the_disk():
    with pytest.raises(ModelError, match="disk_offload"):
        set_module_tensor_to_device(torch.nn.Linear(2, 2), "weight", "disk")
