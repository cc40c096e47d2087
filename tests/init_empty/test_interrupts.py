"""An interrupt while a model is built empty: nothing of the context is left."""

import contextlib

import pytest
import torch
from interrupting import ROOT, AtLine
from torch import nn

from anydevice import init_empty_weights, init_on_device


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        nn.init.trunc_normal_(self.linear.weight)
        self.register_buffer("scale", 1 / 10 ** (torch.arange(0, 4, 2) / 4))
        self.register_buffer("noise", torch.randn(3))


def empty():
    with init_empty_weights():
        Small()


def nested():
    with init_empty_weights(), init_on_device("cpu", include_buffers=True):
        Small()


@pytest.mark.parametrize(
    ("folder", "build"),
    [(ROOT, empty), (contextlib.__file__, empty), (ROOT, nested)],
    ids=["here", "contextlib", "nested"],
)
def test_nothing_is_left_of_the_context(folder, build):
    build()  # what is done once only
    whole = AtLine(folder=folder)
    assert whole.during(build) is None
    arrived = []  # a line may be left out: what is done once in a while only
    for at in range(1, whole.count + 1, max(1, whole.count // 50)):
        arrived.append(AtLine(at, folder).during(build) is not None)
        assert torch._C._len_torch_function_stack() == 0, at
        assert torch._C._len_torch_dispatch_stack() == 0, at
        layer = nn.Linear(2, 2)
        assert layer.weight.device.type == "cpu", at
        assert torch.get_default_dtype() is torch.float32
    assert sum(arrived) > 20
    with init_empty_weights():
        assert nn.Linear(2, 2).weight.is_meta
