"""torch's own samples of its operators give on the simulator what they give on the CPU.

All of ``op_db`` runs in mode ``lazy``, each fifth operator in the others. An operator that is known
to differ is listed; one that is listed and does not differ fails the test.
"""

import gc
import itertools
import random
import sys
import types
import unittest
import warnings

import numpy
import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

#: One process imports torch's operator descriptions, which takes seconds.
pytestmark = pytest.mark.xdist_group("operators")
DEVICE = "sim:1"
STRIDE = {"lazy": 1, "thread": 5, "random": 5}
IN_EACH_MODE = pytest.mark.parametrize("mode", STRIDE)

KNOWN_FORWARD = {
    "as_strided.partial_views": "the sample reads beyond its tensor, and only the tensor is moved",
    "tensor_split": "the sample's split points must be on the host, on every device",
    "to": "the sample itself moves its input to the CPU",
}
KNOWN_BACKWARD = {
    "as_strided.partial_views": KNOWN_FORWARD["as_strided.partial_views"],
    "tensor_split": KNOWN_FORWARD["tensor_split"],
}


@pytest.fixture(scope="module")
def op_db():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if "expecttest" not in sys.modules:  # torch wants its base class only
            sys.modules["expecttest"] = types.ModuleType("expecttest")
            sys.modules["expecttest"].TestCase = unittest.TestCase
        from torch.testing._internal import common_utils
        from torch.testing._internal.common_methods_invocations import op_db
        from torch.testing._internal.opinfo import core
    gc.freeze()  # it stays imported: keep its objects out of every later collection
    # For each sample torch looks for its own test class in the source of every frame, and seeds
    # every kind of device: most of the time that these tests would take.
    monkeypatch = pytest.MonkeyPatch()
    for module in (common_utils, core):
        monkeypatch.setattr(module, "extract_test_fn", lambda: None)
    monkeypatch.setattr(common_utils, "set_rng_seed", seed)
    yield [
        op
        for op in op_db
        if torch.float32 in op.dtypes
        and not op.name.startswith(("_refs", "jiterator"))
        and "sparse" not in op.name  # storage of another kind
        and "nested" not in op.name
    ]
    monkeypatch.undo()


def seed(number=0):
    """As `torch.manual_seed`, which also formats a traceback for each kind of device."""
    random.seed(number)
    numpy.random.seed(number)
    torch.default_generator.manual_seed(number)
    torch.sim.manual_seed_all(number)


def full_name(op):
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def samples_of(op, count, **options):
    try:
        return list(itertools.islice(op.sample_inputs("cpu", torch.float32, **options), count))
    except Exception:  # noqa: BLE001 - some need packages that are not here
        return []


def moved(values):
    return tree_map(lambda t: t.to(DEVICE) if isinstance(t, torch.Tensor) else t, values)


def on_device(kwargs):
    return {k: DEVICE if k == "device" else v for k, v in kwargs.items()}


def tensors_in(values):
    return [t for t in tree_leaves(values) if isinstance(t, torch.Tensor)]


def forward_difference(op, sample):
    """What differs between the device and the host, or None."""
    try:
        seed()
        want = tensors_in(op(sample.input, *sample.args, **sample.kwargs))
    except Exception:  # noqa: BLE001 - the host has no such kernel
        return
    seed()
    args, kwargs = moved((sample.input, *sample.args)), on_device(moved(sample.kwargs))
    got = tensors_in(op(*args, **kwargs))
    torch.sim.synchronize(1)
    assert len(got) == len(want)
    for x, y in zip(want, got, strict=True):
        if x.layout != torch.strided:
            continue
        assert y.device == torch.device(DEVICE)
        if "empty" not in op.name:
            torch.testing.assert_close(y.cpu(), x, equal_nan=True, rtol=1e-4, atol=1e-4)
    return


def gradients(op, sample, device):
    leaves = []

    def leaf(t):
        if not isinstance(t, torch.Tensor):
            return t
        copy = t.detach().to(device)
        if t.requires_grad:
            leaves.append(copy.requires_grad_())
        return copy

    value, args, kwargs = tree_map(leaf, (sample.input, sample.args, sample.kwargs))
    seed()
    outputs = op(value, *args, **{k: device if k == "device" else v for k, v in kwargs.items()})
    outputs = [t for t in tensors_in(outputs) if t.requires_grad]
    if outputs and leaves:
        sum((t.abs() if t.is_complex() else t).sum() for t in outputs).backward()
    return [None if t.grad is None else t.grad.to_dense() for t in leaves]


def backward_difference(op, sample):
    try:
        want = gradients(op, sample, "cpu")
    except Exception:  # noqa: BLE001 - the host cannot
        return
    for x, y in zip(want, gradients(op, sample, DEVICE), strict=True):
        if x is not None:
            assert y.device == torch.device(DEVICE)
            torch.testing.assert_close(y.cpu(), x, equal_nan=True, rtol=1e-3, atol=1e-3)


def differing(simulator, ops, check, samples):
    """The names of the operators that differ, each with the reason."""
    found = {}
    for op in ops:
        for sample in samples(op):
            try:
                check(op, sample)
            except Exception as error:  # noqa: BLE001 - collected
                found[full_name(op)] = f"{type(error).__name__}: {error!s:.200}"
                simulator.drain()
                break
    return found


def expected(known, ops):
    return known.keys() & {full_name(op) for op in ops}


@IN_EACH_MODE
@pytest.mark.filterwarnings("ignore")
def test_forward(simulator, op_db, mode):
    simulator.configure(memory="2GiB", mode=mode, kernel=0, copy_latency=0)
    ops = op_db[:: STRIDE[mode]]
    with torch.no_grad():
        found = differing(simulator, ops, forward_difference, lambda op: samples_of(op, 2))
    assert found.keys() == expected(KNOWN_FORWARD, ops), found


@IN_EACH_MODE
@pytest.mark.filterwarnings("ignore")
def test_backward(simulator, op_db, mode):
    simulator.configure(memory="2GiB", mode=mode, kernel=0, copy_latency=0)
    ops = [op for op in op_db if op.supports_autograd and "dropout" not in op.name]
    ops = ops[:: STRIDE[mode]]
    found = differing(
        simulator, ops, backward_difference, lambda op: samples_of(op, 2, requires_grad=True)
    )
    assert found.keys() == expected(KNOWN_BACKWARD, ops), found


@pytest.mark.parametrize("name", ["mse_loss", "smooth_l1_loss", "huber_loss", "l1_loss"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_loss_warns_of_nothing(simulator, name, reduction):
    loss = getattr(torch.nn.functional, name)
    x, y = torch.randn(2, 4, 1)
    got = loss(x.to(DEVICE), y.to(DEVICE), reduction=reduction)
    assert torch.equal(got.cpu(), loss(x, y, reduction=reduction))


def test_a_number_of_pythons_has_no_dtype_of_its_own(sim):
    x = torch.tensor(-7, dtype=torch.int16, device="sim")
    for result in (torch.floor_divide(x, 2), x // 2, x.fmod(2), x * 2):
        assert result.dtype is torch.int16
    assert (x // 2).item() == -4
    assert (x // torch.tensor(2)).dtype is torch.int64
