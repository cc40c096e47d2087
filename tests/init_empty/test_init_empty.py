from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from anydevice import init_empty_weights, init_on_device
from anydevice.errors import UnknownDeviceError


class Rotary(nn.Module):
    """Buffers, plain attributes and parameters, made by chains of operators."""

    def __init__(self, width=8, length=6):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) * 0.02)
        inv_freq = 1.0 / (10000 ** (torch.arange(0, width, 2).float() / width))
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.original = self.inv_freq
        table = torch.zeros(length, width)
        position = torch.arange(length)[:, None]
        table[:, 0::2] = torch.sin(position * inv_freq)
        table[:, 1::2] = torch.cos(position * inv_freq)
        self.register_buffer("table", table)
        self.mask = torch.tril(torch.ones(length, length)).bool()
        self.rates = [x.item() for x in torch.linspace(0, 0.1, 3)]
        self.steps = torch.arange(3).tolist()
        self.register_buffer("scale", torch.full((), 2.0))
        self.scale.mul_(3)
        if torch.ones(1).sum() > 0:
            self.flag = True
        self.base = nn.Parameter(inv_freq * 2)


def test_parameters_are_empty_and_all_else_is_real():
    plain = Rotary()
    with init_empty_weights():
        model = Rotary()
    assert {n for n, p in model.named_parameters() if p.is_meta} == {"weight", "base"}
    assert dict(model.named_buffers()).keys() == dict(plain.named_buffers()).keys()
    for name, buffer in plain.named_buffers():
        assert torch.equal(getattr(model, name), buffer), name
    assert model.original is model.inv_freq
    assert torch.equal(model.mask, plain.mask)
    assert model.rates == plain.rates
    assert model.steps == [0, 1, 2]
    assert model.flag
    assert model.weight.requires_grad
    assert isinstance(model.weight, nn.Parameter)


def test_include_buffers():
    with init_empty_weights(include_buffers=True):
        model = nn.BatchNorm1d(4)
    assert all(t.is_meta for t in (*model.parameters(), *model.buffers()))
    with init_empty_weights():
        model = nn.BatchNorm1d(4)
    assert model.weight.is_meta
    assert not any(b.is_meta for b in model.buffers())


BIG = 1 << 40  # bytes that no machine of the tests has


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Parameter(torch.randn(BIG)),
        lambda: nn.Parameter(torch.ones(BIG // 8, 8) * 0.5 + 1),
        lambda: nn.Parameter(torch.empty(BIG).normal_(0, 0.02)),
        lambda: nn.Parameter(torch.full((BIG,), 0.5).half(), requires_grad=False),
        lambda: nn.Parameter(torch.zeros(BIG).uniform_(-1, 1).view(8, -1).t()),
        lambda: nn.Parameter(nn.init.trunc_normal_(torch.empty(8, BIG // 8))),
        lambda: nn.Parameter(torch.cat([torch.rand(BIG), torch.rand(BIG)])),
        lambda: nn.Linear(1 << 20, 1 << 20).weight,
        lambda: nn.Embedding(1 << 20, 1 << 20).weight,
    ],
)
def test_a_parameter_costs_no_memory(make):
    with init_empty_weights():
        module = nn.Module()
        module.w = make()
        module.register_buffer("b", torch.arange(3))
    assert module.w.is_meta
    assert module.b.tolist() == [0, 1, 2]


def test_no_ordinary_module_is_special():
    with init_empty_weights():
        for module in (
            nn.LSTM(4, 4, num_layers=2, bidirectional=True),
            nn.MultiheadAttention(8, 2),
            nn.Transformer(8, 2, 1, 1, 16, batch_first=True),
            nn.Conv2d(3, 8, 3),
            nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        ):
            assert all(p.is_meta for p in module.parameters())


def test_recurrent_weights_are_one_in_list_and_table():
    with init_empty_weights():
        lstm = nn.LSTM(4, 4)
    assert all(a is b for a, b in zip(lstm._flat_weights, lstm.parameters(), strict=True))


def test_ties_hold():
    shared = nn.Parameter(torch.ones(2, 2))
    with init_empty_weights():
        a, b = nn.Linear(2, 2), nn.Linear(2, 2)
        a.weight = b.weight
        c, d = nn.Linear(2, 2), nn.Linear(2, 2)
        c.weight = d.weight = shared
    assert a.weight is b.weight
    assert c.weight is d.weight
    assert c.weight.is_meta
    assert not shared.is_meta


def test_attributes_and_class_of_a_parameter_survive():
    class Mine(nn.Parameter):
        pass

    with init_empty_weights():
        module = nn.Module()
        parameter = Mine(torch.tensor([1.0]), requires_grad=False)
        parameter.tag = "tag"
        module.w = parameter
    assert type(module.w) is Mine
    assert module.w.tag == "tag"
    assert not module.w.requires_grad


def test_random_buffers_that_depend_on_each_other_agree():
    with init_empty_weights():
        module = nn.Module()
        noise = torch.randn(5)
        module.register_buffer("noise", noise)
        module.register_buffer("twice", noise * 2)
        module.view = noise[1:3]
    assert torch.equal(module.twice, module.noise * 2)
    assert module.view.data_ptr() == module.noise[1:3].data_ptr()


def test_dtype_and_device_that_were_asked_for():
    with init_empty_weights():
        module = nn.Linear(2, 2, dtype=torch.bfloat16)
        module.register_buffer("b", torch.zeros(2, device="cpu", dtype=torch.float16))
        module.register_buffer("none", None)
        explicit = torch.zeros(2).to("cpu")
    assert module.weight.dtype == torch.bfloat16
    assert module.b.dtype == torch.float16
    assert explicit.tolist() == [0, 0]


def test_nested_and_after():
    with init_empty_weights():
        with init_empty_weights(include_buffers=True):
            assert nn.BatchNorm1d(2).running_mean.is_meta
        assert not nn.BatchNorm1d(2).running_mean.is_meta
    assert not nn.Linear(2, 2).weight.is_meta
    with pytest.raises(ZeroDivisionError), init_empty_weights():
        raise ZeroDivisionError
    assert not nn.Linear(2, 2).weight.is_meta
    assert not torch.randn(2).is_meta


def test_threads_have_their_own_contexts():
    seen, inside, done = {}, threading.Event(), threading.Event()

    def bystander():
        inside.wait(10)
        seen["weight"] = nn.Linear(2, 2).weight.is_meta
        with init_on_device("cpu"):
            seen["cpu"] = nn.Linear(2, 2).weight.is_meta
        done.set()

    thread = threading.Thread(target=bystander)
    thread.start()
    with init_empty_weights():
        inside.set()
        done.wait(10)
        assert nn.Linear(2, 2).weight.is_meta
    thread.join()
    assert seen == {"weight": False, "cpu": False}


@pytest.mark.parametrize("include_buffers", [None, False, True])
def test_init_on_device(sim, include_buffers):
    with init_on_device("sim:1", include_buffers=include_buffers):
        module = nn.BatchNorm1d(4)
        module.extra = nn.Parameter(torch.ones(2))
    assert module.weight.device == module.extra.device == torch.device("sim:1")
    assert module.running_mean.device.type == ("sim" if include_buffers else "cpu")
    assert torch.equal(module.weight.cpu(), torch.ones(4))


def test_a_device_that_is_not_here(sim):
    with pytest.raises(UnknownDeviceError, match="sim:7"), init_on_device("sim:7"):
        pass
