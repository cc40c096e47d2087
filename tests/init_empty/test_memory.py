"""Memory that tensors, parameters and other code share, and the state in which a step was noted."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from anydevice import init_empty_weights
from anydevice.errors import ModelError


def a_copy_shares_memory(m):
    table = torch.rand(2, 3)
    alias = copy.copy(table)
    later = alias + 1
    table[0] = torch.tensor([5.0, 6.0, 7.0])
    return table, alias, later


def a_tensor_set_to_another(m):
    real = torch.tensor([1.0, 2.0])
    late = torch.ones(2).set_(real)
    real += 1
    late.mul_(3)
    return real, late, late + real


def a_storage_set_in_a_late_tensor(m):
    table = torch.rand(6)
    other = torch.zeros(2).set_(table.untyped_storage(), 2, (2,))
    before = other * 2
    table.zero_()
    return before, other


def a_result_of_a_transform(m):
    return torch.func.grad(lambda x: (x * x).sum())(torch.ones(3)), torch.func.jvp(
        torch.sin, (torch.ones(2),), (torch.ones(2),)
    )[0].clone()


def a_captured_tensor_changed_in_a_transform(m):
    table = torch.rand(3, 2)
    before = table * 2
    torch.func.vmap(lambda row: row.mul_(3))(table)
    return before, table


def a_parameter_read_and_then_changed_by_numpy(m):
    before = m.weight.data * 2
    array = m.weight.detach().numpy()
    array[:] = 7
    after = m.weight.data * 2
    m.weight.data.add_(1)
    return before, after, torch.tensor(array.tolist())


def a_parameter_read_and_then_changed_in_a_list(m):
    before = torch.triu(m.weight.data, 1).bfloat16().float()
    torch._foreach_mul_([m.weight.data], 2.0)
    return before, m.weight.detach().clone()


def a_parameter_read_and_then_written_as_out(m):
    before = m.weight.data * 2
    with torch.no_grad():
        torch.add(torch.ones(3, 3), 1, out=m.weight)
    return before, m.weight.detach().clone()


def a_parameter_of_a_real_tensor(m):
    real = torch.tensor([1.0, 2.0])
    m.real = nn.Parameter(real)
    m.real.data.add_(1)
    seen = real * 1
    real.zero_()
    return seen, real, m.real.detach().clone()


def two_parameters_of_one_tensor(m):
    real = torch.tensor([1.0, 2.0])
    m.a, m.b = nn.Parameter(real), nn.Parameter(real[:1])
    m.a.data.fill_(9)
    return (m.b.detach() + 0,)


def a_parameter_with_other_data(m):
    real = torch.from_numpy(np.ones((2, 2), dtype=np.float32))
    old = m.weight.data
    m.weight.data = real
    real[0] = 5
    m.weight.data.mul_(2)
    return real, m.weight.detach().clone(), old


def a_parameter_that_is_gone(m):
    table = torch.rand(3)
    m.gone = nn.Parameter(table)
    del m.gone
    return (table,)


def a_graph_of_real_tensors(m):
    leaf = torch.ones(3, 3).requires_grad_()
    (torch.rand(3, 3) @ leaf).sum().backward()
    return (leaf.grad,)


def steps_that_run_under_autocast(m):
    product = nn.functional.linear(torch.tensor([[1.0, 2.0, 3.1]]), m.weight).detach()
    with torch.autocast("cpu", torch.bfloat16):
        return product * float(product.sum()), product


def operations_under_autocast(m):
    with torch.autocast("cpu", torch.bfloat16):
        return nn.functional.linear(torch.ones(1, 3), m.weight).detach(), torch.ones(2).clone()


def draws_under_another_default_dtype(m):
    torch.set_default_dtype(torch.float64)
    try:
        m.wide = nn.Parameter(torch.randn(7, 3))
    finally:
        torch.set_default_dtype(torch.float32)
    return (torch.randn(4),)


def tensors_of_inference_mode(m):
    late = torch.rand(4, 4)
    with torch.inference_mode():
        view = late.reshape(2, 8).contiguous().to(torch.float64)
        late.t_().add_(1)
        late.numpy()[0] = 3
    late.mul_(2)
    return late, view.clone()


def strides_that_decide_how_sums_are_rounded(m):
    weight = torch.polar(torch.ones(4, 4), torch.tensor([[1.0, 2.0, 3.0, 4.0]] * 4)).real
    late, table = torch.rand(4, 4), torch.view_as_complex(torch.rand(4, 4, 2)).real
    results = late @ weight, nn.functional.linear(late, table, table[0])
    float(table.sum())
    return (*results, table)


def no_copy_where_a_device_is_asked_for(m):
    table, other = torch.rand(3), torch.rand(3)
    with torch.device("cpu"):
        alias = torch.as_tensor(table)
    alias.add_(1)
    torch.asarray(other, device="cpu").zero_()
    leaf, real = torch.rand(3, requires_grad=True), torch.tensor([1.0, 2.0])
    with torch.no_grad():
        torch.enable_grad()(leaf.to)("cpu").add_(1)
        torch.as_tensor(real, device=m.weight.device).mul_(3)
    return table, other, leaf, real


CASES = [case for case in dict(globals()).values() if getattr(case, "__code__", None)]


@pytest.mark.parametrize("case", [c for c in CASES if c.__module__ == __name__])
def test_values_are_those_of_a_plain_build(case):
    def build():
        torch.manual_seed(4)
        module = nn.Linear(3, 3)
        results = case(module)
        module.register_buffer("noise", torch.randn(3))
        return module, (*results, module.noise)

    _, expected = build()
    with warnings.catch_warnings(), init_empty_weights():
        warnings.simplefilter("ignore")
        module, actual = build()
    assert all(parameter.is_meta for parameter in module.parameters())
    for i, (one, other) in enumerate(zip(expected, actual, strict=True)):
        assert one.dtype == other.dtype, i
        assert one.tolist() == other.tolist(), i


@pytest.mark.parametrize("is_real", [True, False])
def test_a_copy_of_a_module_is_empty_too(is_real):
    with init_empty_weights():
        module = nn.Module()
        weight = torch.tensor([1.0, 2.0]) if is_real else torch.ones(2)
        module.weight = nn.Parameter(weight)
        twin = copy.deepcopy(module)
        weight.zero_()
        value = twin.weight.detach().clone()
        with torch.autocast("cpu", torch.bfloat16):
            third = copy.deepcopy(twin).to(torch.float64)
    assert twin.weight.is_meta
    assert third.weight.is_meta
    assert value.tolist() == [1, 1 + is_real]


def test_values_of_a_large_real_parameter_are_not_kept():
    with init_empty_weights():
        module = nn.Module()
        module.weight = nn.Parameter(torch.from_numpy(np.ones(1 << 19, dtype=np.float32)))
        nn.init.normal_(module.weight)
        with pytest.raises(ModelError, match="depends on a parameter whose values were not kept"):
            module.register_buffer("scale", module.weight.detach().norm())
    assert module.weight.is_meta
