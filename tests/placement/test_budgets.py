"""Memory budgets: read and measured."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from anydevice import registry
from anydevice.backend import Capabilities, DeviceBackend, MemoryInfo
from anydevice.devices import CPU, Device
from anydevice.errors import BudgetError, DoesNotFitError, ModelError, UnknownDeviceError
from anydevice.placement import get_max_memory, infer_auto_device_map


def test_budgets_are_sorted_by_speed_keep_their_spelling_and_are_not_changed() -> None:
    mine = {"disk": "1TB", "cpu": "2KB", 1: 5, 0: "3B"}
    given = dict(mine)
    assert list(get_max_memory(mine).items()) == [(0, 3), (1, 5), ("cpu", 2000), ("disk", 10**12)]
    infer_auto_device_map(nn.Linear(2, 2), mine)
    assert mine == given


@pytest.mark.parametrize(
    ("budgets", "error", "words"),
    [
        ({0: "10 gigs"}, BudgetError, r"max_memory\[0\]: '10 gigs' is not a size"),
        ({0: 0, "cpu": "0GB"}, BudgetError, "0 bytes everywhere"),
        ({}, BudgetError, "names no device"),
        ({"cpu": 1, "cpu:0": 1}, BudgetError, "names cpu twice, as 'cpu' and as 'cpu:0'"),
        ({0: 1, "0": 1}, BudgetError, "twice, as 0 and as '0'"),
        ({"qpu:0": 1}, UnknownDeviceError, "'qpu:0'"),
        ({"meta": 1}, BudgetError, "meta"),
        ("10GB", BudgetError, "must be a dict"),
        ({"cpu": 10.5}, BudgetError, r"max_memory\['cpu'\]: 10.5 is not a size.*'10.5GiB'"),
        ({0: "1e400GB"}, BudgetError, r"max_memory\[0\]: '1e400GB' is not a size"),
        ({0: None}, BudgetError, r"max_memory\[0\]: None is not a size"),
    ],
)
def test_wrong_budgets_are_named_before_work(budgets: Any, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        infer_auto_device_map(nn.Linear(2, 2), budgets)


def test_headroom_is_left_on_accelerators() -> None:
    model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(4)])  # 256 B each
    budgets = {0: 1024, "cpu": 4096}
    assert infer_auto_device_map(model, budgets) == {"": 0}
    for headroom in (300, "300B", 0.3, {0: 300}):
        plan = infer_auto_device_map(model, budgets, headroom=headroom)
        assert plan.bytes_on(0) + plan.reserve[0] <= 724
        assert plan.budgets["cpu"] == 4096
    with pytest.raises(BudgetError, match="headroom: 'some' is not a size"):
        infer_auto_device_map(model, budgets, headroom="some")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"headroom": 1.5}, r"headroom: 1.5 is neither a share.*nor a size"),
        ({"headroom": 1.0}, "headroom: 1.0 is neither"),
        ({"headroom": -0.1}, "headroom: -0.1 is neither"),
        ({"headroom": float("nan")}, "headroom: nan is neither"),
        ({"headroom": True}, "headroom: True is not a size"),
        ({"headroom": {0: "1GiB", "cpu": 1.5}}, r"headroom\['cpu'\]: 1.5 is neither"),
        ({"headroom": {7: "some"}}, r"headroom\[7\]: 'some' is not a size"),
        ({"headroom": {0: 1, "0": 2}}, r"headroom names .*:0 twice; the second time as '0'"),
        (
            {"headroom": {0: "2KB", "cpu": "5KB"}},
            r"headroom=.* leaves 0 bytes everywhere of .*1024",
        ),
        ({"disk": None}, r"disk \(True, False, or a size\): None is not a size"),
        ({"disk": 1.5}, r"disk .*: 1.5 is not a size"),
        ({"disk": ""}, r"disk .*: '' is not a size"),
    ],
)
def test_wrong_headroom_and_disk_are_named(options: Any, words: str) -> None:
    with pytest.raises((BudgetError, UnknownDeviceError), match=words):
        infer_auto_device_map(nn.Linear(2, 2), {0: 1024, "cpu": 4096}, **options)


def test_numpys_numbers_are_numbers() -> None:
    budgets = {np.int64(0): np.int64(1024), "cpu": np.uint16(4096)}
    plan = infer_auto_device_map(nn.Linear(8, 8), budgets, headroom=np.float32(0.25))
    assert plan.budgets == {0: 768, "cpu": 4096, "disk": None}


def test_disk_may_be_forbidden_or_capped() -> None:
    model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(4)])
    assert infer_auto_device_map(model, {"cpu": 800}).bytes_on("disk") == 512
    assert infer_auto_device_map(model, {"cpu": 800, "disk": 512}).bytes_on("disk") == 512
    with pytest.raises(
        DoesNotFitError, match="512 B are left over, and the disk is not to be used"
    ):
        infer_auto_device_map(model, {"cpu": 800}, disk=False)
    for options in ({"disk": "500B"}, {"max_memory": {"cpu": 800, "disk": 500}}):
        with pytest.raises(DoesNotFitError, match="the disk may take 500 B"):
            infer_auto_device_map(model, **{"max_memory": {"cpu": 800}, **options})


# ---------------------------------------------------------------------- measured


class Fake(DeviceBackend):
    """Two devices of a type that torch does not know: good enough to be planned for."""

    device_type = "fake"
    free: int | None = 1000
    count = 2

    def memory_info(self, index: int) -> MemoryInfo:
        if self.free is None:
            raise RuntimeError("INTERNAL ASSERT")
        return MemoryInfo(self.free + index, 2 * self.free)


class Host(Fake):
    device_type = "cpu"
    priority = 0
    free = 1500
    count = 1


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make this a machine with the devices of some fake backends, and a host."""

    def make(*backends: Fake) -> None:
        known = {b.device_type: b for b in (*backends, Host())}
        devices = [Device(b.device_type, i) for b in backends for i in range(b.count)]
        monkeypatch.setattr(registry, "available_devices", lambda: [*devices, CPU])
        monkeypatch.setattr(registry, "primary_type", lambda: backends[0].device_type)
        monkeypatch.setattr(registry, "get_backend", lambda kind: known[str(kind)])

    return make


def test_devices_are_measured(machine: Any) -> None:
    machine(Fake())
    assert get_max_memory() == {0: 1000, 1: 1001, "cpu": 1500}


def test_a_second_type_of_accelerator_has_its_name_as_key(machine: Any) -> None:
    other = type("Other", (Fake,), {"device_type": "other", "priority": 50, "count": 1})()
    machine(Fake(), other)
    assert get_max_memory() == {0: 1000, 1: 1001, "other:0": 1000, "cpu": 1500}


def test_memory_that_is_the_hosts_is_counted_once(machine: Any) -> None:
    unified = {"count": 1, "capabilities": Capabilities(unified_memory=True)}
    machine(type("Unified", (Fake,), unified)())
    assert get_max_memory() == {0: 1000, "cpu": 500}


def test_one_of_two_devices_of_a_type_has_the_hosts_memory(machine: Any) -> None:
    class Mixed(Fake):
        count = 2

        def memory_info(self, index: int) -> MemoryInfo:
            info = super().memory_info(index)
            return MemoryInfo(info.free, info.total, shared_with_host=index == 1)

    machine(Mixed())
    assert get_max_memory() == {0: 1000, 1: 1001, "cpu": 499}


def test_a_device_that_says_nothing_of_its_memory(machine: Any) -> None:
    backend = Fake()
    backend.free = None
    machine(backend)
    with pytest.raises(BudgetError, match=r"fake:0 does not say how much memory.*max_memory=\{0: "):
        get_max_memory()
    assert get_max_memory({0: 7}) == {0: 7}


def test_a_tenth_of_what_was_measured_is_left_and_nothing_of_what_was_given(machine: Any) -> None:
    machine(Fake())
    model = nn.Linear(2, 2)
    assert infer_auto_device_map(model).budgets[0] == 900
    assert infer_auto_device_map(model, headroom=0).budgets[0] == 1000
    assert infer_auto_device_map(model, get_max_memory()).budgets[0] == 1000


def test_a_dtype_that_the_device_cannot_hold_is_said_before(machine: Any) -> None:
    picky = type("Picky", (Fake,), {"supports_dtype": lambda self, dtype: dtype != torch.float64})
    machine(picky())
    with pytest.raises(ModelError, match=r"Linear\) holds torch.float64, which fake:0 cannot"):
        infer_auto_device_map(nn.Linear(2, 2, dtype=torch.float64), {0: 1000})
    assert infer_auto_device_map(nn.Linear(2, 2), {0: 1000}, dtype=torch.float16) == {"": 0}
