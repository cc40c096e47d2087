"""The law: what is no parameter equals the plain build's, bit for bit, also under a seed."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from anydevice import init_empty_weights

N = 4

#: All give a float32 matrix of N x N; some are random, some are real from the start.
SOURCES: list[Callable[[], torch.Tensor]] = [
    lambda: torch.arange(16.0).view(N, N),
    lambda: torch.tensor([[1.0, -2.0, 3.0, 0.5]] * N),
    lambda: torch.from_numpy(np.linspace(0, 1, 16, dtype=np.float32).reshape(N, N)),
    lambda: torch.full((N, N), 2.0),
    lambda: torch.eye(N),
    lambda: torch.tril(torch.ones(N, N)),
    lambda: torch.randn(N, N),
    lambda: torch.rand(N, N, dtype=torch.float64).float(),
    lambda: torch.randint(0, 9, (N, N)).float(),
    lambda: torch.randperm(16).view(N, N) / 16,
    lambda: torch.empty(N, N).normal_(0, 2),
    lambda: torch.Tensor(N, N).uniform_(-1, 1),
    lambda: nn.init.trunc_normal_(torch.empty(N, N), std=0.5),
    lambda: nn.init.orthogonal_(torch.empty(N, N)),
    lambda: torch.linspace(0, 1, N).expand(N, N),
    lambda: torch.zeros(N, N).fill_diagonal_(3),
    lambda: torch.hann_window(16).view(N, N),
    lambda: torch.polar(torch.ones(N, N), torch.arange(16.0).view(N, N)).real,
]

#: Two matrices in, one out; those with an underscore change the first.
OPERATIONS: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    lambda a, b: a + b,
    lambda a, b: a @ b,
    lambda a, b: torch.where(a > b, a, b),
    lambda a, b: torch.cat([a[:2], b[2:]]),
    lambda a, b: torch.stack([a[0], b[1], a[2], b[3]]),
    lambda a, b: a[torch.arange(N - 1, -1, -1)],
    lambda a, b: a[b.argsort(0)[0]],
    lambda a, b: a.gather(1, b.argsort(1)),
    lambda a, b: a.t(),
    lambda a, b: a.to(b.dtype).to(b.device) * torch.tensor(2.0),
    lambda a, b: torch.zeros(N, N, device=a.device).add_(b),
    lambda a, b: a.contiguous().masked_fill_(b > 0, -5.0),
    lambda a, b: a.clone().copy_(b),
    lambda a, b: a.clone().index_copy_(0, torch.tensor([1, 0]), b[:2]),
    lambda a, b: a.cumsum(0).softmax(1),
    lambda a, b: a if bool((a > b).any()) else b,
    lambda a, b: torch.as_tensor(a.numpy() * 2),
    lambda a, b: torch.tensor(a.tolist()),
    lambda a, b: a * b.abs().max().item(),
    lambda a, b: torch.bernoulli(a.sigmoid()),
    lambda a, b: torch.randn_like(a) * b,
    lambda a, b: nn.functional.dropout(a, 0.5) + b,
    lambda a, b: torch.triu(a, 1).bfloat16().float(),
    lambda a, b: torch.einsum("ij,jk->ik", a, b),
    lambda a, b: a.quantile(0.5) + b,
    lambda a, b: a.index_put((torch.tensor([0, 1]),), torch.tensor(4.0)),
    lambda a, b: a.masked_select(b == b).view(N, N),
    lambda a, b: torch.bucketize(a, torch.tensor([0.0, 1.0, 2.0])).float(),
    lambda a, b: torch.linalg.inv(a.double() + 99 * torch.eye(N)).float().contiguous(),
    lambda a, b: torch.fft.fft2(a).imag.contiguous() + b,
    lambda a, b: torch.func.vmap(lambda row: row.sum() * b[0])(a).contiguous(),
    lambda a, b: torch.func.grad(lambda x: (x * x).sum())(a.contiguous()),
    lambda a, b: nn.functional.one_hot(b.nan_to_num().argmax(1), N) + a,
    lambda a, b: copy.copy(a) + copy.deepcopy(b),
    lambda a, b: pickle.loads(pickle.dumps(a)) - b,
    lambda a, b: a.clone().apply_(lambda v: v + 1),
    lambda a, b: a.clone().map_(b.clone(), lambda x, y: x - y),
    lambda a, b: torch.from_dlpack(a.clone()),
    lambda a, b: torch.empty(2).set_(b.contiguous().clone()) + 1,
    lambda a, b: torch.distributions.Normal(a.nan_to_num(), 1.0).sample(),
]

#: These change the first in place.
CHANGES: list[Callable[[torch.Tensor, torch.Tensor], object]] = [
    lambda a, b: a.add_(b),
    lambda a, b: a.copy_(b),
    lambda a, b: a[0].fill_(7.0),
    lambda a, b: a.masked_fill_(b > 1, -1.0),
    lambda a, b: a[:, 1:3].mul_(b[:, :2]),
    lambda a, b: a.normal_(),
    lambda a, b: a[::2, 1:].uniform_(),
    lambda a, b: torch.add(b, 1, out=a),
    lambda a, b: a.__setitem__(b > 0, 3.0),
    lambda a, b: a.__setitem__(torch.tensor([0, 1]), b[2:]),
    lambda a, b: a.fill_diagonal_(4),
    lambda a, b: a.index_add_(0, torch.tensor([0, 2]), b[:2]),
    lambda a, b: a.exponential_(),
    lambda a, b: torch._foreach_mul_([a], 2.0),
]

numbers = st.integers(0, 999)
programs = st.lists(st.tuples(st.sampled_from("sssoocpb"), numbers, numbers, numbers), max_size=12)


class Built(nn.Module):
    """A module whose constructor is a program."""

    def __init__(self, program: list[tuple[str, int, int, int]]) -> None:
        super().__init__()
        pool = [torch.ones(N, N), torch.tensor([[0.5] * N] * N)]
        self.linear = nn.Linear(5, 3)
        for i, (kind, what, first, second) in enumerate(program):
            a, b = pool[first % len(pool)], pool[second % len(pool)]
            if kind == "s":
                pool.append(SOURCES[what % len(SOURCES)]())
            elif kind == "o":
                pool.append(OPERATIONS[what % len(OPERATIONS)](a, b))
            elif kind == "c":
                target = a.contiguous() if 0 in a.stride() else a
                CHANGES[what % len(CHANGES)](target, b.clone())
            elif kind == "p":
                self.register_parameter(f"p{i}", nn.Parameter(a.clone()))
                nn.init.normal_(getattr(self, f"p{i}"))
                pool.insert(0, getattr(self, f"p{i}").data)
            else:
                self.register_buffer(f"b{i}", a, persistent=False)
        self.last = pool[-1].clone()
        self.all = nn.BatchNorm1d(2)
        self.register_buffer("noise", torch.randn(3))


def build(program: list[tuple[str, int, int, int]], *, empty: bool) -> Built:
    torch.manual_seed(3)
    if not empty:
        return Built(program)
    with init_empty_weights():
        return Built(program)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(programs)
@example([("s", 11, 0, 0), ("s", 0, 0, 0), ("s", 0, 0, 0), ("p", 0, 0, 0), ("o", 19, 3, 0)])
@example([("s", 11, 0, 0), ("o", 38, 0, 2), ("c", 7, 0, 3)])  # set_ to a `torch.Tensor(4, 4)`
def test_all_but_parameters_equal_the_plain_build(program):
    plain, empty = build(program, empty=False), build(program, empty=True)
    assert all(p.is_meta for p in empty.parameters())
    expected = {**dict(plain.named_buffers()), "last": plain.last}
    actual = {**dict(empty.named_buffers()), "last": empty.last}
    assert expected.keys() == actual.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name], value, rtol=0, atol=0, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )
        assert actual[name].stride() == value.stride(), name


def emptied(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().fill_(0)
    return tensor


def given(tensor: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    tensor.data = data
    return tensor


def saved(tensor: torch.Tensor) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return file


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
