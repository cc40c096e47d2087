"""Inside a call a copy passes for its original; after it, all is as before."""

import copy
import pickle

import pytest
import torch
from torch import nn

from anydevice.devices import CPU, parse_device
from anydevice.errors import UnplacedWeightError
from anydevice.transfer import Engine, copy_batch
from anydevice.weights import iter_modules, iter_slots


def unit_of(module, device="sim:0", **options):
    return Engine().group("module", list(iter_modules(module)), parse_device(device), **options)


def ids(module):
    return [id(slot.get()) for _, slot in iter_slots(module)]


@pytest.mark.parametrize("device", ["sim:0", "sim:1"])
def test_all_slots_are_on_the_device_inside_and_the_same_objects_after(sim, device):
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    before = ids(module)
    with torch.no_grad(), unit_of(module, device).call():
        assert {str(slot.get().device) for _, slot in iter_slots(module)} == {device}
        got = module(torch.ones(2, 4, device=device))
    assert ids(module) == before
    assert torch.equal(got.cpu(), module(torch.ones(2, 4)))


@pytest.mark.parametrize("grad", [True, False])
def test_a_twin_has_class_attributes_and_gradient_flag(sim, grad):
    class Special(nn.Parameter):
        pass

    module = nn.Module()
    module.plain = nn.Parameter(torch.ones(4))
    module.special = Special(torch.ones(4))
    module.frozen = nn.Parameter(torch.ones(4, dtype=torch.int8), requires_grad=False)
    module.frozen.scale = torch.full((4,), 0.5)
    module.frozen.tag = ["a"]
    tag = module.frozen.tag
    with torch.set_grad_enabled(grad), unit_of(module).call():
        assert type(module.special) is Special
        assert all(isinstance(p, nn.Parameter) for p in module.parameters())
        assert [p.requires_grad for p in module.parameters()] == [True, True, False]
        assert str(module.frozen.scale.device) == "sim:0"
        assert module.frozen.tag is tag
        assert bool((module.frozen * module.frozen.scale == 0.5).all())
    assert module.frozen.scale.device.type == "cpu"


def test_attributes_that_forward_sets_stay(sim):
    module = nn.Linear(4, 4)
    with torch.no_grad(), unit_of(module).call():
        module.weight.seen = 3
        module.weight.cache = torch.ones(2, device="sim:0")
    assert module.weight.seen == 3
    assert module.weight.cache.device.type == "cpu"


def test_tied_weights_have_one_twin(sim):
    module = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    module["b"].weight = module["a"].weight
    with torch.no_grad(), unit_of(module).call():
        assert module["a"].weight is module["b"].weight
    assert module["a"].weight is module["b"].weight


STRANGE = {
    "transposed": lambda: torch.arange(12.0).view(3, 4).t(),
    "channels_last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "expanded": lambda: torch.randn(3, 1).expand(3, 4),
    "part": lambda: torch.arange(20.0)[3:15:2],
    "scalar": lambda: torch.tensor(2.5),
    "empty": lambda: torch.empty(0, 4),
    "bool": lambda: torch.tensor([True, False, True]),
    "complex": lambda: torch.randn(3, dtype=torch.complex64),
    "conjugated": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "bfloat16": lambda: torch.randn(7).to(torch.bfloat16),
    "float8": lambda: torch.randn(7).to(torch.float8_e4m3fn),
    "int64": lambda: torch.arange(5),
    "uint8": lambda: torch.arange(5, dtype=torch.uint8),
}


@pytest.mark.parametrize("kind", STRANGE)
def test_every_kind_of_tensor_arrives_as_it_is(sim, kind):
    module = nn.Module()
    module.register_buffer("first", torch.ones(3, dtype=torch.uint8))
    module.register_buffer("tensor", STRANGE[kind]())
    before = module.tensor
    with torch.no_grad(), unit_of(module).call():
        copy = module.tensor
        assert str(copy.device) == "sim:0"
        assert (copy.dtype, copy.shape) == (before.dtype, before.shape)
        if kind in ("transposed", "channels_last"):
            assert copy.stride() == before.stride()
        got = copy.cpu()
    assert (
        torch.equal(got.view(torch.uint8), before.view(torch.uint8))
        if kind == "float8"
        else (torch.equal(got, before))
    )
    assert module.tensor is before


def test_views_of_one_memory_stay_views_of_one(sim):
    module = nn.Module()
    whole = torch.arange(64.0)
    module.register_buffer("whole", whole)
    module.register_buffer("upper", whole[32:])
    with torch.no_grad(), unit_of(module).call():
        module.upper.fill_(7)
        assert bool((module.whole[32:] == 7).all())
    assert bool((whole[32:] == 7).all())


def test_weights_of_other_accelerators_come_too(sim):
    module = nn.Linear(4, 4).to("sim:1")
    with torch.no_grad(), unit_of(module, "sim:0").call():
        assert str(module.weight.device) == "sim:0"
    assert str(module.weight.device) == "sim:1"
    with torch.no_grad(), unit_of(module, "cpu").call():
        assert module.weight.device.type == "cpu"


# ---------------------------------------------------------------------- changes


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_changes_in_place_are_written_back(sim, mode):
    module = nn.Linear(4, 4)
    with mode(), unit_of(module).call():
        module.weight.fill_(3)
        module.bias[1:].zero_()
    assert bool((module.weight == 3).all())
    assert bool((module.bias[1:] == 0).all())


def test_what_was_not_changed_is_not_copied_back(sim):
    module = nn.Linear(4, 4)
    with torch.no_grad(), unit_of(module).call():
        module(torch.ones(1, 4, device="sim:0"))
    assert sim.counters(0)["d2h_copies"] == 0


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.InstanceNorm1d])
def test_running_statistics_come_home(sim, norm):
    module = norm(4, track_running_stats=True)
    plain, x = copy.deepcopy(module), torch.randn(6, 4, 5)
    with torch.no_grad(), unit_of(module).call():
        module(x.to("sim:0"))
    plain(x)
    for (_, got), (_, wanted) in zip(iter_slots(module), iter_slots(plain), strict=True):
        assert torch.allclose(got.get().float(), wanted.get().float(), atol=1e-6)


def test_data_that_was_set_is_written_back(sim):
    module = nn.Linear(4, 4)
    weight = module.weight
    with torch.no_grad(), unit_of(module).call():
        module.weight.data = torch.full((4, 4), 5.0, device="sim:0")
    assert module.weight is weight
    assert bool((weight == 5).all())


def test_a_buffer_that_forward_replaces_comes_to_rest_on_the_host(sim):
    module = nn.Module()
    module.register_buffer("state", torch.zeros(2))
    module.register_buffer("gone", torch.zeros(2))
    with torch.no_grad(), unit_of(module).call():
        module.state = module.state + 1
        module.gone = None
    assert module.state.device.type == "cpu"
    assert module.state.tolist() == [1, 1]
    assert module.gone is None


def test_a_parameter_that_forward_replaces_comes_to_rest_on_the_host(sim):
    module = nn.Linear(2, 2)
    new = nn.Parameter(torch.ones(2, 2, device="sim:0"))
    with torch.no_grad(), unit_of(module).call():
        module.weight = new
    assert module.weight is new
    assert new.device.type == "cpu"


def test_a_mapped_weight_is_changed_in_memory_and_not_in_its_file(sim, tmp_path):
    from anydevice.checkpoint.mapped import map_file

    path = tmp_path / "weights"
    path.write_bytes(torch.zeros(16).numpy().tobytes())
    module = nn.Module()
    module.weight = nn.Parameter(map_file(path).tensor(0, torch.float32, (16,)))
    with torch.no_grad(), unit_of(module).call():
        module.weight += 1
    assert bool((module.weight == 1).all())
    assert not any(path.read_bytes())


# ---------------------------------------------------------------------- gradients


def test_backward_reaches_the_resting_weights(sim):
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    plain, x = copy.deepcopy(module), torch.randn(3, 4)
    group = unit_of(module)
    for _ in range(2):
        with group.call():
            loss = module(x.to("sim:0")).sum()
        loss.backward()
        plain(x).sum().backward()
    for mine, wanted in zip(module.parameters(), plain.parameters(), strict=True):
        assert mine.grad.device.type == "cpu"
        assert torch.allclose(mine.grad, wanted.grad, atol=1e-5)


def test_second_derivatives_and_function_transforms_work(sim):
    module, x = nn.Linear(3, 1), torch.randn(2, 3)
    group = unit_of(module)
    with group.call():
        y = module(x.to("sim:0")).square().sum()
    (first,) = torch.autograd.grad(y, module.weight, create_graph=True)
    first.sum().backward()
    assert torch.allclose(module.weight.grad, 2 * x.sum(1, keepdim=True).mul(x).sum(0)[None])

    def loss(inputs):
        with group.call():
            return module(inputs).sum()

    got = torch.func.grad(loss)(x.to("sim:0"))
    assert torch.allclose(got.cpu(), module.weight.expand(2, 3).detach())


def test_frozen_weights_that_autograd_saves_are_not_overwritten(make, x):
    model = make()
    for block in model.blocks:
        block.requires_grad_(False)
    inputs = x.clone().requires_grad_()
    model(inputs, grad=True).sum().backward()
    wanted = x.clone().requires_grad_()
    y = wanted
    for block in model.blocks:
        y = block(y)
    y.sum().backward()
    assert torch.allclose(inputs.grad, wanted.grad, atol=1e-4)


# ---------------------------------------------------------------------- casting


def test_weights_are_cast_where_they_are_needed(sim):
    module = nn.Linear(8, 8).to(torch.float8_e4m3fn)
    module.register_buffer("count", torch.tensor(3))
    wanted = copy.deepcopy(module).to(torch.bfloat16)
    x = torch.randn(2, 8, dtype=torch.bfloat16)
    with torch.no_grad(), unit_of(module, compute_dtype=torch.bfloat16).call():
        assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
        assert module.count.dtype == torch.int64
        got = module(x.to("sim:0"))
    assert module.weight.dtype == torch.float8_e4m3fn
    assert torch.equal(got.cpu(), wanted(x))
    assert sim.counters(0)["h2d_bytes"] < 1000  # of one byte each they travelled


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
def test_weights_that_are_there_are_cast_too(sim, device):
    module = nn.Linear(8, 8, dtype=torch.bfloat16).to(device)
    with torch.no_grad(), unit_of(module, device, compute_dtype=torch.float32).call():
        assert module.weight.dtype == torch.float32
        module.weight.fill_(2)
    assert module.weight.dtype == torch.bfloat16
    assert bool((module.weight == 2).all())


def test_what_the_device_cannot_hold_is_cast_before(sim, monkeypatch):
    from anydevice_conformance.simulator.backend import SimulatorBackend

    monkeypatch.setattr(
        SimulatorBackend, "supports_dtype", lambda _, dtype: dtype is not torch.float8_e5m2
    )
    module = nn.Linear(8, 8).to(torch.float8_e5m2)
    with torch.no_grad(), unit_of(module, compute_dtype=torch.float32).call():
        assert module.weight.dtype == torch.float32
    assert sim.counters(0)["h2d_bytes"] == (64 + 8) * 4


def test_autocast_does_not_keep_every_cast_that_it_makes(make, x):
    model = make(prefetch_depth=0)
    model(x)
    torch.sim.synchronize(0)
    with torch.autocast("sim", dtype=torch.bfloat16):
        model(x)
        first = torch.sim.memory_allocated(0)
        for _ in range(3):
            model(x)
        assert torch.sim.memory_allocated(0) == first


# ---------------------------------------------------------------------- calls


def test_calls_are_counted(sim):
    module = nn.Linear(2, 2)
    group = unit_of(module)
    with torch.no_grad(), group.call():
        with group.call():
            assert str(module.weight.device) == "sim:0"
        assert str(module.weight.device) == "sim:0"
    assert module.weight.device.type == "cpu"
    call = group.call()
    call.leave()  # one too many is harmless


def test_an_inner_unit_uses_what_an_outer_one_brought(sim):
    module = nn.Sequential(nn.Linear(2, 2))
    engine = Engine()
    device = parse_device("sim:0")
    outer = engine.group("outer", list(iter_modules(module)), device)
    inner = engine.group("inner", list(iter_modules(module[0])), device)
    outer, inner = outer.call(), inner.call()
    with torch.no_grad():
        outer.enter()
        copy = module[0].weight
        inner.enter()
        assert module[0].weight is copy
        outer.leave()
        assert module[0].weight is copy
        inner.leave()
    assert module[0].weight.device.type == "cpu"


def test_weights_given_between_calls_are_seen(make, x):
    model = make()
    for seed in range(3):
        torch.manual_seed(10 + seed)
        for block in model.blocks:
            block.load_state_dict({k: torch.randn_like(v) for k, v in block.state_dict().items()})
        model.blocks[0].up.weight = nn.Parameter(torch.randn(64, 32))
        model.blocks[1].up.weight.data = torch.randn(64, 32)
        got = model(x)
        wanted = model.plain(x)
        assert torch.allclose(got.cpu(), wanted, rtol=1e-4, atol=1e-3)


def test_an_exception_leaves_all_in_place(make, x):
    model = make()
    before = [ids(block) for block in model.blocks]
    wanted = model.plain(x)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model.blocks[2] and model(torch.ones(1, 3))
    assert [ids(block) for block in model.blocks] == before
    assert torch.allclose(model(x).cpu(), wanted, atol=1e-5)


def test_a_weight_on_meta_is_named(sim):
    module = nn.Linear(2, 2, device="meta")
    group = Engine().group("block", list(iter_modules(module, "model.fc")), parse_device("sim:0"))
    with pytest.raises(UnplacedWeightError, match=r"model\.fc\.weight.*on meta"):
        group.call().enter()
    assert module.weight.is_meta


def test_lazy_parameters_are_left_alone(sim):
    module = nn.LazyLinear(3)
    with unit_of(module).call():
        assert nn.parameter.is_lazy(module.weight)


def test_copies_and_pickles_are_independent(sim):
    module = nn.Linear(2, 2)
    group = unit_of(module)
    with torch.no_grad(), group.call():
        pass
    pair = (module, group)
    for copied, other in (copy.deepcopy(pair), pickle.loads(pickle.dumps(pair))):
        with torch.no_grad(), other.call():
            assert str(copied.weight.device) == "sim:0"
            assert module.weight.device.type == "cpu"
        assert torch.equal(copied.weight, module.weight)


def test_on_the_host_nothing_is_done(sim):
    module = nn.Linear(2, 2)
    group = Engine().group("m", list(iter_modules(module)), CPU)
    weight = module.weight
    with group.call():
        assert module.weight is weight
    assert sim.counters(0)["h2d_copies"] == 0


def test_a_slot_may_become_empty(sim):
    module = nn.Linear(2, 2)
    group = Engine().group("m", [("", module)], parse_device("sim:0"))
    module.bias = None
    with group.call():
        assert module.bias is None
        assert str(module.weight.device) == "sim:0"


def test_buffers_that_are_written_to_unseen_come_home_while_training(sim):
    module = nn.Module()
    module.register_buffer("codes", torch.zeros(4))
    group = unit_of(module)
    with group.call():
        module.codes.data.add_(1)
    assert bool((module.codes == 1).all())
    version = module.codes._version
    with group.call():
        pass
    assert module.codes._version == version


@pytest.mark.parametrize("pin_budget", [None, 0])
def test_a_default_device_of_the_users_changes_nothing(sim, pin_budget):
    module = nn.Linear(4, 4)
    x = torch.randn(2, 4)
    wanted = module(x)
    group = Engine(pin_budget=pin_budget).group(
        "m", list(iter_modules(module)), parse_device("sim:0")
    )
    torch.set_default_device("sim:0")
    try:
        for _ in range(2):
            with torch.no_grad(), group.call():
                got = module(x.to("sim:0"))
            assert torch.allclose(got.cpu(), wanted, atol=1e-6)
        (arrived,) = copy_batch([x], parse_device("sim:1"))
    finally:
        torch.set_default_device(None)
    assert torch.equal(arrived.cpu(), x)
