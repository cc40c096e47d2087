from __future__ import annotations

import collections
import copy
import dataclasses
import threading
import weakref

import pytest
import torch
from torch import nn

import anydevice
from anydevice.errors import ModelError, UnplacedWeightError
from anydevice.hooks import (
    AlignDevicesHook,
    add_hook_to_module,
    align_module_device,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    attach_execution_device_hook,
    has_offloaded_params,
    remove_hook_from_module,
    remove_hook_from_submodules,
)

X = torch.ones(2, 4)


class See(nn.Module):
    """Keeps what its forward is given."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))
        self.register_buffer("b", torch.ones(4))

    def forward(self, *args, **kwargs):
        self.seen = args, kwargs
        self.places = {n: t.device for n, t in [("w", self.w), ("b", self.b)]}
        return (args, kwargs)


def device(name):
    return torch.device(name)


def test_execution_only_moves_weights_and_inputs(sim):
    module = add_hook_to_module(nn.Linear(4, 4), AlignDevicesHook("sim:1"))
    assert module.weight.device == device("sim:1")
    assert module(X).device == device("sim:1")


@pytest.mark.parametrize("offload_buffers", [False, True])
def test_offloaded_weights_rest_on_the_host(sim, offload_buffers):
    module = See()
    weight = module.w
    hook = AlignDevicesHook(0, offload=True, io_same_device=True, offload_buffers=offload_buffers)
    add_hook_to_module(module, hook)
    (got,), _ = module(X)
    assert got.device == X.device
    assert module.places == {"w": device("sim:0"), "b": device("sim:0")}
    assert module.w is weight
    assert module.w.device.type == "cpu"
    assert module.b.device == (device("cpu") if offload_buffers else device("sim:0"))
    assert has_offloaded_params(module)
    remove_hook_from_module(module)
    assert module.w is weight
    assert not has_offloaded_params(module)


def test_weights_map_gives_the_values(sim):
    module = nn.Linear(2, 2)
    values = {"weight": torch.eye(2), "bias": torch.zeros(2)}
    add_hook_to_module(module, AlignDevicesHook("sim", offload=True, weights_map=values))
    assert torch.equal(module(torch.ones(2)).cpu(), torch.ones(2))
    with pytest.raises(ModelError, match="bias"):
        add_hook_to_module(
            nn.Linear(2, 2),
            AlignDevicesHook("sim", offload=True, weights_map={"weight": torch.eye(2)}),
        )


def test_meta_weights_without_a_value_are_named(sim):
    with pytest.raises(ModelError, match="weight"):
        add_hook_to_module(nn.Linear(2, 2, device="meta"), AlignDevicesHook(0, offload=True))


Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass
class Box:
    inside: torch.Tensor


class Cache:
    """Of a class that nobody here knows."""

    def __init__(self):
        self.items = []


def test_identity_is_kept_where_nothing_moves(sim):
    module = add_hook_to_module(See(), AlignDevicesHook("cpu"))
    given = ([X], {"a": X}, Point(X, 1), Box(X), Cache(), None, 3)
    module(*given, key=given)
    args, kwargs = module.seen
    assert all(a is b for a, b in zip(args, given, strict=True))
    assert kwargs["key"] is given


def test_containers_keep_their_types_where_something_moves(sim):
    module = add_hook_to_module(See(), AlignDevicesHook("sim:1"))
    shared, cache = {"n": 0}, Cache()
    module([X], collections.OrderedDict(a=X), Point(X, 1), Box(X), shared, cache)
    items, ordered, point, box, same, same_cache = module.seen[0]
    assert items[0].device == ordered["a"].device == point.x.device == device("sim:1")
    assert box.inside.device == device("sim:1")
    assert type(ordered) is collections.OrderedDict
    assert type(point) is Point
    assert same is shared
    assert same_cache is cache


def test_skip_keys(sim):
    module = add_hook_to_module(
        See(), AlignDevicesHook("sim:1", io_same_device=True, skip_keys=["past"])
    )
    _, out = module(X, past=X, inner={"past": X, "other": X})
    past, inner = module.seen[1]["past"], module.seen[1]["inner"]
    assert past is X
    assert inner["past"] is X
    assert inner["other"].device == device("sim:1")
    assert out["inner"]["other"].device.type == "cpu"


def test_an_error_leaves_the_weights_at_rest(sim):
    class Boom(nn.Linear):
        fail = True

        def forward(self, x):
            y = super().forward(x)
            if self.fail:
                raise RuntimeError("boom")
            return y

    module = Boom(4, 4)
    add_hook_to_module(module, AlignDevicesHook(0, offload=True, io_same_device=True))
    for _ in range(3):
        with pytest.raises(RuntimeError, match="boom"):
            module(X)
        assert module.weight.device.type == "cpu"
    module.fail = False
    assert module(X).device.type == "cpu"


def test_a_weight_that_was_moved_by_hand_is_brought(sim):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    want = copy.deepcopy(model)
    anydevice.dispatch_model(model, {"0": 0, "1": 1})
    with torch.no_grad():
        model[1].weight.data = torch.ones(4, 4, device="sim:0")  # behind the hook's back
        want[1].weight.fill_(1)
        torch.testing.assert_close(model(X).cpu(), want(X))


def test_a_weight_that_stays_away_is_named(sim):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to("sim:1")
    add_hook_to_module(model, AlignDevicesHook("sim:0"))
    with pytest.raises(UnplacedWeightError, match=r"1.weight \(sim:1\).*preload_module_classes"):
        model(X)


def test_nested_calls_and_recursion(sim):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x, depth=2):
            return self.fc(x) if depth == 0 else self(x, depth - 1)

    module = Twice()
    want = module(X)
    attach_align_device_hook(module, 0, offload=True)
    assert torch.equal(module(X), want)
    assert module.fc.weight.device.type == "cpu"
    assert torch.equal(module.fc(X.to("sim:0")).cpu(), want)
    assert torch.equal(module.fc(X).cpu(), want)


def test_attach_execution_device_hook(sim):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    attach_execution_device_hook(model, "sim:1")
    assert model[2](X).device == device("sim:1")
    assert {p.device for p in model.parameters()} == {device("sim:1")}
    assert "_hf_hook" not in vars(model[1])


def test_attach_on_blocks(sim):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    want = model(X)
    attach_align_device_hook_on_blocks(
        model,
        execution_device={"0": 0, "1": "sim:1", "2": device("sim:1")},
        offload={"0": True, "1": False, "2": True},
        weights_map={f"0.{k}": v for k, v in model[0].state_dict().items()},
    )
    got = model(X)
    assert torch.equal(got, want)
    assert got.device.type == "cpu"
    assert [m.weight.device.type for m in model] == ["cpu", "sim", "cpu"]
    assert model[2].running_mean.device == device("sim:1")
    remove_hook_from_submodules(model)
    assert not any("_hf_hook" in vars(m) for m in model.modules())


def test_modules_within_a_unit_may_be_called_alone(sim):
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)))
    want = model[0][2](X)
    anydevice.cpu_offload(model, "sim:0")
    got = model[0][2](X)
    assert torch.equal(got.cpu(), want)
    assert got.device == device("sim:0")
    assert model[0][2].weight.device.type == "cpu"


def test_align_module_device(sim):
    model = nn.Sequential(nn.Linear(4, 4))
    with align_module_device(model):
        assert model[0].weight.device.type == "cpu"
    with align_module_device(model, "sim:1"):
        assert model[0].weight.device == device("sim:1")
        with torch.no_grad():
            model[0].weight.fill_(3)
    assert torch.equal(model[0].weight, torch.full((4, 4), 3.0))
    anydevice.cpu_offload(model, 0)
    with align_module_device(model[0]):
        assert model[0].weight.device == device("sim:0")
    with pytest.raises(KeyError), align_module_device(model[0], 1):
        raise KeyError
    assert model[0].weight.device.type == "cpu"


def test_align_module_device_keeps_what_is_written_by_data(sim, tmp_path):
    model = anydevice.disk_offload(nn.BatchNorm1d(4), tmp_path, 0)
    with align_module_device(model, 1):
        model.weight.data.fill_(3)
        model.bias.data = model.bias.data + 2
        model.running_mean.data.add_(1)
    assert model.weight.tolist() == [3] * 4
    assert model.bias.tolist() == [2] * 4
    assert model.running_mean.tolist() == [1] * 4


def test_recurrent_layers_see_the_twins_in_their_own_list(sim):
    module = nn.LSTM(4, 4, batch_first=True)
    want = module(X[None])[0]
    anydevice.cpu_offload(module, 0)
    with torch.no_grad():
        got = module(X[None])[0]
    torch.testing.assert_close(got, want)
    assert all(a is b for a, b in zip(module._flat_weights, module.parameters(), strict=True))


def test_a_weak_reference_goes_on_pointing_to_its_parameter(sim):
    module = nn.Linear(4, 4)
    reference = weakref.ref(module.weight)
    anydevice.dispatch_model(module, {"": 0}, force_hooks=True)
    assert reference() is module.weight
    assert module.weight.device == device("sim:0")
    anydevice.undispatch(module)
    assert reference() is module.weight
    assert module.weight.device.type == "cpu"


def test_threads_on_one_model(sim):
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3)])
    inputs = [torch.full((2, 4), float(i)) for i in range(4)]
    with torch.no_grad():
        wants = [model(x) for x in inputs]
        anydevice.dispatch_model(model, {"0": 0, "1": "cpu", "2": "cpu"})
    barrier, wrong = threading.Barrier(4), []

    def work(x, want):
        barrier.wait(20)
        with torch.no_grad():
            wrong.extend(1 for _ in range(10) if not torch.equal(model(x), want))

    threads = [threading.Thread(target=work, args=pair) for pair in zip(inputs, wants, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert all(p.device.type == "cpu" for p in model[1:].parameters())


def test_a_copy_of_a_part_copies_no_more_than_the_part(sim):
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    anydevice.cpu_offload(model, 0)
    part = copy.deepcopy(model[1])
    assert torch.equal(part(X).cpu(), model[1](X).cpu())
    assert part._hf_hook.group.tensors() == list(part.parameters())


@pytest.mark.parametrize("whole", [True, False])
def test_the_buffers_of_an_offloaded_module_rest_beside_its_weights_without_the_hook(sim, whole):
    module = nn.Sequential(See(), See()) if whole else See()
    hook = AlignDevicesHook("sim:0", offload=True, place_submodules=whole)
    add_hook_to_module(module, hook)
    assert {b.device.type for b in module.buffers()} == {"sim"}
    remove_hook_from_module(module)
    assert {t.device.type for t in (*module.parameters(), *module.buffers())} == {"cpu"}
