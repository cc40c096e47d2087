"""A container that crosses devices is the caller's own all the same."""

from __future__ import annotations

import collections
import dataclasses

import pytest
import torch
from torch import nn

from anydevice import dispatch_model


@dataclasses.dataclass
class State:
    x: torch.Tensor
    last: torch.Tensor | None = None
    seen: list = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: torch.Tensor
    seen: list


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, store, change):
        x = self.fc(x)
        change(store, x)
        return x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x, store, change):
        for layer in self.layers:
            x = layer(x, store, change)
        return x


def add_key(store, x):
    store["count"] = store.get("count", 0) + 1
    store.setdefault("seen", []).append(x)


def nested(store, x):
    store["inner"].append(x)


def replaced(store, x):
    store["last"] = x
    store.pop("first", None)


def appended(store, x):
    store.append(x)


def inserted(store, x):
    store.insert(0, x)


def attribute(store, x):
    store.last = x
    store.seen.append(x)


def second(store, x):
    store[1].append(x)


@pytest.mark.parametrize(
    ("make", "change", "check"),
    [
        (dict, add_key, lambda s: s["count"] == 4 and len(s["seen"]) == 4),
        (lambda: {"inner": []}, nested, lambda s: len(s["inner"]) == 4),
        (lambda: {"first": torch.ones(1)}, replaced, lambda s: list(s) == ["last"]),
        (list, appended, lambda s: len(s) == 4),
        (lambda: [torch.ones(1)], inserted, lambda s: len(s) == 5 and s[4].tolist() == [1]),
        (
            lambda: State(torch.ones(1)),
            attribute,
            lambda s: len(s.seen) == 4 and s.last is not None,
        ),
        (
            lambda: {"a": Frozen(torch.ones(1), [])},
            lambda s, x: s["a"].seen.append(x),
            lambda s: len(s["a"].seen) == 4,
        ),
        (lambda: (torch.ones(1), [torch.ones(1)]), second, lambda s: len(s[1]) == 5),
        (
            lambda: collections.deque([torch.ones(1)], 3),
            appended,
            lambda s: len(s) == s.maxlen == 3,
        ),
    ],
    ids=[
        "new keys",
        "nested list",
        "replaced and removed",
        "appended",
        "inserted",
        "attributes",
        "in a frozen dataclass",
        "in a tuple",
        "in a deque",
    ],
)
def test_every_layer_writes_into_the_callers_container(sim, make, change, check):
    devices = [0, 1, "cpu", 0]
    model = dispatch_model(Net(), {f"layers.{i}": d for i, d in enumerate(devices)})
    store = make()
    model(torch.ones(1, 4), store, change)
    assert check(store), store


def test_also_when_the_layer_fails_after_writing(sim):
    def fail(store, x):
        store["written"] = True
        raise ValueError("enough")

    model = dispatch_model(Net(), {"layers": 1}, force_hooks=True)
    store = {"x": torch.ones(1)}
    with pytest.raises(ValueError, match="enough"):
        model(torch.ones(1, 4), store, fail)
    assert store["written"] is True
