"""dispatch_model and its kin, beyond the law of `test_any_map`: what users do with their models."""

from __future__ import annotations

import copy
import gc
import io
import json
import pickle
import warnings

import pytest
import torch
from torch import nn

import anydevice
from anydevice.errors import (
    BudgetError,
    DeviceMapError,
    DoesNotFitError,
    ModelError,
    OffloadStoreError,
    OptionError,
    UnknownDeviceError,
)
from anydevice.hooks import (
    attach_align_device_hook,
    has_offloaded_params,
    remove_hook_from_module,
    remove_hook_from_submodules,
)

X = torch.ones(2, 4)
OFFLOADS = ["cpu", "disk"]


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).eval()


def offloaded_again(model):
    return anydevice.cpu_offload(model, 0)


def offloaded(kind, folder, model=None, execution=0):
    model = net() if model is None else model
    if kind == "cpu":
        return anydevice.cpu_offload(model, execution)
    return anydevice.disk_offload(model, folder, execution)


# ---------------------------------------------------------------------- maps


@pytest.mark.parametrize("device_map", ["auto", "balanced", "balanced_low_0", "sequential"])
def test_words(sim, device_map):
    want = net()(X)
    model = anydevice.dispatch_model(net(), device_map, max_memory={0: 100, 1: 200, "cpu": "1MB"})
    assert torch.equal(model(X), want)


@pytest.mark.parametrize("device", [1, "1", "sim:1", lambda: torch.device("sim", 1)])
def test_spellings_of_one_device(sim, device):
    device = device() if callable(device) else device  # a torch.device needs the simulator
    model = anydevice.dispatch_model(net(), device)
    assert {t.device for t in model.state_dict().values()} == {torch.device("sim:1")}
    assert not any("_hf_hook" in vars(m) for m in model.modules())
    other = anydevice.dispatch_model(net(), {"": device}, force_hooks=True, main_device=device)
    assert {t.device for t in other.state_dict().values()} == {torch.device("sim:1")}
    assert other(X).device.type == "cpu"


def test_entries_in_several_spellings_agree(sim):
    want = net()(X)
    model = anydevice.dispatch_model(net(), {"0": 0, "1": torch.device("sim"), "2": "sim:0"})
    assert "_hf_hook" not in vars(model)  # it is one device, so it is just moved
    assert torch.equal(model(X.to("sim:0")).cpu(), want)


def test_hf_device_map_keeps_the_spelling(sim):
    model = anydevice.dispatch_model(net(), {"0": 0, "1": "cpu", "2": "sim:1"})
    assert model.hf_device_map == {"0": 0, "1": "cpu", "2": "sim:1"}
    assert json.loads(json.dumps(model.hf_device_map)) == model.hf_device_map


def test_main_device(sim):
    class Where(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            self.seen = x.device
            return self.head(self.fc(x))

    model = anydevice.dispatch_model(Where(), {"fc": "cpu", "head": 0}, main_device="sim:1")
    model(X)
    assert model.seen == torch.device("sim:1")


@pytest.mark.parametrize(
    ("device_map", "error", "words"),
    [
        ({"0": 0}, DeviceMapError, "1.weight"),
        ({"": "sim:9"}, UnknownDeviceError, "sim:9"),
        ({"": "warp"}, UnknownDeviceError, "warp"),
        ("fastest", UnknownDeviceError, "balanced"),
        ({"": "disk"}, ModelError, "offload_dir"),
        ({"": None}, UnknownDeviceError, "None"),
    ],
)
def test_bad_maps_are_refused_before_anything_moves(sim, device_map, error, words):
    model = net()
    with pytest.raises(error, match=words):
        anydevice.dispatch_model(model, device_map)
    assert {t.device.type for t in model.state_dict().values()} == {"cpu"}
    assert not any("_hf_hook" in vars(m) for m in model.modules())


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"prefetch_depth": -1}, OptionError, "prefetch_depth=-1: how many groups"),
        ({"prefetch_depth": "2"}, OptionError, "prefetch_depth='2'"),
        ({"max_memory": {0: 10.5}}, BudgetError, r"max_memory\[0\]: 10.5"),
    ],
)
@pytest.mark.parametrize("device_map", ["auto", {"": 0}, {"0": 0, "": "cpu"}])
def test_wrong_numbers_are_refused_before_anything_moves(sim, device_map, options, error, words):
    model = net()
    with pytest.raises(error, match=words):
        anydevice.dispatch_model(model, device_map, **options)
    assert {t.device.type for t in model.state_dict().values()} == {"cpu"}


def test_what_does_not_fit_is_refused_before_anything_moves(sim):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(4200, 4200))
    with pytest.raises(DoesNotFitError, match=r"sim:1.*free"):
        anydevice.dispatch_model(model, {"0": 0, "1": 1})
    assert model[0].weight.device.type == "cpu"


def test_names_that_match_nothing_are_warned_of(sim):
    with pytest.warns(UserWarning, match="nothing_such"):
        anydevice.dispatch_model(net(), {"": 0, "nothing_such": 1})


def test_meta_weights_are_named(sim):
    with anydevice.init_empty_weights():
        model = net()
    with pytest.raises(ModelError, match=r"0\.weight.*load_checkpoint_and_dispatch"):
        anydevice.dispatch_model(model, {"": 0})


def test_state_dict_gives_values_of_offloaded_weights(sim):
    with anydevice.init_empty_weights():
        model = net()
    anydevice.cpu_offload(model, 0, state_dict=net().state_dict())
    assert torch.equal(model(X), net()(X))


def test_dispatch_again(sim, tmp_path):
    model, want = net(), net()(X)
    parameters = list(model.parameters())
    for device_map in ({"": 0}, {"0": 1, "1": "cpu", "2": "disk"}, {"0": "cpu", "1": 0, "2": 1}):
        anydevice.dispatch_model(model, device_map, offload_dir=tmp_path, force_hooks=True)
        assert torch.equal(model(X), want)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))


def test_buffers_rest_where_the_module_runs_or_with_it(sim):
    for offload_buffers, place in ((False, "sim"), (True, "cpu")):
        model = anydevice.cpu_offload(net(), 0, offload_buffers=offload_buffers)
        assert model[1].running_mean.device.type == place
        assert torch.equal(model(X), net()(X))


@pytest.mark.parametrize("offload_buffers", [False, True])
def test_running_statistics_are_kept_in_training(sim, offload_buffers):
    plain, model = net().train(), net().train()
    anydevice.cpu_offload(model, 0, offload_buffers=offload_buffers)
    for i in range(3):
        x = torch.randn(5, 4) + i
        torch.testing.assert_close(model(x), plain(x))
    for name, want in plain.named_buffers():
        torch.testing.assert_close(model.get_buffer(name).cpu(), want)


# ---------------------------------------------------------------------- what users do to a model


@pytest.mark.parametrize("kind", OFFLOADS)
def test_read_save_load_copy(sim, kind, tmp_path):
    model, plain = offloaded(kind, tmp_path / "off"), net()
    for name, value in model.state_dict().items():
        assert torch.equal(value.cpu(), plain.state_dict()[name])
    assert torch.equal(model[0].weight + 1, plain[0].weight + 1)
    for again in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        saved_and_loaded(model),
    ):
        assert torch.equal(again(X), plain(X))
        with torch.no_grad():
            again[0].weight.zero_()
        assert not torch.equal(again(X), plain(X))
    assert torch.equal(model(X), plain(X))


def saved_and_loaded(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("kind", OFFLOADS)
@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict_takes_effect(sim, kind, assign, tmp_path):
    model, other = offloaded(kind, tmp_path), net()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    model(X)
    model.load_state_dict(other.state_dict(), assign=assign)
    assert torch.equal(model(X), other(X))


@pytest.mark.parametrize("kind", OFFLOADS)
def test_changes_by_the_user_take_effect(sim, kind, tmp_path):
    model, plain = offloaded(kind, tmp_path), net()
    model(X)
    for m in (model, plain):
        with torch.no_grad():
            m[0].weight.mul_(2)
        m[2].bias = nn.Parameter(torch.full((4,), 7.0))
        m[2].weight.data = torch.eye(4)
    assert torch.equal(model(X), plain(X))


@pytest.mark.parametrize("kind", OFFLOADS)
def test_dtype_may_be_changed(sim, kind, tmp_path):
    model = offloaded(kind, tmp_path).double()
    assert torch.equal(model(X.double()), net().double()(X.double()))


def test_parameters_keep_attributes_and_requires_grad(sim, tmp_path):
    model = net()
    model[0].weight.requires_grad_(False)
    model[0].weight.scale = torch.tensor(0.5)
    model[0].weight.tag = "tag"
    seen = {}

    def look(module, _inputs):
        seen.update(
            tag=module.weight.tag, scale=module.weight.scale, grad=module.weight.requires_grad
        )

    offloaded("disk", tmp_path, model)
    inner = model[0]._old_forward
    model[0]._old_forward = lambda x: (look(model[0], x), inner(x))[1]
    model(X)
    assert seen["tag"] == "tag"
    assert seen["scale"].item() == 0.5
    assert seen["grad"] is False
    assert not model[0].weight.requires_grad


def test_an_optimizer_made_before_still_trains(sim):
    model, plain = net().train(), net().train()
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.1) for m in (model, plain)]
    anydevice.cpu_offload(model, 0)
    for _ in range(3):
        for m, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            m(torch.arange(8.0).reshape(2, 4)).square().sum().backward()
            optimizer.step()
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.detach().cpu(), want.detach())


def test_a_graph_from_before_is_stopped_and_does_not_stand_in_the_way(sim):
    model = net()
    output = model(X)
    anydevice.dispatch_model(model, {"": 0})
    with pytest.raises(ModelError, match="Run the forward again"):
        output.sum().backward()


def test_strides_survive(sim, tmp_path):
    model = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
    stride = model.weight.stride()
    anydevice.dispatch_model(model, {"": 0})
    assert model.weight.stride() == stride
    anydevice.undispatch(model)
    assert model.weight.stride() == stride


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes_and_after(sim, mode):
    model = anydevice.cpu_offload(net(), 0)
    with mode():
        assert torch.equal(model(X), net()(X))
    model(X).sum().backward()
    assert model[0].weight.grad is not None


def test_keyword_arguments_alone(sim):
    class Keywords(nn.Linear):
        def forward(self, *, inputs):
            return super().forward(inputs)

    model = Keywords(4, 4)
    want = model(inputs=X)
    assert torch.equal(anydevice.cpu_offload(model, 0)(inputs=X), want)
    assert torch.equal(model.forward(inputs=X), want)


def test_old_style_weight_norm(sim, tmp_path):
    def make():
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return nn.Sequential(
                nn.utils.weight_norm(nn.Linear(4, 4)), nn.utils.spectral_norm(nn.Linear(4, 4))
            ).eval()

    want = make()(X)
    for device_map in ({"": 0}, {"0": "cpu", "1": 0}, {"0": 1, "1": "disk"}, {"0": 1, "1": 0}):
        model = anydevice.dispatch_model(make(), device_map, offload_dir=tmp_path, force_hooks=True)
        torch.testing.assert_close(model(X), want)


def test_a_generator_forward(sim):
    class Stream(nn.Linear):
        def forward(self, x):
            for _ in range(3):
                x = super().forward(x)
                yield x

    model = Stream(4, 4)
    want = [t.detach() for t in model(X)]
    anydevice.cpu_offload(model, 0)
    got = [t.detach().cpu() for t in model(X)]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert model.weight.device.type == "cpu"


def test_preload_module_classes(sim):
    class Borrow(nn.Module):
        def __init__(self):
            super().__init__()
            self.dense = nn.Linear(4, 4)
            self.other = nn.Linear(4, 4)

        def forward(self, x):
            self.seen = self.dense.weight.device
            return self.other(torch.addmm(self.dense.bias, x, self.dense.weight))

    model = nn.Sequential(Borrow(), nn.Linear(4, 4))
    want = model(X)
    anydevice.cpu_offload(model, 0, preload_module_classes=["Borrow"])
    assert torch.equal(model(X), want)
    assert model[0].seen == torch.device("sim:0")


@pytest.mark.parametrize("device_map", [{"": 0}, {"0": 0, "1": "cpu", "2": 1}])
def test_torch_compile_is_right(sim, device_map):
    model, want = net(), net()(X)
    anydevice.dispatch_model(model, device_map, force_hooks=True)
    compiled = torch.compile(model, backend="eager")
    for _ in range(3):
        with torch.no_grad():
            assert torch.equal(compiled(X), want)
    torch.compiler.reset()  # the compiler's caches keep weights


# ---------------------------------------------------------------------- disk


def test_whole_model_on_disk(sim, tmp_path):
    model = anydevice.dispatch_model(net(), {"": "disk"}, offload_dir=tmp_path)
    assert torch.equal(model(X), net()(X))


def test_a_folder_of_another_model_is_refused(sim, tmp_path):
    offloaded("disk", tmp_path)
    other = net()
    with torch.no_grad():
        other[0].weight.add_(1)
    with pytest.raises(OffloadStoreError, match="another model"):
        offloaded("disk", tmp_path, other)
    assert {t.device.type for t in other.state_dict().values()} == {"cpu"}
    offloaded("disk", tmp_path)  # the same weights: reused


def test_weights_offloaded_before_are_taken_from_the_folder(sim, tmp_path):
    anydevice.utils.offload_state_dict(tmp_path, net().state_dict())
    with anydevice.init_empty_weights():
        model = net()
    anydevice.dispatch_model(model, {"": "disk"}, offload_dir=tmp_path, main_device=0)
    plain = net()
    torch.testing.assert_close(model(X), plain(X))


# ---------------------------------------------------------------------- back again


def test_hooks_removed_leave_an_ordinary_model(sim, tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
            self.head.weight = self.emb.weight

        def forward(self, ids):
            return self.head(self.emb(ids))

    ids = torch.tensor([1, 2])
    for device_map in ({"": "cpu"}, {"": "disk"}, {"emb": "cpu", "head": "disk"}):
        model = Tied()
        want = model(ids)
        anydevice.dispatch_model(
            model, device_map, main_device=0, offload_dir=tmp_path / str(len(str(device_map)))
        )
        assert torch.equal(model(ids), want)
        remove_hook_from_submodules(model)
        assert model.head.weight is model.emb.weight
        assert sum(p.numel() for p in model.parameters()) == 20
        assert torch.equal(model(ids), want)
        assert not has_offloaded_params(model)


class Buffered(nn.Module):
    """Buffers of every kind: beside parameters, in a module of their own, tied, the model's own."""

    class Turn(nn.Module):
        def __init__(self, table):
            super().__init__()
            self.register_buffer("table", table, persistent=False)

        def forward(self, x):
            return x * self.table

    def __init__(self):
        super().__init__()
        table = torch.tensor([0.5, 1.0, 2.0, 4.0])
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), self.Turn(table)) for _ in range(2)
        )
        self.turn = self.Turn(torch.ones(4) / 2)
        self.register_buffer("shift", torch.arange(4.0))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.turn(x) + self.shift


def offload_all(how, model, tmp_path):
    if how == "cpu_offload":
        return anydevice.cpu_offload(model, 0)
    if how == "disk_offload":
        return anydevice.disk_offload(model, tmp_path, 0)
    if how == "attach":
        attach_align_device_hook(model, 0, offload=True)
        return model
    return anydevice.dispatch_model(model, {"": "cpu"}, main_device=0)


@pytest.mark.parametrize("how", ["cpu_offload", "disk_offload", "attach", "dispatch"])
@pytest.mark.parametrize("whole", [True, False], ids=["submodules", "recurse"])
def test_buffers_join_their_parameters_when_hooks_are_removed(sim, tmp_path, how, whole):
    torch.manual_seed(0)
    model = Buffered()
    plain = copy.deepcopy(model)
    offload_all(how, model, tmp_path)
    assert model.turn.table.device.type == "sim"
    model(X), plain(X)  # running statistics change
    if whole:
        remove_hook_from_submodules(model)
    else:
        remove_hook_from_module(model, recurse=True)
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"cpu"}
    assert model.blocks[0][2].table is model.blocks[1][2].table
    torch.testing.assert_close(model.state_dict(), plain.state_dict())
    torch.testing.assert_close(model.eval()(X), plain.eval()(X))
    gc.collect()
    torch.sim.synchronize(0)
    assert torch.sim.memory_allocated(0) == 0  # the engine's buffers are given back, too


def test_a_model_whose_parametrizations_make_classes_is_freed(sim):
    """Their functions hold the module, so what keeps such a class keeps the model."""
    linear = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, 4))
    model = torch.nn.Sequential(linear, torch.nn.Linear(4, 4))
    anydevice.dispatch_model(model, {"0": "sim:0", "1": "sim:1"})
    model(torch.ones(1, 4)).sum().backward()
    del model, linear
    gc.collect()
    torch.sim.synchronize(0)
    assert [torch.sim.memory_allocated(i) for i in range(2)] == [0, 0]


def test_buffers_that_are_mapped_to_a_device_stay_there_with_all_that_are_tied_to_them(sim):
    model = Buffered()
    device_map = {"": "cpu", "blocks.1.2": 0, "shift": 1}
    anydevice.dispatch_model(model, device_map, main_device=0)
    remove_hook_from_submodules(model)
    assert model.blocks[0][2].table is model.blocks[1][2].table
    assert str(model.blocks[0][2].table.device) == "sim:0"
    assert str(model.shift.device) == "sim:1"
    assert model.turn.table.device.type == "cpu"


def test_one_hook_removed_leaves_buffers_where_the_others_need_them(sim):
    model = Buffered().eval()
    want = model(X)
    anydevice.cpu_offload(model, 0)
    remove_hook_from_module(model)
    assert torch.allclose(model(X.to("sim:0")).cpu(), want)
    anydevice.cpu_offload(model, 1)  # hooks again, elsewhere
    assert str(model.turn.table.device) == "sim:1"
    assert torch.allclose(model(X), want)


def test_undispatch(sim, tmp_path):
    model, want = offloaded("disk", tmp_path), net()(X)
    assert anydevice.undispatch(model, "sim:1") is model
    assert {t.device for t in model.state_dict().values()} == {torch.device("sim:1")}
    assert not hasattr(model, "hf_device_map")
    anydevice.undispatch(model)
    for file in tmp_path.iterdir():
        file.unlink()
    assert torch.equal(model(X), want)


def test_undispatch_says_why_it_does_not_fit(sim):
    model = nn.Sequential(nn.Linear(3000, 3000), nn.Linear(3000, 3000))
    anydevice.dispatch_model(model, {"0": 0, "1": 1})
    with pytest.raises(DoesNotFitError, match="sim:0"):
        anydevice.undispatch(model, 0)
    assert model(torch.ones(1, 3000)).shape == (1, 3000)
    with pytest.raises(DeviceMapError, match="disk"):
        anydevice.undispatch(model, "disk")


def test_get_state_dict_offloaded_model(sim):
    model = anydevice.dispatch_model(net(), {"0": 0, "1": "cpu", "2": 1})
    state = anydevice.utils.get_state_dict_offloaded_model(model)
    plain = net().state_dict()
    assert state.keys() == plain.keys()
    assert all(v.device.type == "cpu" and torch.equal(v, plain[k]) for k, v in state.items())


# ---------------------------------------------------------------------- turns on one device


def test_cpu_offload_with_hook(sim):
    models, handles, handle = [], [], None
    for _ in range(3):
        model, handle = anydevice.cpu_offload_with_hook(net(), 0, handle)
        models.append(model)
        handles.append(handle)

    def places():
        return [m[0].weight.device.type for m in models]

    wants = net()(X)
    x = X
    assert places() == ["cpu"] * 3
    assert torch.equal(models[0](x).cpu(), wants)
    assert places() == ["sim", "cpu", "cpu"]
    for _ in range(2):
        models[1](X)
        assert places() == ["cpu", "sim", "cpu"]
    models[2](X)
    assert places() == ["cpu", "cpu", "sim"]
    handles[2].offload()
    assert places() == ["cpu"] * 3
    handles[0].remove()
    assert "forward" not in vars(models[0])
    assert torch.equal(models[0](X), wants)


def test_cpu_offload_with_hook_keeps_changes(sim):
    model, handle = anydevice.cpu_offload_with_hook(net(), 0)
    weight = model[0].weight
    model(X)
    with torch.no_grad():
        model[0].weight.fill_(2)
        model[1].running_mean.fill_(3)
    handle.offload()
    assert model[0].weight is weight
    assert torch.equal(weight, torch.full((4, 4), 2.0))
    assert torch.equal(model[1].running_mean, torch.full((4,), 3.0))
    want = net()
    with torch.no_grad():
        want[0].weight.fill_(2)
        want[1].running_mean.fill_(3)
    assert torch.equal(model(X).cpu(), want(X))


# ---------------------------------------------------------------------- casting


@pytest.mark.parametrize("storage", [torch.float8_e4m3fn, torch.bfloat16])
def test_layerwise_casting(sim, storage):
    model, plain = net(), net()
    weight = model[0].weight
    anydevice.big_modeling.attach_layerwise_casting_hooks(
        model, storage, torch.float32, skip_modules_classes=(nn.BatchNorm1d,)
    )
    assert model[0].weight is weight
    assert {m.weight.dtype for m in (model[0], model[2])} == {storage}
    assert model[1].weight.dtype == torch.float32
    with torch.no_grad():
        for part in (plain[0], plain[2]):
            for parameter in part.parameters():
                parameter.copy_(parameter.to(storage).float())
        assert torch.equal(model(X), plain(X))
    assert model[0].weight.dtype == storage


def test_layerwise_casting_by_name_and_as_a_whole():
    model = nn.ModuleDict({"norm": nn.LayerNorm(4), "fc": nn.Linear(4, 4)})
    anydevice.hooks.attach_layerwise_casting_hooks(
        model, torch.bfloat16, torch.float32, skip_modules_pattern="norm"
    )
    assert model["norm"].weight.dtype == torch.float32
    assert model["fc"].weight.dtype == torch.bfloat16
    whole = nn.Linear(4, 4)
    anydevice.hooks.attach_layerwise_casting_hooks(whole, torch.bfloat16, torch.float32)
    assert whole.weight.dtype == torch.bfloat16
    assert whole(X).dtype == torch.float32


def test_only_layers_that_bear_a_small_dtype_are_cast():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))
            self.layers = nn.Sequential(
                nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4), nn.GroupNorm(2, 4), nn.PReLU()
            )
            self.embed = nn.Embedding(3, 4)
            self.rnn = nn.GRU(4, 4)

        def forward(self, ids):
            x = self.layers(self.embed(ids).T[None])[0].T * self.scale
            return self.rnn(x)[0]

    small = {"layers.0.weight", "layers.0.bias", "embed.weight"}
    for options in ({"skip_modules_pattern": ()}, {}):
        model, plain = Own().eval(), Own().eval()
        plain.load_state_dict(model.state_dict())
        anydevice.hooks.attach_layerwise_casting_hooks(
            model, torch.float8_e4m3fn, torch.float32, **options
        )
        cast = {n for n, p in model.state_dict().items() if p.dtype == torch.float8_e4m3fn}
        assert cast == small
        with torch.no_grad():
            for name in small:
                value = plain.get_parameter(name)
                value.copy_(value.to(torch.float8_e4m3fn).float())
            ids = torch.tensor([0, 2, 1])
            torch.testing.assert_close(model(ids), plain(ids))
    norm = nn.BatchNorm1d(4)
    hook = anydevice.hooks.LayerwiseCastingHook(torch.bfloat16, torch.float32, False)
    anydevice.hooks.add_hook_to_module(norm, hook)  # the user says so
    assert norm.weight.dtype == torch.bfloat16


def test_layerwise_casting_under_offload(sim):
    plain, model = net(), net()
    anydevice.cpu_offload(model, 0)
    anydevice.hooks.attach_layerwise_casting_hooks(
        model, torch.bfloat16, torch.float32, skip_modules_pattern=("nothing",)
    )
    with torch.no_grad():
        for tensor in (*plain[0].parameters(), *plain[2].parameters()):
            tensor.copy_(tensor.bfloat16().float())
        for _ in range(2):
            torch.testing.assert_close(model(X), plain(X))
    assert {p.dtype for p in model[1].parameters()} == {torch.float32}
    assert {m.weight.dtype for m in (model[0], model[2])} == {torch.bfloat16}
    assert {p.device.type for p in model.parameters()} == {"cpu"}


def test_a_layer_placed_by_its_weights_takes_inputs_from_any_device(sim):
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8, bias=False)).eval()
    x = torch.randn(2, 8)
    with torch.no_grad():
        want = model(x)
        anydevice.dispatch_model(model, {"1.weight": 0, "0": 1})
        assert torch.allclose(model(x), want, atol=1e-6)


@pytest.mark.parametrize("make", [nn.MultiheadAttention, nn.TransformerEncoderLayer])
def test_layerwise_casting_of_modules_that_use_weights_of_their_parts(sim, make):
    model = nn.ModuleDict({"inner": make(8, 2)}).eval()
    want = model["inner"](*[torch.ones(3, 8)] * (3 if make is nn.MultiheadAttention else 1))
    anydevice.dispatch.attach_layerwise_casting_hooks(
        model, torch.bfloat16, torch.float32, skip_modules_classes=()
    )
    dtypes = {n.rpartition(".")[0]: p.dtype for n, p in model.named_parameters()}
    assert {d for n, d in dtypes.items() if "norm" not in n} == {torch.bfloat16}
    assert {d for n, d in dtypes.items() if "norm" in n} <= {torch.float32}
    got = model["inner"](*[torch.ones(3, 8)] * (3 if make is nn.MultiheadAttention else 1))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=0.1, rtol=0.1)


def test_hooks_of_the_users_outlive_a_dispatch(sim, tmp_path):
    class Twice(anydevice.hooks.ModelHook):
        calls = 0

        def pre_forward(self, module, *args, **kwargs):
            self.calls += 1
            return (args[0] * 2,), kwargs

    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).eval()
    own = Twice()
    anydevice.hooks.add_hook_to_module(model[2], own)
    anydevice.dispatch.attach_layerwise_casting_hooks(
        model, torch.bfloat16, torch.float32, skip_modules_classes=(nn.BatchNorm1d,)
    )
    x = torch.ones(2, 4)
    want = model(x)
    anydevice.cpu_offload(model, 0)
    torch.testing.assert_close(model(x).cpu(), want)
    anydevice.dispatch_model(model, {"0": 0, "1": "cpu", "2": "disk"}, offload_dir=tmp_path)
    torch.testing.assert_close(model(x).cpu(), want)
    anydevice.cpu_offload_with_hook(model, 1)
    anydevice.cpu_offload(model, 0)
    torch.testing.assert_close(model(x).cpu(), want)
    assert own.calls == 4


def test_two_parameters_over_one_memory_stay_so_wherever_it_goes(sim):
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = nn.Parameter(model[0].weight.data)
    one, other = model.parameters()
    wanted = model(X)
    anydevice.dispatch_model(model, {"": 0}, force_hooks=True)
    assert all(a is b for a, b in zip(model.parameters(), (one, other), strict=True))
    assert one.device.type == other.device.type == "sim"
    assert one.untyped_storage()._cdata == other.untyped_storage()._cdata
    assert torch.allclose(model(X).cpu(), wanted)
    anydevice.undispatch(model)
    assert one.device.type == "cpu"
    assert one.data_ptr() == other.data_ptr()


@pytest.mark.parametrize("again", [lambda m: anydevice.dispatch_model(m, {"": 0}), offloaded_again])
def test_a_lone_module_is_dispatched_again_with_its_buffers(sim, again):
    model = nn.BatchNorm1d(4).eval()
    wanted = model(X)
    anydevice.cpu_offload(model, 0)
    again(model)
    assert model.running_mean.device.type == "sim"
    assert torch.allclose(model(X.to("sim:0")).cpu(), wanted)


@pytest.mark.parametrize(
    "call",
    [
        lambda folder: anydevice.dispatch_model("model", "cpu"),
        lambda folder: anydevice.cpu_offload("model"),
        lambda folder: anydevice.cpu_offload_with_hook("model"),
        lambda folder: anydevice.disk_offload("model", folder),
        lambda folder: anydevice.undispatch("model", "cpu"),
        lambda folder: anydevice.infer_auto_device_map("model"),
        lambda folder: anydevice.load_checkpoint_in_model("model", folder),
        lambda folder: anydevice.load_checkpoint_and_dispatch("model", folder, device_map="auto"),
    ],
)
def test_what_is_no_model_is_refused(tmp_path, call):
    with pytest.raises(anydevice.errors.ModelError, match="the model is a str"):
        call(tmp_path)
