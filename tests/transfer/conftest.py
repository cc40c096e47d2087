"""A small model whose blocks are groups, and machines to run it on."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
from torch import nn

from anydevice.devices import parse_device
from anydevice.transfer import Engine
from anydevice.weights import iter_modules

WIDTH = 32


class Block(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.norm = nn.LayerNorm(2 * width)
        self.down = nn.Linear(2 * width, width)
        self.register_buffer("scale", torch.rand(width) + 0.5)

    def forward(self, x):
        return x + self.down(torch.relu(self.norm(self.up(x)))) * self.scale


class Offloaded:
    """Blocks that are called one after the other, each a group of one engine."""

    def __init__(self, blocks, device="sim:0", *, dtype=None, **options):
        self.blocks = blocks
        self.engine = Engine(**options)
        self.device = parse_device(device)
        self.groups = [
            self.engine.group(
                str(i), list(iter_modules(b, str(i))), self.device, compute_dtype=dtype
            )
            for i, b in enumerate(blocks)
        ]

    def __call__(self, x, order=None, *, grad=False, whole=True):
        """Run the blocks, in an order of indices; return a tensor on the device."""
        with contextlib.ExitStack() as stack:
            if not grad:
                stack.enter_context(torch.no_grad())
            if whole:
                stack.enter_context(self.engine.whole_pass())
            x = x.to(self.device.torch)
            for i in range(len(self.blocks)) if order is None else order:
                with self.groups[i].call():
                    x = self.blocks[i](x)
            return x

    def plain(self, x, order=None):
        """The same on the host, from the resting weights."""
        with torch.no_grad():
            for i in range(len(self.blocks)) if order is None else order:
                x = self.blocks[i](x)
            return x


def make_blocks(count=5, width=WIDTH, seed=0):
    torch.manual_seed(seed)
    return [Block(width) for _ in range(count)]


@pytest.fixture
def make(sim):
    """Make an `Offloaded`; all of them are closed in the end."""
    made = []

    def build(blocks=None, device="sim:0", **options):
        made.append(Offloaded(make_blocks() if blocks is None else blocks, device, **options))
        return made[-1]

    yield build
    for model in made:
        model.engine.close()
    made.clear()
    gc.collect()


@pytest.fixture
def x():
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))


def same(got, wanted):
    """Whether two results are the same but for the rounding of kernels on another thread."""
    return torch.allclose(got.cpu(), wanted, atol=1e-5)
