"""Modules that do unusual things, on every map: what they give, write and learn is right."""

from __future__ import annotations

import asyncio
import copy
import threading
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import anydevice
from anydevice.hooks import attach_align_device_hook_on_blocks

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
PLACES = [1, "cpu", "disk"]


def linear():
    return nn.Linear(8, 8)


class Pair(nn.Module):
    """Two parts on different devices, and the code that combines them."""

    def __init__(self, a=None, b=None):
        super().__init__()
        self.a, self.b = a or linear(), b or linear()


class Cells(Pair):
    """Recurrent cells on alternating devices."""

    def __init__(self):
        super().__init__(nn.GRUCell(8, 8), nn.LSTMCell(8, 8))

    def forward(self, x):
        h, g, c, out = torch.zeros_like(x), x.new_zeros(x.shape), torch.zeros(x.shape), []
        for _ in range(3):
            h = self.a(x, h)
            g, c = self.b(h, (g, c))
            out.append(g + c)
        return torch.stack(out).sum(0) + h


class Adds(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = linear()

    def forward(self, x, total, seen=None):
        total.add_(self.fc(x))
        if seen is not None:
            seen[0].mul_(2)
            seen.append(x.detach())
        return total


class WritesArguments(Pair):
    """A part writes into its arguments: a tensor, a view of one, and one in a list."""

    def __init__(self):
        super().__init__(None, Adds())

    def forward(self, x):
        x = self.a(x)
        total, cache, seen = torch.zeros_like(x), x.new_zeros(2, *x.shape), [x.new_ones(2)]
        y = self.b(x, total, seen)
        self.b(x, cache[1], seen)
        return total + y + cache.sum(0) + seen[0].sum() + seen[1]


class UsesModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = linear()

    def forward(self, x, other):
        return other(self.fc(x)) + F.linear(x, other.weight)


class GivesModule(Pair):
    """A module is given to another as an argument."""

    def __init__(self):
        super().__init__(UsesModule(), None)

    def forward(self, x):
        return self.a(x, self.b) + self.a(x, other=self.b)


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight.t()


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    scripted_product = torch.jit.script(_product)


class ScriptsWeights(Pair):
    """A function compiled by TorchScript gets the weight of a part."""

    def forward(self, x):
        return scripted_product(self.a(x), self.b.weight)


class Packs(Pair):
    """An operator wants its lengths on the host."""

    def __init__(self):
        super().__init__(None, nn.GRU(8, 8, batch_first=True))

    def forward(self, x):
        lengths = torch.tensor([2, 1, 2], device=x.device)
        x = self.a(x)[:, None].repeat(1, 2, 1)
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.b(packed)[0], batch_first=True)[0].sum(1)


class WantsHost(Pair):
    """Other operators that take host tensors only."""

    def forward(self, x):
        where = torch.tensor([2, 5], device=x.device)
        x = self.b(self.a(x))
        return torch.cat(torch.tensor_split(x, where, dim=1)[::-1], 1) + float(
            x.detach().numpy().mean()
        )


class OwnParameter(nn.Parameter):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


class HasOwnParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = OwnParameter(torch.randn(8, 8))

    def forward(self, x):
        assert type(self.weight) is OwnParameter
        return x @ self.weight


class ParameterClass(Pair):
    """A Parameter class with its own ``__torch_function__``."""

    def __init__(self):
        super().__init__(None, HasOwnParameter())

    def forward(self, x):
        return self.b(self.a(x))


class Stage(nn.Module):
    """Never called: its parts are."""

    def __init__(self):
        super().__init__()
        self.fc, self.norm = linear(), nn.BatchNorm1d(8)


class UsesParts(Pair):
    """A part is never called itself: its own parts are, by somebody else."""

    def __init__(self):
        super().__init__(None, Stage())

    def forward(self, x):
        return self.b.norm(self.b.fc(self.a(x)))


class Containers(Pair):
    """Parts in containers without a forward, nested."""

    def __init__(self):
        stage = nn.ModuleDict({"fc": linear(), "norm": nn.BatchNorm1d(8)})
        super().__init__(None, nn.ModuleList([stage, nn.ModuleList([linear()])]))

    def forward(self, x):
        x = self.b[0]["norm"](self.b[0]["fc"](self.a(x)))
        return x + self.b[1][0](x)


class Recomputes(nn.Module):
    """Its body is a function that is run again in backward."""

    reentrant = False

    def __init__(self):
        super().__init__()
        self.fc, self.out = linear(), linear()

    def body(self, x):
        return F.linear(torch.relu(self.fc(x)), self.out.weight) + self.out.bias

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=self.reentrant)


class RecomputesReentrant(Recomputes):
    reentrant = True


class ProductOfModule(torch.autograd.Function):
    """Finds the weight by its module in backward."""

    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        return x @ module.weight.t()

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.module.weight, None


class ProductOfWeight(torch.autograd.Function):
    """Saves the weight."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


class OwnBackward(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = linear()

    def forward(self, x):
        return ProductOfModule.apply(x, self.fc) + ProductOfWeight.apply(x, self.fc.weight)


class Second(Pair):
    part = OwnBackward

    def __init__(self):
        super().__init__(None, self.part())

    def forward(self, x):
        return self.b(self.a(x))


class SecondRecomputes(Second):
    part = Recomputes


class SecondRecomputesReentrant(Second):
    part = RecomputesReentrant


class OwnBackwardAcross(Pair):
    """An autograd function gets the weight of a part on another device."""

    def forward(self, x):
        x = self.a(x)
        return ProductOfModule.apply(x, self.b) + ProductOfWeight.apply(x, self.b.weight)


KINDS = [
    Second,
    SecondRecomputes,
    SecondRecomputesReentrant,
    OwnBackwardAcross,
    Cells,
    WritesArguments,
    GivesModule,
    ScriptsWeights,
    Packs,
    WantsHost,
    ParameterClass,
    UsesParts,
    Containers,
]


def divided(model, where, folder):
    return anydevice.dispatch_model(model, {"a": 0, "b": where}, main_device=0, offload_dir=folder)


def step(model):
    model.zero_grad()
    model(X).square().sum().backward()
    return {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.filterwarnings("ignore:None of the inputs:UserWarning")
def test_each_kind_gives_and_learns_what_it_does_undivided(sim, tmp_path, kind, where):
    torch.manual_seed(0)
    plain = kind()
    model = divided(copy.deepcopy(plain), where, tmp_path)
    for _ in range(2):
        torch.testing.assert_close(model(X).cpu(), plain(X), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(step(model), step(plain), rtol=1e-3, atol=1e-3)
    with torch.inference_mode():
        torch.testing.assert_close(model(X).cpu(), plain(X), rtol=1e-4, atol=1e-4)
    got = {name: buffer.cpu() for name, buffer in model.named_buffers()}
    torch.testing.assert_close(got, dict(plain.named_buffers()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["cpu_offload", "cpu_offload_with_hook"])
def test_each_kind_offloaded_as_a_whole(sim, kind, how):
    torch.manual_seed(0)
    plain = kind()
    model = copy.deepcopy(plain)
    getattr(anydevice, how)(model, 1)
    for _ in range(2):
        torch.testing.assert_close(model(X).cpu(), plain(X), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [Recomputes, RecomputesReentrant, OwnBackward])
def test_what_runs_in_backward_when_offloaded_as_a_whole(sim, kind):
    torch.manual_seed(0)
    plain = nn.Sequential(linear(), kind())
    model = copy.deepcopy(plain)
    anydevice.cpu_offload(model, 0)
    for _ in range(2):
        torch.testing.assert_close(step(model), step(plain), rtol=1e-3, atol=1e-3)
    assert {p.device.type for p in model.parameters()} == {"cpu"}


def test_a_backward_that_fails_lets_the_weights_go(sim):
    model = nn.Sequential(linear(), Recomputes())
    anydevice.cpu_offload(model, 0)
    before = list(model.parameters())

    def fail(_gradient):
        raise ValueError("stop")

    out = model(X)
    model[0].bias.register_hook(fail)
    with pytest.raises(ValueError, match="stop"):
        out.sum().backward()
    del out
    assert all(p is q for p, q in zip(model.parameters(), before, strict=True))


def test_activations_move_and_not_weights(sim):
    for kind in (Containers, UsesParts):
        plain = kind()
        model = divided(copy.deepcopy(plain), 1, None)
        model(X)
        sim.reset_counters()
        model(X)
        moved = sum(sim.counters(i)["p2p_bytes"] for i in (0, 1))
        assert 0 < moved <= 4 * X.nbytes


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.filterwarnings("ignore")
def test_scripted_and_traced_parts(sim, tmp_path, where):
    class Net(Pair):
        def forward(self, x):
            return self.b(self.a(x))

    for part in (torch.jit.script(Stageless()), torch.jit.trace(Stageless(), X)):
        plain = Net(None, part)
        model = copy.deepcopy(plain)
        anydevice.dispatch_model(
            model, {"a": 0, "b": where}, main_device=0, offload_dir=tmp_path / type(part).__name__
        )
        with torch.no_grad():
            for _ in range(2):
                torch.testing.assert_close(model(X).cpu(), plain(X))


class Stageless(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = linear()
        self.register_buffer("scale", torch.full((8,), 2.0))

    def forward(self, x):
        return self.fc(x) * self.scale


@pytest.mark.filterwarnings("ignore")
def test_a_scripted_part_that_is_divided_is_refused(sim):
    model = Pair(None, torch.jit.script(nn.Sequential(linear(), linear())))
    divided = {"a": 0, "b.0": 0, "b.1": 1}
    with pytest.raises(anydevice.errors.DeviceMapError, match="b is a scripted"):
        anydevice.dispatch_model(model, divided)
    with pytest.raises(anydevice.errors.DeviceMapError, match="b is a scripted"):
        attach_align_device_hook_on_blocks(model, divided)
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert not any("_hf_hook" in vars(part) for part in model.modules())


@pytest.mark.filterwarnings("ignore")
def test_the_planner_divides_no_scripted_module(sim):
    parts = torch.jit.script(nn.Sequential(linear(), nn.Sequential(linear(), linear())))
    plain = nn.Sequential(linear(), parts, linear())
    model = copy.deepcopy(plain)
    size = sum(p.nbytes for p in parts.parameters())
    sim.configure(devices=2)
    anydevice.dispatch_model(model, "auto", max_memory={0: size * 5 // 4, 1: size * 2})
    assert len(set(model.hf_device_map.values())) == 2
    torch.testing.assert_close(model(X).cpu(), plain(X))


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
def test_nested_tensors_of_an_encoder(sim, tmp_path, where):
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    plain = nn.TransformerEncoder(layer, 2).eval()
    model = copy.deepcopy(plain)
    anydevice.dispatch_model(model, {"layers.0": 0, "layers.1": where}, offload_dir=tmp_path)
    x, mask = torch.randn(2, 4, 8), torch.tensor([[False] * 4, [False, False, True, True]])
    with torch.no_grad():
        got = model(x, src_key_padding_mask=mask).cpu()
        torch.testing.assert_close(got[~mask], plain(x, src_key_padding_mask=mask)[~mask])


# ---------------------------------------------------------------------- gradients


def test_gradient_hooks_attributes_and_references_survive(sim, tmp_path):
    import weakref

    plain = nn.Sequential(*[linear() for _ in range(3)])
    model = copy.deepcopy(plain)
    seen, references = [], []
    for net in (plain, model):
        for i, p in enumerate(net.parameters()):
            p.tag = i
            p.register_hook(lambda g: g * 2)
            p.register_post_accumulate_grad_hook(lambda p: seen.append(p.tag))
    handle = model[0].weight.register_hook(lambda g: g * 0)
    references = [(weakref.ref(p), p) for p in model.parameters()]
    anydevice.dispatch_model(model, {"0": 0, "1": 1, "2": "cpu"})
    anydevice.dispatch_model(model, {"0": 1, "1": "cpu", "2": "disk"}, offload_dir=tmp_path)
    assert all(ref() is p for ref, p in references)
    for net in (plain, model):
        seen.clear()
        net(X).square().sum().backward()
        assert sorted(seen) == list(range(6))
    assert not model[0].weight.grad.any()
    handle.remove()
    anydevice.undispatch(model)
    torch.testing.assert_close(step(model), step(plain))


class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = linear()

    def forward(self, x, gate=None):
        y = self.fc(x)
        if gate:
            gate[0].set()
            gate[1].wait(20)
        return y


def test_another_thread_evaluates_what_this_one_trains(sim):
    plain = Slow()
    model = copy.deepcopy(plain)
    anydevice.cpu_offload(model, 0)
    inside, go = threading.Event(), threading.Event()

    def evaluate():
        with torch.no_grad():
            model(X, (inside, go))

    thread = threading.Thread(target=evaluate)
    thread.start()
    inside.wait(20)
    model(X).square().sum().backward()
    go.set()
    thread.join()
    plain(X).square().sum().backward()
    torch.testing.assert_close(model.fc.weight.grad, plain.fc.weight.grad)


class LearnsInside(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = linear()
        self.kept = []

    def forward(self, x):
        with torch.enable_grad():
            self.fc(x).square().sum().backward()
            self.kept.append(self.fc(x).sum())
        return x


def test_gradients_enabled_inside_a_forward_without(sim):
    plain = LearnsInside()
    model = copy.deepcopy(plain)
    anydevice.cpu_offload(model, 0)
    for net in (plain, model):
        with torch.no_grad():
            net(X)
        net.kept.pop().backward()
    torch.testing.assert_close(model.fc.weight.grad, plain.fc.weight.grad)


# ---------------------------------------------------------------------- what runs later


class Later(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = linear()

    async def forward(self, x):
        await asyncio.sleep(0)
        x = self.fc(x)
        await asyncio.sleep(0)
        return F.linear(x, self.fc.weight)


class Stream(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = linear()

    async def forward(self, x):
        for _ in range(3):
            x = F.linear(x, self.fc.weight)
            await asyncio.sleep(0)
            yield x


@pytest.mark.parametrize("how", ["cpu_offload", "cpu_offload_with_hook"])
def test_coroutines_and_asynchronous_generators_have_their_weights(sim, how):
    for kind in (Later, Stream):
        plain = kind()
        model = copy.deepcopy(plain)
        getattr(anydevice, how)(model, 0)

        async def run(net, kind=kind):
            if kind is Later:
                return await asyncio.gather(net(X), net(X * 2))
            return [y async for y in net(X)]

        for got, want in zip(asyncio.run(run(model)), asyncio.run(run(plain)), strict=True):
            torch.testing.assert_close(got.cpu(), want)
        if how == "cpu_offload":
            assert model.fc.weight.device.type == "cpu"


def test_a_coroutine_that_is_never_awaited_keeps_no_weights(sim):
    model = Later()
    anydevice.cpu_offload(model, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        del [model(X)][:]
    assert model.fc.weight.device.type == "cpu"


# ---------------------------------------------------------------------- models that take turns


class Codec(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Sequential(linear(), nn.ReLU()), linear()

    def decode(self, x):
        return self.decoder(x)

    def forward(self, x):
        return self.decode(self.encoder(x))


def test_a_part_used_outside_its_whole_brings_the_whole(sim):
    plain = Codec()
    first, one = anydevice.cpu_offload_with_hook(copy.deepcopy(plain), 0)
    second, two = anydevice.cpu_offload_with_hook(copy.deepcopy(plain), 0, one)
    z = X.to("sim:0")
    for use in (Codec.decode, lambda m, x: m.encoder[0](x), Codec.forward):
        torch.testing.assert_close(use(first, z).cpu(), use(plain, X))
        assert first.encoder[0].weight.device.type == "sim"
        torch.testing.assert_close(use(second, z).cpu(), use(plain, X))
        assert first.encoder[0].weight.device.type == "cpu"
        two.offload()
        torch.testing.assert_close(use(second, z).cpu(), use(plain, X))
        two.offload()
        assert second.decoder.weight.device.type == "cpu"
    two.remove()
    assert not any("_hf_hook" in vars(module) for module in second.modules())


def test_a_function_of_torch_with_values_of_the_host(sim):
    plain = nn.Sequential(linear(), linear())
    model = copy.deepcopy(plain)
    anydevice.dispatch_model(model, {"0": 0, "1": "cpu"})
    values = {name: torch.randn_like(value) for name, value in plain.state_dict().items()}
    got = torch.func.functional_call(model, values, (X,)).cpu()
    torch.testing.assert_close(got, torch.func.functional_call(plain, values, (X,)))
    torch.testing.assert_close(model(X).cpu(), plain(X))


def test_a_deleted_model_frees_all_at_once(sim):
    import gc

    gc.collect()
    sim.drain()
    before = [torch.sim.memory_allocated(i) for i in (0, 1)]
    gc.disable()
    try:
        for device_map in ({"a": 0, "b": 1}, {"a": 0, "b": "cpu"}, {"": "cpu"}):
            model = Packs()
            anydevice.dispatch_model(model, device_map, main_device=0)
            with torch.no_grad():
                model(X)
            del model
            sim.drain()
            assert [torch.sim.memory_allocated(i) for i in (0, 1)] == before
    finally:
        gc.enable()


class SeesDevice(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = linear()

    def forward(self, x):
        self.seen = torch.sim.current_device()
        return self.fc(x)


@pytest.mark.parametrize("how", ["dispatch", "cpu_offload", "cpu_offload_with_hook"])
def test_the_current_device_is_that_of_the_block(sim, how):
    model = Pair(SeesDevice(), SeesDevice())
    model.forward = lambda x: model.b(model.a(x))
    if how == "dispatch":
        anydevice.dispatch_model(model, {"a": 0, "b": 1})
    else:
        getattr(anydevice, how)(model, 1)
    for current in (0, 1):
        torch.sim.set_device(current)
        model(X)
        assert (model.a.seen, model.b.seen) == ((0 if how == "dispatch" else 1), 1)
        assert torch.sim.current_device() == current
    torch.sim.set_device(0)


class Quantized(nn.Module):
    """An 8-bit weight with its scale as a buffer."""

    def __init__(self):
        super().__init__()
        weight = torch.arange(-32, 32).reshape(8, 8).to(torch.int8)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_buffer("scale", torch.linspace(0.1, 1, 8))

    def dequantized(self):
        return self.weight.to(self.scale.dtype) * self.scale

    def forward(self, x):
        return x @ self.dequantized()


@pytest.mark.parametrize("how", ["cpu_offload", "attach", "hook", "divided"])
def test_a_scale_is_stored_beside_its_weight(sim, how):
    plain = nn.Sequential(linear(), nn.BatchNorm1d(8), Quantized()).eval()
    model = copy.deepcopy(plain)
    if how == "cpu_offload":
        anydevice.cpu_offload(model, 0)
    elif how == "attach":
        anydevice.hooks.attach_align_device_hook(model, 0, offload=True)
    elif how == "hook":
        hook = anydevice.hooks.AlignDevicesHook(0, offload=True, place_submodules=True)
        anydevice.hooks.add_hook_to_module(model, hook)
    else:
        anydevice.dispatch_model(model, {"0": 0, "1": "cpu", "2": "cpu"})
    torch.testing.assert_close(model[2].dequantized().cpu(), plain[2].dequantized())
    torch.testing.assert_close(model(X).cpu(), plain(X))
    torch.testing.assert_close(model[2].dequantized().cpu(), plain[2].dequantized())
    assert model[1].running_mean.device.type == "sim"  # other buffers stay where the module runs


@pytest.mark.parametrize("how", ["cpu_offload", "cpu_offload_with_hook", "divided"])
def test_under_a_default_device_of_the_users(sim, how):
    plain = nn.Sequential(linear(), linear())
    model = copy.deepcopy(plain)
    with torch.device("sim:0"):
        if how == "divided":
            anydevice.dispatch_model(model, {"0": 0, "1": "cpu"})
        else:
            getattr(anydevice, how)(model, 0)
        for _ in range(2):
            torch.testing.assert_close(model(X).cpu(), plain(X))
