"""What random programs do with tensors.

An instruction is a kind and four numbers: what to do, two tensors of the pool to do it with, and
the context in which it is done.
"""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from anydevice_conformance.ambients import default_dtype

N = 4
Tensor = torch.Tensor
Instruction = tuple[str, int, int, int, int]

#: Most give a float32 matrix of N x N; some are random, some are real from the start.
SOURCES: list[Callable[[], Tensor]] = [
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
    lambda: torch.randn(N, N, requires_grad=True),
    lambda: torch.ones(N, N, requires_grad=True) * 3,
    lambda: torch.zeros(()),
    lambda: torch.arange(5),
    lambda: torch.rand(2, 3, 4, dtype=torch.float64),
    lambda: torch.randn(6, dtype=torch.complex64),
    lambda: torch.zeros(3, 2, dtype=torch.bool),
    lambda: torch.empty(0),
    lambda: torch.randn(2, 8, dtype=torch.bfloat16),
    lambda: torch.FloatTensor([1.0, 2.0, 3.0]),
    lambda: torch.IntTensor(2, 2).zero_(),
    lambda: torch.asarray(np.arange(8)).to(torch.float16),
    lambda: torch.frombuffer(bytearray(range(16)), dtype=torch.uint8),
    lambda: torch.rand(4, generator=torch.Generator().manual_seed(3)),
]

#: Two tensors in, one out; those with an underscore change the first.
OPERATIONS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda a, b: a + b,
    lambda a, b: a @ b,
    lambda a, b: torch.where(a > b, a, b),
    lambda a, b: torch.cat([a[:2], b[2:]]),
    lambda a, b: torch.stack([a[0], b[1], a[2], b[3]]),
    lambda a, b: a[torch.arange(N - 1, -1, -1)],
    lambda a, b: a[b.argsort(0)[0]],
    lambda a, b: a.gather(1, b.argsort(1)),
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
    lambda a, b: plainly(lambda: torch.func.vmap(lambda row: row.sum() * b[0])(a).contiguous()),
    lambda a, b: plainly(lambda: torch.func.grad(lambda x: (x * x).sum())(a.contiguous())),
    lambda a, b: plainly(
        lambda: torch.func.jvp(lambda x: x.sin() * b, (a,), (torch.ones_like(a),))[1].clone()
    ),
    lambda a, b: plainly(lambda: torch.func.vmap(lambda row: row.mul_(b[0]))(a)),
    lambda a, b: nn.functional.one_hot(b.nan_to_num().argmax(1), N) + a,
    lambda a, b: copy.copy(a) + copy.deepcopy(b),
    lambda a, b: pickle.loads(pickle.dumps(a)) - b,
    lambda a, b: a.clone().apply_(lambda v: v + 1),
    lambda a, b: a.clone().map_(b.clone(), lambda x, y: x - y),
    lambda a, b: torch.from_dlpack(a.clone()),
    lambda a, b: torch.empty(2).set_(b.detach().clone()) + 1,
    lambda a, b: torch.distributions.Normal(a.nan_to_num(), 1.0).sample(),
    lambda a, b: torch.load(saved(a), weights_only=True) + b,
    lambda a, b: torch.Tensor(2, 3).copy_(a.flatten()[:6].view(2, 3)),
    lambda a, b: torch.func.functional_call(nn.Linear(N, N), {"weight": a, "bias": b[0]}, (b,)),
    lambda a, b: torch.autograd.grad(
        (a.detach().requires_grad_() * b).sum(), [a], allow_unused=True
    )[0],
    lambda a, b: gradient(a, b),
    lambda a, b: a.type(torch.float64) + b.type_as(a),
    lambda a, b: a.new_zeros(3).new_tensor(b.tolist()),
    lambda a, b: nn.functional.layer_norm(a, (N,), b[0], b[1]),
    lambda a, b: nn.functional.linear(a, b, torch.ones(N)),
    lambda a, b: a.sort(dim=-1).values,
    lambda a, b: torch.unique(a),
    lambda a, b: a.to_sparse().to_dense(),
    lambda a, b: torch.tensor([float(v) for v in a.flatten()]),
    lambda a, b: torch.repeat_interleave(a, 2, dim=0)[::2],
    lambda a, b: torch.utils.checkpoint.checkpoint(torch.sin, a, use_reentrant=False),
]

#: The result sees the memory of the first. DLPack and numpy get a tensor of their own, as torch
#: frees the memory under theirs when the tensor itself is given other data.
VIEWS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda a, b: a,
    lambda a, b: a.t(),
    lambda a, b: a[0],
    lambda a, b: a[1:, ::2],
    lambda a, b: a.view(-1)[2:],
    lambda a, b: a.expand(3, *a.shape),
    lambda a, b: a.detach(),
    lambda a, b: a.data,
    lambda a, b: a.unsqueeze(0).squeeze(),
    lambda a, b: a.view(torch.int32),
    lambda a, b: a.real,
    lambda a, b: a.conj().imag,
    lambda a, b: torch.as_tensor(a),
    lambda a, b: torch.asarray(a, device="cpu"),
    lambda a, b: torch.as_strided(a, (2, 2), (1, 2), 1),
    lambda a, b: a.split(2)[1],
    lambda a, b: a.unbind(-1)[0],
    lambda a, b: a.diagonal(),
    lambda a, b: a.cpu(),
    lambda a, b: a.to("cpu"),
    lambda a, b: a.reshape(-1),
    lambda a, b: a.contiguous(),
    lambda a, b: copy.copy(a),
    lambda a, b: torch.from_dlpack(a.detach()),
    lambda a, b: torch.from_numpy(a.detach().numpy()),
    lambda a, b: torch.empty(0, dtype=a.dtype).set_(a.detach()),
    lambda a, b: torch.empty(0, dtype=a.dtype).set_(a.untyped_storage(), 0, (whole(a),)),
    lambda a, b: torch.Tensor().set_(a.storage(), 0, (whole(a),)),
    lambda a, b: b.set_(a.detach()),
    lambda a, b: given(b, a),
    lambda a, b: nn.Parameter(a).detach(),
    lambda a, b: nn.Buffer(a),
]

#: These change the first in place.
CHANGES: list[Callable[[Tensor, Tensor], object]] = [
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
    lambda a, b: torch._foreach_add_([a, b], 1.0),
    lambda a, b: a.t_(),
    lambda a, b: a.unsqueeze_(0),
    lambda a, b: a.resize_(2, 2).fill_(3.0),
    lambda a, b: a.zero_(),
    lambda a, b: np.add(a.numpy(), 1, out=a.numpy()),
    lambda a, b: a.numpy().__setitem__((0,), 5),
    lambda a, b: a.untyped_storage().fill_(0),
    lambda a, b: a.random_(0, 5),
    lambda a, b: plainly(lambda: torch.func.vmap(lambda row: row.mul_(b[0]))(a)),
    lambda a, b: torch.sum(b, 0, out=a),
    lambda a, b: a.requires_grad_(),
    lambda a, b: a.clamp_(max=0.5).mul_(3),
    lambda a, b: nn.init.eye_(a),
    lambda a, b: nn.init.xavier_uniform_(a),
    lambda a, b: nn.init.trunc_normal_(a),
]


def whole(tensor: Tensor) -> int:
    """How many elements the storage of a tensor has."""
    return tensor.untyped_storage().nbytes() // tensor.itemsize


def plainly(make: Callable[[], Tensor]) -> Tensor:
    """Without autocast, which `torch.func` inside of a building context does not honour."""
    with torch.autocast("cpu", enabled=False):
        return make()


def gradient(a: Tensor, b: Tensor) -> Tensor:
    leaf = a.detach().clone().requires_grad_()
    ((leaf * leaf) @ b).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def given(tensor: Tensor, data: Tensor) -> Tensor:
    assert not tensor.is_inference()
    assert not data.is_inference()
    tensor.data = data
    return tensor


def saved(tensor: Tensor) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return file


CONTEXTS: list[Callable[[], Any]] = [
    contextlib.nullcontext,
    contextlib.nullcontext,
    contextlib.nullcontext,
    torch.no_grad,
    torch.enable_grad,
    lambda: torch.device("cpu"),
    lambda: default_dtype(torch.float64),
    lambda: torch.random.fork_rng(devices=[]),
    torch.inference_mode,
    lambda: torch.autocast("cpu", torch.bfloat16),
]
