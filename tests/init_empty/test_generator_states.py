"""States of generators that are read, set and seeded inside: random buffers are a plain build's."""

import pytest
import torch
from torch import nn

from anydevice import init_empty_weights


def read_and_set(model):
    model.a = nn.Linear(9, 9)
    state = torch.get_rng_state()
    model.b = nn.Linear(9, 9)
    model.register_buffer("c", torch.randn(4))
    torch.set_rng_state(state)
    model.register_buffer("d", torch.randn(4))
    model.e = nn.Linear(3, 3)
    model.register_buffer("f", torch.randperm(7))


def forked(model):
    model.a = nn.Linear(9, 9)
    with torch.random.fork_rng(devices=[]):
        model.b = nn.Linear(4, 4)
        model.register_buffer("c", torch.randn(4))
    model.register_buffer("d", torch.bernoulli(torch.full((5,), 0.5)))


def seeded_again(model):
    torch.manual_seed(3)
    model.a = nn.Linear(9, 9)
    torch.manual_seed(3)
    model.register_buffer("c", torch.randn(4))
    torch.manual_seed(3)
    model.b = nn.Linear(9, 9)
    model.register_buffer("d", torch.randn(4) + torch.initial_seed())


def own_generator(model):
    generator = torch.Generator().manual_seed(1)
    model.a = nn.Parameter(torch.randn(9, generator=generator))
    other = generator.clone_state()
    third = torch.Generator()
    third.set_state(generator.get_state())
    model.b = nn.Parameter(torch.empty(9).normal_(generator=generator))
    model.register_buffer("c", torch.randn(4, generator=generator))
    model.register_buffer("d", torch.randn(4, generator=other))
    model.register_buffer("e", torch.multinomial(torch.ones(9), 3, generator=third))
    generator.manual_seed(1)
    model.register_buffer("f", torch.randn(4, generator=generator))


def in_turns(model):
    for i in range(4):
        state = torch.random.get_rng_state()
        setattr(model, f"layer{i}", nn.Linear(4, 4))
        if i % 2:
            torch.random.set_rng_state(state)
        model.register_buffer(f"table{i}", torch.randn(3))


@pytest.mark.parametrize("build", [read_and_set, forked, seeded_again, own_generator, in_turns])
def test_random_buffers_are_those_of_a_plain_build(build):
    torch.manual_seed(0)
    plain = nn.Module()
    build(plain)
    after = torch.rand(3)
    torch.manual_seed(0)
    with init_empty_weights():
        empty = nn.Module()
        build(empty)
    assert torch.equal(torch.rand(3), after)
    assert all(p.is_meta for p in empty.parameters())
    buffers = dict(empty.named_buffers())
    assert buffers.keys() == dict(plain.named_buffers()).keys()
    for name, buffer in plain.named_buffers():
        assert torch.equal(buffers[name], buffer), name


@pytest.mark.parametrize("error", [None, ValueError])
def test_generators_that_gave_no_number_are_as_before(error):
    generator = torch.Generator().manual_seed(5)
    before = torch.get_rng_state(), generator.get_state()
    try:
        with init_empty_weights():
            model = nn.Linear(9, 9)
            model.more = nn.Parameter(torch.randn(9, generator=generator))
            if error is not None:
                raise error
    except ValueError:
        pass
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(generator.get_state(), before[1])
