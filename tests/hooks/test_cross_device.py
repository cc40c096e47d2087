from __future__ import annotations

import threading

import pytest
import torch
from torch.overrides import TorchFunctionMode

from anydevice.hooks.cross_device import Alignment, call_aligned


def aligned(function, *args, **kwargs):
    return call_aligned(Alignment.ON, function, args, kwargs)


@pytest.fixture
def tensors(sim):
    return torch.ones(2), torch.ones(2, device="sim:0"), torch.ones(2, device="sim:1")


def test_the_first_accelerator_is_where_operators_meet(tensors):
    host, zero, one = tensors
    assert aligned(lambda: host + one + zero).device == one.device
    assert aligned(lambda: torch.cat([host, host, zero, one])).device == zero.device
    assert aligned(lambda: torch.where(host > 0, one, zero)).device == one.device
    assert (
        aligned(lambda: torch.nn.functional.linear(one, zero[None], bias=None)).device == one.device
    )


def test_in_place_and_out_stay_where_they_are(tensors):
    host, zero, one = tensors

    def work():
        nonlocal host
        before = host
        host += zero
        host.mul_(one)
        host[0] = zero[0]
        host[torch.tensor([1], device="sim:1")] = 5
        assert host is before
        torch.add(zero, one, out=zero)

    aligned(work)
    assert host.device.type == "cpu"
    assert zero.device == torch.device("sim:0")
    assert host.tolist() == [1, 5]
    assert zero.tolist() == [2, 2]


def test_moves_that_are_meant_stay_meant(tensors):
    host, zero, one = tensors
    assert aligned(lambda: zero.to(host)).device == host.device
    assert aligned(lambda: host.type_as(one)).device == one.device
    assert aligned(lambda: host.copy_(one)) is host
    assert aligned(lambda: torch.tensor([1.0])).device.type == "cpu"


def test_without_alignment_inside(tensors):
    host, zero, _ = tensors

    def inner():
        with pytest.raises(RuntimeError, match="device"):
            host + zero
        assert aligned(lambda: host + zero).device == zero.device
        return True

    def outer():
        assert call_aligned(Alignment.OFF, inner, (), {})
        return host + zero

    assert aligned(outer).device == zero.device
    with pytest.raises(RuntimeError, match="device"):
        host + zero


def test_under_a_mode_of_the_users(tensors):
    host, zero, _ = tensors

    class Count(TorchFunctionMode):
        calls = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.calls += 1
            return func(*args, **(kwargs or {}))

    def inner():
        with pytest.raises(RuntimeError, match="device"):
            host + zero
        return host + 1

    def outer():
        with Count() as count:
            call_aligned(Alignment.OFF, inner, (), {})
            assert (host + zero).device == zero.device
            assert aligned(lambda: host * zero).device == zero.device
        return count.calls

    assert aligned(outer) >= 3


def test_an_error_takes_the_mode_off(tensors):
    host, zero, _ = tensors

    def fail():
        call_aligned(Alignment.OFF, lambda: 1 / 0, (), {})

    with pytest.raises(ZeroDivisionError):
        aligned(fail)
    with pytest.raises(RuntimeError, match="device"):
        host + zero


def test_other_threads_are_not_glued(tensors):
    host, zero, _ = tensors
    errors = []

    def other():
        try:
            host + zero
        except RuntimeError as error:
            errors.append(error)

    def outer():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(20)

    aligned(outer)
    assert len(errors) == 1


def test_gradients_pass(tensors):
    host, zero, _ = tensors
    host.requires_grad_()
    aligned(lambda: (host * zero).sum()).backward()
    assert host.grad.tolist() == [1, 1]
