"""Weights and modules that are added after a dispatch are where the module runs."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import anydevice
from anydevice.errors import ModelError

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(8, 8)
        self.o = nn.Linear(8, 8)

    def forward(self, x):
        x = x + self.o(torch.relu(self.q(x)))
        return x * self.scale + self.shift if hasattr(self, "scale") else x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 8)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Lora(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def set_head(net):
    net.head = nn.Linear(8, 4)


def set_part(net):
    net.layers[1].q = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))


def set_behind_the_back(net):
    net.layers[1]._modules["q"] = nn.Linear(8, 8)


def append(net):
    net.layers.append(Block())


def delete(net):
    del net.layers[1]


def wrap(net):
    net.layers[1] = Lora(net.layers[1])


def parametrize(net):
    parametrizations.weight_norm(net.layers[1].q)


def prune_part(net):
    prune.l1_unstructured(net.layers[1].q, "weight", 0.5)


def add_weights(net):
    net.layers[1].scale = nn.Parameter(torch.full((8,), 2.0))
    net.layers[1].register_buffer("shift", torch.ones(8))


def set_parameter(net):
    net.layers[1].q.weight = nn.Parameter(torch.randn(8, 8))


def from_another_device(net):
    net.layers[1].q = nn.Linear(8, 8).to(net.layers[0].q.weight.device)


CHANGES = [
    set_head,
    set_part,
    set_behind_the_back,
    append,
    delete,
    wrap,
    parametrize,
    prune_part,
    add_weights,
    set_parameter,
    from_another_device,
]


def dispatched(where, folder):
    torch.manual_seed(0)
    net = Net()
    plain = copy.deepcopy(net)
    device_map = {"layers.0": 0, "layers.1": where, "head": where}
    anydevice.dispatch_model(net, device_map, offload_dir=folder)
    net(X)
    return net, plain


@pytest.mark.parametrize("where", [1, "cpu", "disk"])
def test_a_changed_model_runs_and_learns(sim, tmp_path, where):
    for i, change in enumerate(CHANGES):
        net, plain = dispatched(where, tmp_path / str(i))
        for model in (net, plain):
            torch.manual_seed(1)
            change(model)
        with torch.no_grad():
            for _ in range(2):
                torch.testing.assert_close(net(X).cpu(), plain(X), msg=change.__name__)
        for model in (net, plain):
            optimizer = torch.optim.SGD(model.parameters(), 1e-3)
            model(X).square().sum().backward()
            assert all(p.grad is not None for p in model.parameters()), change.__name__
            optimizer.step()
        again = net if change is prune_part else copy.deepcopy(net)  # torch cannot copy that one
        with torch.no_grad():
            for model in (net, again, anydevice.undispatch(net)):
                torch.testing.assert_close(model(X).cpu(), plain(X), rtol=1e-4, atol=1e-4)
        assert not any("_hf_hook" in vars(module) for module in net.modules())


def test_a_part_that_is_called_by_itself_is_looked_at_too(sim):
    net, plain = dispatched("cpu", None)
    for model in (net, plain):
        torch.manual_seed(1)
        model.layers[1].q = Lora(model.layers[1].q)
    torch.testing.assert_close(net.layers[1](X).cpu(), plain.layers[1](X))
    for model in (net, plain):
        torch.manual_seed(2)
        model.layers[1].q.base = nn.Sequential(model.layers[1].q.base, nn.Tanh())
    torch.testing.assert_close(net.layers[1].q(X).cpu(), plain.layers[1].q(X))
    torch.testing.assert_close(net(X).cpu(), plain(X))


def test_a_model_that_does_not_change_is_grouped_once(sim, monkeypatch):
    from anydevice.hooks.align import AlignDevicesHook

    net, _ = dispatched("cpu", None)
    monkeypatch.setattr(AlignDevicesHook, "_regroup", None)
    for _ in range(3):
        net(X)
        net.layers[1](X)


@pytest.mark.parametrize("where", [1, "cpu"])
@pytest.mark.parametrize(
    "move", [lambda m: m.cpu(), lambda m: m.to("sim:1"), lambda m: m.to(torch.device("sim:0"))]
)
def test_moving_a_divided_model_is_refused_and_names_the_remedy(sim, where, move):
    net, plain = dispatched(where, None)
    before = {name: tensor.device for name, tensor in net.state_dict().items()}
    for whole in (net, nn.Sequential(net)):
        with pytest.raises(ModelError, match=r"undispatch\(model"):
            move(whole)
    assert {name: tensor.device for name, tensor in net.state_dict().items()} == before
    torch.testing.assert_close(net(X).cpu(), plain(X))
    anydevice.undispatch(net)
    net.to("sim:1")


def test_a_part_that_is_moved_by_hand_still_runs(sim):
    net, plain = dispatched(1, None)
    for device in ("cpu", "sim:0", "sim:1"):
        net.layers.to(device)
        torch.testing.assert_close(net(X).cpu(), plain(X))


def test_casting_a_divided_model_works(sim):
    net, plain = dispatched("cpu", None)
    torch.testing.assert_close(net.double()(X.double()).cpu(), plain.double()(X.double()))
    assert net.bfloat16()(X.bfloat16()).dtype == torch.bfloat16


def test_adapters_of_peft(sim, tmp_path):
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q"], init_lora_weights=False)
    torch.manual_seed(0)
    trained = peft.get_peft_model(Net(), config)
    trained.save_pretrained(tmp_path / "adapter")
    want = trained(X)
    for where in (1, "cpu", "disk"):
        net, _ = dispatched(where, tmp_path / str(where))
        config = peft.PeftConfig.from_pretrained(tmp_path / "adapter")
        config.inference_mode = False
        lora = peft.get_peft_model(net, config)
        weights = peft.load_peft_weights(str(tmp_path / "adapter"), device="cpu")
        peft.set_peft_model_state_dict(lora, weights)
        torch.testing.assert_close(lora(X).cpu(), want)
        lora(X).sum().backward()
        lora.load_adapter(str(tmp_path / "adapter"), "second")
        lora.set_adapter("second")
        torch.testing.assert_close(lora(X).cpu(), want)


def test_hooks_are_not_stripped_in_silence(sim, tmp_path):
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q"])
    peft.get_peft_model(Net(), config).save_pretrained(tmp_path)
    net, plain = dispatched("cpu", None)
    with pytest.raises(ModelError, match="load_adapter"):
        peft.PeftModel.from_pretrained(net, tmp_path)
    torch.testing.assert_close(net(X).cpu(), plain(X))
