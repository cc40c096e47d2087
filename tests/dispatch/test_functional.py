"""torch.func over models on several devices."""

import copy

import pytest
import torch
from torch import nn

from anydevice import dispatch_model

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


def loss(model):
    return lambda x: (model(x) ** 2).sum()


def by_parameters(model):
    values = {name: p.detach() for name, p in model.named_parameters()}
    found = torch.func.grad(
        lambda p: (torch.func.functional_call(model, p, (X,)) ** 2).sum(),
    )(values)
    return found["0.weight"]


@pytest.mark.parametrize(
    "compute",
    [
        lambda model: torch.func.grad(loss(model))(X),
        by_parameters,
        lambda model: torch.func.jacrev(model)(X),
        lambda model: torch.func.hessian(loss(model))(X),
        lambda model: torch.vmap(torch.func.grad(loss(model)))(X),
        lambda model: torch.func.jvp(model, (X,), (X,))[1],
    ],
    ids=["grad", "parameters", "jacrev", "hessian", "vmap", "jvp"],
)
def test_transforms_of_a_divided_model(sim, compute):
    torch.manual_seed(0)
    plain = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    model = dispatch_model(copy.deepcopy(plain), {"0": 0, "1": 1, "2": 0, "3": "cpu"})
    torch.testing.assert_close(compute(model).cpu(), compute(plain))
