"""Dispatch, undispatch and their kin, interrupted at any moment: the model is whole, and runs."""

import copy
import gc
import os
import random
import sys
import threading
import time

import pytest
import torch
from safetensors.torch import save_file
from tests.interrupting import AtLine
from torch import nn
from torch.overrides import _get_current_function_mode_stack

import anydevice
from anydevice.hooks import add_hook_to_module

if sys.platform == "win32":
    pytest.skip("signals", allow_module_level=True)

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
MOMENTS = int(os.environ.get("ANYDEVICE_TEST_INTERRUPTS", "8"))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 8)
        self.head.weight = self.layers[0].weight

    def forward(self, x):
        return self.head(self.norm(self.layers(x)))


class Adapted(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base, self.more = base, nn.Linear(8, 8)
        self.more.weight.data = torch.eye(8)
        self.more.bias.data.zero_()

    def forward(self, x):
        return self.more(self.base(x))


MAP = {"layers.0": 0, "layers.1": "sim:1", "layers.2": "cpu", "layers": 0, "norm": 1, "head": 0}
ALL = {"": "sim:1"}


def spread(model, _folder):
    anydevice.dispatch_model(model, MAP)


def again(model, folder):
    anydevice.dispatch_model(model, ALL, force_hooks=True)


def undispatch(model, _folder):
    anydevice.undispatch(model)


def to_disk(model, folder):
    anydevice.disk_offload(model, folder, 0)


def to_host(model, _folder):
    anydevice.cpu_offload(model, 0)


def taking_turns(model, _folder):
    anydevice.cpu_offload_with_hook(model, 0)[1].offload()


def load(model, folder):
    file = folder.parent / "model.safetensors"
    anydevice.load_checkpoint_and_dispatch(model, file, MAP)


def regroup(model, _folder):
    """A forward of a model whose structure has changed."""
    model(X)


def adapt(model):
    spread(model, None)
    model.layers[2] = Adapted(model.layers[2])


def hooked(model):
    add_hook_to_module(model.layers, anydevice.hooks.ModelHook())


CASES = {
    "dispatch": (hooked, spread),
    "dispatch anew": (lambda m: spread(m, None), again),
    "undispatch": (lambda m: spread(m, None), undispatch),
    "disk_offload": (hooked, to_disk),
    "cpu_offload": (hooked, to_host),
    "cpu_offload_with_hook": (hooked, taking_turns),
    "load": (hooked, load),
    "regrouping": (adapt, regroup),
}


@pytest.mark.parametrize("case", CASES)
def test_at_any_moment(case, sim, interrupted, tmp_path):
    prepare, work = CASES[case]
    torch.manual_seed(0)
    plain = Net().eval()
    save_file({k: v.clone() for k, v in plain.state_dict().items()}, tmp_path / "model.safetensors")
    wanted = plain(X)
    threads, descriptors = set(threading.enumerate()), len(os.listdir("/dev/fd"))
    chance, number = random.Random(case), 0

    def made():
        model = copy.deepcopy(plain)
        model.layers[0].weight.grad = torch.ones(8, 8)
        prepare(model)
        return model

    def require_whole(model, parameters, place):
        assert not _get_current_function_mode_stack(), place
        assert len(os.listdir("/dev/fd")) <= descriptors, place
        assert all(p is parameters[name] for name, p in model.named_parameters()), place
        assert model.head.weight is model.layers[0].weight, place
        assert model.head.weight.grad.device == model.head.weight.device
        with torch.no_grad():
            torch.testing.assert_close(model(X).cpu(), wanted)

    def attempt(interrupt):
        nonlocal number
        number += 1
        model = made()
        parameters = dict(model.named_parameters())
        folder = tmp_path / str(number)
        error = interrupt(lambda: work(model, folder))
        assert error is None or error.args == ()
        assert {t for t in threading.enumerate() if "reader" not in t.name} <= threads
        require_whole(model, parameters, error)
        work(model, folder)
        require_whole(model, parameters, error)
        return error is not None

    assert not attempt(AtLine().during)  # imports what it needs, and is not interrupted
    descriptors = len(os.listdir("/dev/fd"))
    lines, took = AtLine(), []

    def timed(function):
        start = time.perf_counter()
        lines.during(function)
        took.append(time.perf_counter() - start)

    attempt(timed)
    for line in chance.sample(range(1, lines.count), min(MOMENTS, lines.count - 1)):
        attempt(AtLine(line).during)
    assert attempt(AtLine(lines.count // 2).during)
    for _ in range(MOMENTS):
        attempt(lambda work: interrupted(work, 1.5 * took[0] * chance.random()))
    gc.collect()
    for reader in set(threading.enumerate()) - threads:  # of models that are gone
        reader.join(60)
        assert not reader.is_alive()
