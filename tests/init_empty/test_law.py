"""The law: what is no parameter equals the plain build's, bit for bit, also under a seed."""

from __future__ import annotations

import os
import random

import pytest
import torch
from tests.init_empty.building import Failed, random_program, shrunk, sound, wrong
from tests.init_empty.programs import CONTEXTS, given, saved
from torch import nn

from anydevice import init_empty_weights
from anydevice.init_empty import log, operations, real_storages

#: How many random programs, and from which seed: the same ones always, more and other ones in
#: `make fuzz`, of which CI sets the seed.
FUZZ = os.environ.get("ANYDEVICE_FUZZ_EXAMPLES")
PROGRAMS = int(FUZZ) // 8 if FUZZ else 100
SEED = os.environ.get("ANYDEVICE_FUZZ_SEED", "" if FUZZ else "0")
FIRST = int(SEED) if SEED else random.SystemRandom().randrange(1 << 32)


def test_fuzz_all_but_parameters_equal_the_plain_build():
    for seed in range(FIRST, FIRST + PROGRAMS):
        program = sound(random_program(seed))
        if wrong(program) is not None:
            small = shrunk(program)
            raise AssertionError(f"seed {seed}: {wrong(small)} in {small}") from wrong(small)


def test_fuzz_the_same_where_all_tensors_are_large(monkeypatch):
    """What is large is not copied; a parameter that was real before is not kept."""
    for module in (log, operations, real_storages):
        monkeypatch.setattr(module, "MAX_CONSTANT", 40)
    for seed in range(FIRST, FIRST + PROGRAMS // 2):
        program = sound(random_program(seed + (1 << 33)))
        error = wrong(program)
        while isinstance(error, Failed):
            error = error.__cause__
        assert error is None or "values were not kept" in str(error), (seed, error, program)


def test_programs_do_what_they_say():
    """Most instructions are left in a program, and each is reached."""
    programs = [random_program(seed) for seed in range(60)]
    kept = [sound(program) for program in programs]
    assert sum(map(len, kept)) > sum(map(len, programs)) * 0.7
    assert {i[0] for program in kept for i in program} == set("sovcm")
    contexts = {i[4] % len(CONTEXTS) for program in kept for i in program}
    assert contexts == set(range(len(CONTEXTS)))


def emptied(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().fill_(0)
    return tensor


@pytest.mark.parametrize(
    "make",
    [
        lambda m: m.weight.detach().clone(),
        lambda m: m.weight.data,
        lambda m: m.bias.norm().detach(),
        lambda m: torch.arange(4, device=m.weight.device),
        lambda m: torch.tensor([1.0, 2.0], device=m.weight.device),
        lambda m: torch.tensor([1.0, 2.0]).to(m.weight),
        lambda m: torch.ones(3).new_tensor([1, 2, 3]),
        lambda m: torch.rand(3, generator=torch.Generator().manual_seed(3)),
        lambda m: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8).dequantize(),
        lambda m: torch.eye(3).to_sparse().to_dense(),
        lambda m: torch.randn(70, dtype=torch.bfloat16),
        lambda m: torch.poisson(torch.full((4,), 3.0)),
        lambda m: torch.tensor([[3.0] * 20]).normal_(),
        lambda m: torch.bernoulli(torch.rand(4)),
        lambda m: torch.normal(torch.rand(4), torch.ones(4), out=torch.empty(4)),
        lambda m: nn.functional.rrelu(torch.rand(4) - 0.5, training=True),
        lambda m: torch.multinomial(torch.rand(9), 5),
        lambda m: torch.distributions.Beta(torch.rand(4), torch.ones(4)).sample(),
        lambda m: torch.quasirandom.SobolEngine(3, scramble=True).draw(4),
        lambda m: torch.nested.nested_tensor([torch.rand(2, 3), torch.rand(1, 3)]).unbind()[1],
        lambda m: torch.arange(9)[torch.arange(9) % 2 == 0],
        lambda m: nn.init.trunc_normal_(m.bias, std=0.3).detach().clone(),
        lambda m: torch.fft.fft(torch.arange(4.0)).conj(),
        lambda m: torch.tensor([1.0, 2.0]).quantile(0.5),
        lambda m: torch.Tensor(),
        lambda m: torch.FloatTensor(2, 3).fill_(2),
        lambda m: torch.Tensor().set_(torch.ones(3) * 2),
        lambda m: torch.Tensor(2).copy_(torch.rand(2)),
        lambda m: torch.cat([torch.Tensor(), torch.rand(2)]),
        lambda m: torch.empty(0).set_(torch.tensor([1.0, 2.0, 3.0]).untyped_storage(), 1, (2,)),
        lambda m: emptied(torch.tensor([1.0, 2.0])),
        lambda m: emptied(torch.ones(2)),
        lambda m: given(torch.ones(2), torch.rand(2)).map_(torch.ones(2), lambda x, y: x + y),
        lambda m: torch.ones(2).set_(torch.tensor([5.0, 6.0])),
        lambda m: torch.load(saved(torch.arange(3.0)), weights_only=True),
        lambda m: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)).bias.detach() * 0,
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_a_program_does_not_reach(make):
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 40)
            nn.init.trunc_normal_(self.linear.weight)
            self.register_buffer("made", make(self.linear), persistent=False)
            self.register_buffer("after", torch.rand(3))

    torch.manual_seed(5)
    plain = Small()
    state = torch.get_rng_state()
    torch.manual_seed(5)
    with init_empty_weights():
        empty = Small()
    assert torch.equal(empty.made, plain.made)
    assert torch.equal(empty.after, plain.after)
    assert torch.equal(torch.get_rng_state(), state)
    assert empty.linear.weight.is_meta


def test_a_seed_of_its_own_and_a_generator_put_back():
    def make() -> nn.Module:
        module = nn.Module()
        module.register_parameter("p", nn.Parameter(torch.randn(100)))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            module.register_buffer("fixed", torch.randn(4))
        module.register_buffer("noise", torch.randn(4))
        return module

    torch.manual_seed(2)
    plain = make()
    torch.manual_seed(2)
    with init_empty_weights():
        empty = make()
    assert torch.equal(empty.fixed, plain.fixed)
    assert torch.equal(empty.noise, plain.noise)


def test_two_builds_draw_other_numbers():
    def noise() -> torch.Tensor:
        module = nn.Module()
        with init_empty_weights():
            module.register_buffer("noise", torch.randn(4))
        return module.noise

    assert not torch.equal(noise(), noise())


def test_a_default_dtype_is_that_of_the_time():
    torch.set_default_dtype(torch.float64)
    try:
        with init_empty_weights():
            module = nn.Module()
            module.late = torch.arange(3) / 2
            module.real = torch.ones(2)
            torch.set_default_dtype(torch.float32)
    finally:
        torch.set_default_dtype(torch.float32)
    assert module.late.dtype == module.real.dtype == torch.float64
    assert module.late.tolist() == [0, 0.5, 1]


def test_parametrizations_of_a_parameter_stay_empty():
    with init_empty_weights():
        layer = nn.utils.parametrizations.orthogonal(nn.Linear(4, 4))
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    assert all(p.is_meta for p in layer.parameters())
    plain = nn.utils.parametrizations.orthogonal(nn.Linear(4, 4))
    assert {n: p.shape for n, p in layer.named_parameters()} == {
        n: p.shape for n, p in plain.named_parameters()
    }
