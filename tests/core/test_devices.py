"""One way to spell a device."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anydevice import registry
from anydevice.devices import CPU, DISK, META, Device, parse_device, resolve_device, same_devices
from anydevice.errors import UnknownDeviceError


@pytest.mark.parametrize(
    "spelling",
    [0, "0", " 0 ", "sim", "sim:0", Device("sim"), Device("sim", 0), np.int64(0), np.uint8(0)],
)
def test_every_spelling_of_the_first_accelerator(sim, spelling):
    assert parse_device(spelling) == Device("sim", 0)
    assert resolve_device(spelling) == Device("sim", 0)


def test_torch_devices(sim):
    assert parse_device(torch.device("sim", 1)) == Device("sim", 1)
    assert parse_device(torch.device("sim")) == Device("sim", 0)
    assert parse_device(torch.device("meta")) == META


@pytest.mark.parametrize("spelling", ["cpu", "cpu:0", torch.device("cpu"), torch.device("cpu", 0)])
def test_the_host_has_no_index(spelling):
    assert parse_device(spelling) == CPU
    assert str(parse_device(spelling)) == "cpu"


def test_disk_is_a_place_whose_weights_are_seen_from_the_host():
    assert parse_device("disk") == DISK
    assert DISK.torch == torch.device("cpu")
    assert not DISK.is_accelerator


def test_a_name_is_data_until_its_package_is_loaded():
    device = parse_device("npu:3")
    assert (device.type, device.index, str(device)) == ("npu", 3, "npu:3")
    assert device.is_accelerator


@pytest.mark.parametrize(
    "spelling",
    [
        "",
        ":",
        "sim:",
        ":0",
        "sim:-1",
        "sim:a",
        "sim:0:1",
        "nope",
        "nope:0",
        "CPU",
        -1,
        "-1",
        1.0,
        True,
        False,
        None,
        [],
        (0,),
        b"cpu",
        np.bool_(True),
        np.float32(0),
        object,
    ],
)
def test_what_is_no_device_is_said_so(spelling):
    with pytest.raises(UnknownDeviceError) as caught:
        parse_device(spelling)
    assert repr(spelling) in str(caught.value) or str(spelling) in str(caught.value)


def test_a_device_that_is_not_here_is_named_with_those_that_are(sim):
    for spelling in (2, "sim:2", "cuda:0", torch.device("sim", 7)):
        with pytest.raises(UnknownDeviceError, match=r"sim:0, sim:1, cpu, disk"):
            resolve_device(spelling)


def test_a_bare_index_without_an_accelerator_can_be_planned_with_but_not_used(monkeypatch):
    monkeypatch.setattr(registry, "primary_type", lambda: None)
    assert parse_device(1) == Device("accelerator", 1)
    assert parse_device("accelerator:1") == Device("accelerator", 1)
    with pytest.raises(UnknownDeviceError, match="no device 1: this machine has no accelerator"):
        resolve_device(1)


def test_one_device_under_two_spellings_is_refused(sim):
    assert same_devices({0: "a", "cpu": "b"}, "max_memory") == {Device("sim", 0): "a", CPU: "b"}
    with pytest.raises(UnknownDeviceError, match=r"max_memory names sim:0 twice.*'sim:0'"):
        same_devices({0: "a", "sim:0": "b"}, "max_memory")


@given(kind=st.sampled_from(["cpu", "disk", "meta", "cuda", "npu"]), index=st.integers(0, 99))
def test_a_spelling_read_from_its_own_text_is_the_same(kind, index):
    device = parse_device(f"{kind}:{index}")
    assert parse_device(str(device)) == device
    assert parse_device(device) == device
