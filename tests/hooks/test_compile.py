"""``torch.compile`` of a model with hooks compiles its blocks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import anydevice

X = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
OPERATORS = 5  # that a block has


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, k=1.0):
        return x + self.b(self.a(x).relu()) * k


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(12))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x, k=0.5)
        return x


class Compiled:
    """A compiled model, and how many operators each of its graphs has."""

    def __init__(self, model):
        self.graphs = []
        self.model = torch.compile(model, backend=self.backend)

    def backend(self, graph, _inputs):
        self.graphs.append(sum(node.op.startswith("call") for node in graph.graph.nodes))
        return graph


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()  # its caches keep weights


def halves(place):
    return {f"layers.{i}": 0 if i < 6 else place for i in range(12)}


@pytest.mark.parametrize("place", [1, "cpu"])
def test_blocks_are_compiled_as_a_whole_and_once_for_all(sim, place):
    plain = Net()
    model = copy.deepcopy(plain)
    anydevice.dispatch_model(model, halves(place))
    compiled = Compiled(model)
    with torch.no_grad():
        for x in (X, X, torch.randn(3, 8), torch.randn(5, 8)):
            torch.testing.assert_close(compiled.model(x).cpu(), plain(x))
    assert set(compiled.graphs) == {OPERATORS}
    assert len(compiled.graphs) <= 4  # two devices, and sizes fixed and free: not once for each


def test_a_model_that_is_wholly_resident_is_one_graph(sim):
    model, x = Net().to("sim:0"), X.to("sim:0")
    plain = Compiled(model)
    with torch.no_grad():
        want = plain.model(x)
        torch.compiler.reset()
        for options in ({}, {"force_hooks": True}):
            compiled = Compiled(anydevice.dispatch_model(model, {"": 0}, **options))
            torch.testing.assert_close(compiled.model(x), want)
            assert compiled.graphs == plain.graphs


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # the compiler's own look
def test_gradients_of_a_compiled_model(sim):
    plain = Net()
    model = copy.deepcopy(plain)
    anydevice.dispatch_model(model, halves("cpu"))
    compiled = Compiled(model)
    for net in (plain, compiled.model):
        net(X).square().mean().backward()
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad.cpu(), want.grad)
    assert compiled.graphs


def test_a_part_called_by_itself_has_its_weights(sim):
    plain = Block()
    model = copy.deepcopy(plain)
    anydevice.cpu_offload(model, 0)
    function = torch.compile(lambda x: model.b(model.a(x)) + 1, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(function(X).cpu(), plain.b(plain.a(X)) + 1)


def test_the_hooks_of_the_user_run(sim):
    class Twice(anydevice.hooks.ModelHook):
        def post_forward(self, module, output):
            return output * 2

    plain = Block()
    model = copy.deepcopy(plain)
    anydevice.cpu_offload(model, 0)
    for part in (plain.a, model.a):
        anydevice.hooks.add_hook_to_module(part, Twice(), append=True)
    compiled = Compiled(model)
    with torch.no_grad():
        torch.testing.assert_close(compiled.model(X).cpu(), plain(X))
