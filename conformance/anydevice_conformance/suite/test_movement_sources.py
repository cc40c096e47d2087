"""MOV: the source, its gradients and its ties."""
# ruff: noqa: N802 - a check's name carries its paragraph's id

from __future__ import annotations

import torch
from torch import nn

from anydevice.modules import set_module_tensor_to_device
from anydevice_conformance.subject import Subject


def test_MOV_009_source_is_left(subject: Subject, index: int) -> None:
    """The source keeps its device, values, dtype, strides and `requires_grad`.

    Found: moving changed the tensor that was moved.
    Fix: return a new tensor; never assign to ``tensor.data`` or use in-place operations.
    """
    for source in (torch.arange(12.0).reshape(3, 4).t(), nn.Parameter(torch.arange(6.0))):
        values, strides, grad = source.detach().clone(), source.stride(), source.requires_grad
        version, address = source._version, source.data_ptr()
        for non_blocking in (False, True):
            there = subject.put(source, index, non_blocking=non_blocking)
            subject.backend.synchronize(index)
            assert source.device.type == "cpu", f"the source is now on {source.device}"
            assert torch.equal(source, values), "the source's values changed"
            assert source.stride() == strides, "the source's strides changed"
            assert source.requires_grad == grad, "the source's requires_grad changed"
            assert (source._version, source.data_ptr()) == (version, address), "it was written to"
            kept = subject.fetch(there.detach().clone())
            subject.fetch(there)
            assert subject.is_on(there, index), "moving back took the device's tensor along"
            assert torch.equal(subject.fetch(there), kept), (
                "moving back changed the device's tensor"
            )


def test_MOV_010_already_there(subject: Subject, index: int) -> None:
    """A tensor that is there already is returned itself.

    Found: a copy was made of what needs none.
    Fix: ``if tensor.device == device: return tensor``.
    """
    plain = torch.arange(24.0).view(2, 3, 4)
    sources = [plain, plain[:, 1], plain.mT, plain[:1].expand(3, 3, 4), plain[:0], plain[0, 0, 0]]
    sources += [
        plain.int(),
        plain.bool(),
        torch.nn.Parameter(plain),
        plain.clone().requires_grad_(),
    ]
    for host in sources:
        there = host.to(subject.device(index))
        for non_blocking in (False, True):
            assert subject.put(there, index, non_blocking=non_blocking) is there, (
                "moved to where it is, another tensor came"
            )
            assert subject.fetch(host, non_blocking=non_blocking) is host, (
                "moved from the host to the host, another tensor came"
            )


def test_MOV_011_gradients(subject: Subject, index: int) -> None:
    """`requires_grad` is kept, and backward through a move reaches the source.

    Found: the result forgot `requires_grad`, or no gradient came back.
    Fix: use a differentiable copy (``tensor.to``), without ``detach``, ``.data`` or ``no_grad``.
    """
    for non_blocking in (False, True):
        source = torch.arange(4.0, requires_grad=True)
        there = subject.put(source, index, non_blocking=non_blocking)
        assert there.requires_grad, "requires_grad was lost on the way to the device"
        torch.autograd.backward((there * there).sum())
        assert source.grad is not None, "no gradient came back from the device"
        assert torch.equal(source.grad, 2 * source.detach()), f"wrong gradient {source.grad}"

        leaf = subject.put(torch.arange(4.0), index).detach().requires_grad_()
        back = subject.fetch(leaf, non_blocking=non_blocking)
        subject.backend.synchronize(index)
        assert back.requires_grad, "requires_grad was lost on the way to the host"
        torch.autograd.backward((back * 3).sum())
        assert leaf.grad is not None, "no gradient reached the device"
        assert subject.is_on(leaf.grad, index), f"the gradient is on {leaf.grad.device}"
        assert subject.fetch(leaf.grad).tolist() == [3.0] * 4

        plain = subject.put(torch.arange(4.0), index, non_blocking=non_blocking)
        assert not plain.requires_grad, "a tensor without requires_grad got it"
        assert not subject.fetch(plain).requires_grad


def test_MOV_012_ties(subject: Subject, index: int) -> None:
    """A tied weight is right under both names; two views of one storage keep their own values.

    Found: the tie broke, or one view got the other's values.
    Fix: give each call its own result; key no cache by a storage's address.
    """
    model = nn.ModuleDict({"embed": nn.Embedding(11, 4), "head": nn.Linear(4, 11, bias=False)})
    model["head"].weight = model["embed"].weight
    ids = torch.tensor([[1, 5, 10]])
    expected = model["head"](model["embed"](ids)).detach()
    device = subject.device(index)
    set_module_tensor_to_device(model, "embed.weight", device)
    weight = model.get_parameter("head.weight")
    assert weight is model.get_parameter("embed.weight"), "the tie broke"
    assert subject.is_on(weight, index), f"it is on {weight.device}"
    found = subject.fetch(model["head"](model["embed"](subject.put(ids, index)))).detach()
    assert torch.allclose(found, expected, atol=1e-3, rtol=1e-3), "the tied model computes wrong"

    square = torch.arange(36.0).view(6, 6)
    views = [square, square.t(), square.view(4, 9), square.flatten(), square[:3], square[:3].t()]
    views += [square.view(torch.int32), square.unsqueeze(1), square[::2], square[:, :1]]
    views = [view for view in views if subject.backend.supports_dtype(view.dtype)]
    there = [subject.put(view, index) for view in views]
    for number, view in enumerate(views):
        assert torch.equal(subject.fetch(there[number]), view), (
            f"of views of one storage that all live the {number + 1}th got another's values"
        )
    storage = torch.arange(20.0)
    first, second = storage[:10], storage[10:]
    one, other = subject.put(first, index), subject.put(second, index)
    again = subject.put(storage[:10].view(2, 5), index)
    assert torch.equal(subject.fetch(one), first), "the first view of a storage is wrong"
    assert torch.equal(subject.fetch(other), second), "the second view got other values"
    assert torch.equal(subject.fetch(again), first.view(2, 5)), "a view of other shape is wrong"


def test_MOV_013_new_values(subject: Subject, index: int) -> None:
    """A second move sees what was changed since the first, and what took its place in memory.

    Found: a move gave old values.
    Fix: copy at each call; remember no earlier result.
    """
    source = torch.zeros(1000)
    for value in range(1, 6):
        source.fill_(value)
        found = subject.fetch(subject.put(source, index))
        assert set(found.tolist()) == {value}, f"source holds {value}, moved {found[0].item()}"
    there = subject.put(source, index)
    for value in range(1, 6):
        there.fill_(value)
        found = subject.fetch(there)
        assert set(found.tolist()) == {value}, f"device holds {value}, got {found[0].item()}"
    for value in range(20):  # the allocator gives the same address again
        found = subject.fetch(subject.put(torch.full((1000,), float(value)), index))
        assert set(found.tolist()) == {value}, f"a new tensor of {value} moved as {found[0]}"


def test_MOV_024_parameters_and_inference(subject: Subject, index: int) -> None:
    """Parameters and inference tensors move, with gradients on and off.

    Found: a Parameter, or a tensor made in inference mode, failed or changed.
    Fix: use operations that torch allows in inference mode (``to``, ``copy_``), not ``.data``.
    """
    values = torch.arange(6.0)
    parameter = nn.Parameter(values.clone())
    modes = [torch.enable_grad, torch.no_grad] + [torch.inference_mode] * subject.infers
    for mode in modes:
        with mode():
            made_here = values * 1
            for source in (parameter, made_here):
                there = subject.put(source, index)
                assert isinstance(there, torch.Tensor), f"{mode.__name__}: got {type(there)}"
                found = subject.fetch(there * 2)
                assert torch.equal(found, values * 2), f"{mode.__name__}: wrong values"
    assert parameter.device.type == "cpu", "the Parameter itself was moved"
    frozen = nn.Parameter(values.to(torch.int32), requires_grad=False)
    if subject.backend.supports_dtype(torch.int32):
        assert torch.equal(subject.fetch(subject.put(frozen, index)), frozen.data)
