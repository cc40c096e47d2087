"""The laws of placement, over random models and budgets. The oracle shares no code with core."""

from __future__ import annotations

import dataclasses
import json
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn

from anydevice.placement import (
    DeviceMap,
    Placement,
    check_device_map,
    find_blocks,
    infer_auto_device_map,
)

#: The classes named are not in every model.
pytestmark = pytest.mark.filterwarnings("ignore:no_split_module_classes")

LAW = settings(
    max_examples=200,  # the same ones in every run; raise it to search on
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
DTYPES = (torch.float32, torch.float16, torch.int8, torch.float8_e4m3fn, torch.uint4, torch.bool)

# ---------------------------------------------------------------------- random models


class Leaf(nn.Module):
    """A module without children."""


class Box(nn.Module):
    """A module with children; repeated ones in a list are blocks."""


class Box2(Box):
    """Another class of the same kind."""


def _tensor(draw: Any) -> torch.Tensor:
    shape = draw(st.sampled_from([(), (0,), (1,), (3,), (2, 5), (7, 3)]))
    return torch.empty(shape, dtype=draw(st.sampled_from(DTYPES)), device="meta")


def _own_tensors(draw: Any, module: nn.Module, pool: list[torch.Tensor], most: int) -> None:
    for i in range(draw(st.integers(0, most))):
        if pool and draw(st.integers(0, 5)) == 0:  # a tie
            tensor = draw(st.sampled_from(pool))
        else:
            tensor = _tensor(draw)
            if draw(st.booleans()):
                tensor = nn.Parameter(tensor, requires_grad=False)
            pool.append(tensor)
        if isinstance(tensor, nn.Parameter):
            module.register_parameter(f"p{i}", tensor)
        else:
            module.register_buffer(f"b{i}", tensor, persistent=draw(st.booleans()))


@st.composite
def models(draw: Any) -> nn.Module:
    """Nested, tied, shared; buffers persistent or not; root-level, empty and sub-byte tensors."""
    pool: list[torch.Tensor] = []
    modules: list[nn.Module] = []

    def build(depth: int) -> nn.Module:
        if modules and draw(st.integers(0, 9)) == 0:  # a module under two names
            return draw(st.sampled_from(modules))
        kind = draw(st.sampled_from([Leaf, Leaf, Box, Box2, nn.ModuleList, nn.Sequential]))
        if depth == 0 or kind is Leaf:
            module: nn.Module = Leaf()
            _own_tensors(draw, module, pool, 3)
        else:
            children = [build(depth - 1) for _ in range(draw(st.integers(0, 3)))]
            if kind in (nn.ModuleList, nn.Sequential):
                module = (
                    nn.ModuleList(children) if kind is nn.ModuleList else nn.Sequential(*children)
                )
            else:
                module = kind()
                for i, child in enumerate(children):
                    module.add_module(f"c{i}", child)
                _own_tensors(draw, module, pool, 2)
        modules.append(module)
        return module

    root = Box()
    _own_tensors(draw, root, pool, 2)
    for i in range(draw(st.integers(0, 5))):
        root.add_module(f"m{i}", build(2))
    return root


def names_and_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    for path, module in model.named_modules(remove_duplicate=False):
        dot = f"{path}." if path else ""
        for n, p in module._parameters.items():
            yield dot + n, p, False
        for n, b in module._buffers.items():
            yield dot + n, b, True


def total_bytes(model: nn.Module) -> int:
    return sum(t.nbytes for t in {id(t): t for _, t, _ in names_and_tensors(model)}.values())


@st.composite
def situations(draw: Any) -> tuple[nn.Module, dict[Any, int], dict[str, Any]]:
    """A model, budgets and options."""
    model = draw(models())
    total = max(total_bytes(model), 8)
    share = st.integers(0, 12).map(lambda tenths: total * tenths // 10)
    budgets: dict[Any, int] = {i: draw(share) for i in range(draw(st.integers(0, 3)))}
    if draw(st.booleans()) or not budgets:
        budgets["cpu"] = draw(share) + 1
    assume(any(budgets.values()))
    options = {
        "offload_buffers": draw(st.booleans()),
        "prefetch": draw(st.booleans()),
        "no_split_module_classes": draw(st.sampled_from([None, None, [], ["Box2"], ["Box"]])),
        "clean_result": draw(st.booleans()),
        "fallback_allocation": draw(st.integers(0, 4)) == 0,
    }
    return model, budgets, options


def plan(model: nn.Module, budgets: dict[Any, int], options: dict[str, Any]) -> Placement:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*offload_buffers=True")
        return infer_auto_device_map(model, budgets, **options)


# ---------------------------------------------------------------------- the oracle


@dataclasses.dataclass
class Item:
    """Blocks that go together: one and its tied followers."""

    names: list[str]
    tensors: dict[int, int]
    buffers: set[int]
    unit: int
    leaf: int

    @property
    def size(self) -> int:
        return sum(self.tensors.values())


class Oracle:
    """Accounts for a placement from the model alone."""

    def __init__(self, model: nn.Module, budgets: dict[Any, int], p: Placement) -> None:
        self.model, self.budgets, self.p = model, budgets, p
        self.tensors = list(names_and_tensors(model))
        self.sizes = {id(t): t.nbytes for _, t, _ in self.tensors}
        self.accelerators = [k for k in budgets if k not in ("cpu", "disk")]
        items: dict[str, Item] = {}
        self.device: dict[str, Any] = {}
        keys = {name: share.key for name, share in p.shares.items()}
        for placed in p.blocks:
            item = items.setdefault(
                placed.tied_to if placed.tied_to is not None else placed.name,
                Item([], {}, set(), 0, 0),
            )
            item.names.append(placed.name)
            self._count(item, placed.name)
            self.device[placed.name] = keys[placed.device]
        self.items = [item for item in items.values() if item.size]
        self.where = [self.device[item.names[0]] for item in self.items]

    def _count(self, item: Item, block: str) -> None:
        inside = [(n, t, b) for n, t, b in self.tensors if _covers(block, n)]
        parameters = {id(t): t.nbytes for _, t, b in inside if not b}
        buffers = {id(t): t.nbytes for _, t, b in inside if b and id(t) not in parameters}
        item.tensors.update(parameters | buffers)
        item.buffers.update(buffers)
        travels = self.p.offload_buffers
        by_module: dict[str, dict[int, int]] = {}
        for n, t, b in inside:
            if travels or not b:
                by_module.setdefault(n.rpartition(".")[0], {})[id(t)] = t.nbytes
        item.unit = max(
            item.unit, sum(parameters.values()) + (sum(buffers.values()) if travels else 0)
        )
        item.leaf = max([item.leaf, *(sum(own.values()) for own in by_module.values())])

    def main(self, where: list[Any]) -> Any:
        """The executing device: the first accelerator that holds anything."""
        return next((d for d in where if d in self.accelerators), None)

    def used(self, where: list[Any], main: Any) -> dict[Any, int]:
        held: dict[Any, set[int]] = {}
        for item, d in zip(self.items, where, strict=True):
            rests = not self.p.offload_buffers and d in ("cpu", "disk")
            executing = main if main is not None else "cpu"
            for t in item.tensors:
                held.setdefault(executing if rests and t in item.buffers else d, set()).add(t)
        return {d: sum(self.sizes[t] for t in tensors) for d, tensors in held.items()}

    def room(self, where: list[Any]) -> int:
        """What the main device must keep for visitors, in the placement's shape."""
        most = max([self.budgets[d] for d in self.accelerators], default=0)
        rest = [i for i, d in zip(self.items, where, strict=True) if d in ("cpu", "disk")]
        units = [i.unit if self.p.whole and i.unit <= most else i.leaf for i in rest]
        return self.p.ahead * max([u for u in units if u <= most], default=0)

    def host_room(self, where: list[Any]) -> int:
        cpu = self.budgets.get("cpu", 0)
        rest = [i for i, d in zip(self.items, where, strict=True) if d == "disk"]
        units = [i.unit if i.unit <= cpu else i.leaf for i in rest]
        return max([u for u in units if u <= cpu], default=0)

    def within_budgets(self, where: list[Any], main: Any) -> bool:
        used = self.used(where, main)
        kept = {main: self.room(where)} if main is not None else {}
        if "cpu" in used and "cpu" in where:
            kept["cpu"] = self.host_room(where)
        return all(
            used.get(d, 0) + kept.get(d, 0) <= size
            for d, size in self.budgets.items()
            if d != "disk"
        )

    def contiguous(self, where: list[Any], device: Any, room: int) -> bool:
        """One run on a device; in between is only what it could never hold, on a slower tier."""
        mine = [i for i, d in enumerate(where) if d == device]
        limit, there = self.budgets[device], set()
        if device == self.main(where):
            limit -= room
            if not self.p.offload_buffers:  # buffers of this and slower tiers are there in any case
                pairs = zip(self.items, where, strict=True)
                there = {t for i, d in pairs if d in ("cpu", "disk", device) for t in i.buffers}
                limit -= sum(self.sizes[t] for t in there)

        def passed_over(i: int) -> bool:
            added = sum(size for t, size in self.items[i].tensors.items() if t not in there)
            return where[i] in ("cpu", "disk") and added > limit

        return all(where[i] == device or passed_over(i) for i in range(mine[0], mine[-1] + 1))

    def moves_up(self) -> Iterator[tuple[Item, Any]]:
        """Moves of one item to a faster tier that break no law."""
        tiers = {"cpu": 1, "disk": 2}
        for i, d in enumerate(self.where):
            buffers_only = self.items[i].buffers >= self.items[i].tensors.keys()
            if buffers_only and not self.p.offload_buffers:
                continue  # nothing of it rests: buffers are with the executing device already
            for faster in self.budgets:
                if tiers.get(faster, 0) < tiers.get(d, 0):
                    new = [*self.where]
                    new[i] = faster
                    fits = self.within_budgets(new, self.main(new))
                    if fits and self.contiguous(new, faster, self.room(new)):
                        yield self.items[i], faster


def _covers(prefix: str, name: str) -> bool:
    return not prefix or name == prefix or name.startswith(f"{prefix}.")


# ---------------------------------------------------------------------- the laws


@LAW
@given(situations())
def test_every_tensor_has_exactly_one_place_and_every_key_means_something(situation: Any) -> None:
    model, budgets, options = situation
    p = plan(model, budgets, options)
    check_device_map(model, p)  # a stray key would warn, and a warning is an error
    lookup = DeviceMap(p)
    blocks = [(b.name, b.device) for b in p.blocks]
    for name, tensor, _ in names_and_tensors(model):
        (device,) = {d for block, d in blocks if _covers(block, name)}
        if tensor.nbytes:
            assert str(lookup.lookup(name)) == device
    assert json.loads(json.dumps(p)) == p
    assert pickle.loads(pickle.dumps(p)).table() == p.table()


@LAW
@given(situations())
def test_no_budget_is_exceeded_and_ties_count_once_a_device(situation: Any) -> None:
    model, budgets, options = situation
    p = plan(model, budgets, options)
    oracle = Oracle(model, budgets, p)
    used = oracle.used(oracle.where, p.main_device)
    for device in [*budgets, "disk"]:
        assert p.bytes_on(device) == used.get(device, 0)
    for device, size in budgets.items():
        share = p.share_of(device)
        if share is not None and share.used:
            only_buffers = device == "cpu" and "cpu" not in oracle.where
            assert share.used + share.reserve <= size or only_buffers


@LAW
@given(situations())
def test_room_is_kept_for_every_visitor(situation: Any) -> None:
    model, budgets, options = situation
    p = plan(model, budgets, options)
    oracle = Oracle(model, budgets, p)
    if p.main_device is None:
        assert not any(d not in ("cpu", "disk") for d in p.values()) or "cpu" not in oracle.where
        return
    room = p.share_of(p.main_device).reserve  # type: ignore[union-attr]
    assert room >= oracle.room(oracle.where)
    assert p.ahead in ((1, 2) if options["prefetch"] else (1,))
    for item, device in zip(oracle.items, oracle.where, strict=True):
        if device in ("cpu", "disk") and not set(item.names) & set(p.host_run):
            assert min(item.unit, item.leaf) * p.ahead <= room
    resident = [d for d in oracle.where if d not in ("cpu", "disk")]
    assert not resident or resident[0] == p.main_device  # as a plain dict would be read


@LAW
@given(situations())
def test_blocks_stay_whole(situation: Any) -> None:
    model, budgets, options = situation
    p = plan(model, budgets, options)
    classes = options["no_split_module_classes"]
    largest = max([v for k, v in budgets.items() if k != "cpu"] or [budgets.get("cpu", 0)])
    for block in find_blocks(model, classes):
        inside = [n for n, t, _ in names_and_tensors(model) if _covers(block, n) and t.nbytes]
        size = sum(
            {id(t): t.nbytes for n, t, _ in names_and_tensors(model) if n in inside}.values()
        )
        if classes is None and size > largest:
            continue  # found without being named, and nothing can hold it
        assert len({DeviceMap(p).lookup(n) for n in inside}) <= 1


@LAW
@given(situations())
def test_each_accelerator_has_one_run(situation: Any) -> None:
    model, budgets, options = situation
    assume(not options["fallback_allocation"])
    p = plan(model, budgets, options)
    oracle = Oracle(model, budgets, p)
    for device in set(oracle.where) - {"cpu", "disk"}:
        assert oracle.contiguous(oracle.where, device, p.share_of(device).reserve)  # type: ignore[union-attr]


@LAW
@given(situations())
def test_nothing_is_left_to_a_slower_device_that_would_fit_a_faster_one(situation: Any) -> None:
    model, budgets, options = situation
    p = plan(model, budgets, options)
    oracle = Oracle(model, budgets, p)
    if p.main_device is None and any(d in ("cpu", "disk") for d in oracle.where):
        assume(not oracle.accelerators)
    assert list(oracle.moves_up()) == []
