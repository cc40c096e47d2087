"""The law at the heart: under any device map a model gives what it gives undivided."""

from __future__ import annotations

import copy
import importlib.util
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import anydevice

spec = importlib.util.spec_from_file_location("models", Path(__file__).with_name("models.py"))
models = sys.modules.setdefault("models", importlib.util.module_from_spec(spec))
spec.loader.exec_module(models)

PLACES = [0, 1, "sim:1", torch.device("cpu"), "cpu", "disk"]
IDS = torch.tensor([1, 2, 3, 5, 7])
MASK = torch.tensor([1.0, 1.0, 0.5, 1.0, 0.0])
SLOW = settings(
    max_examples=60,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def undivided(description, device, calls):
    """What the model gives on one device, and its state afterwards.

    A simulated device computes as the host does, but for fused attention.
    """
    model = build(description)
    anydevice.undispatch(model, device)
    bring_loose_tensors(model, device)
    with torch.no_grad():
        outputs = [model(IDS.to(device), MASK.to(device)) for _ in range(calls)]
    anydevice.undispatch(model, "cpu")
    return outputs, model.state_dict()


build = models.build


@pytest.fixture(autouse=True)
def _same_kernels():
    """Torch's fused attention steps aside for a torch function mode, so glue changes its kernel."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(fused)


@SLOW
@given(st.data())
def test_output_is_that_of_the_undivided_model(sim, data):
    description = data.draw(models.descriptions)
    model = build(description)
    before = dict(model.named_parameters(remove_duplicate=False))
    device_map = models.draw_map(data.draw, model, PLACES)
    main = data.draw(st.sampled_from([None, 0, "sim:1"]))
    on_host = main is None and all(str(place) in ("cpu", "disk") for place in device_map.values())
    want, state = undivided(description, "cpu" if on_host else "sim:0", 2)
    with tempfile.TemporaryDirectory() as folder:
        anydevice.dispatch_model(
            model,
            device_map,
            offload_dir=folder,
            offload_buffers=data.draw(st.booleans()),
            force_hooks=data.draw(st.booleans()),
            main_device=main,
            prefetch_depth=data.draw(st.integers(0, 3)),
        )
        device = torch.device("cpu")
        if "forward" not in vars(model):  # one device, no hooks: inputs are the caller's to bring
            device = next(iter(model.parameters())).device
            bring_loose_tensors(model, device)
        with torch.no_grad():
            for expected in want:
                check(model(IDS.to(device), mask=MASK.to(device)), expected, device)
        after = dict(model.named_parameters(remove_duplicate=False))
        assert all(after[name] is before[name] for name in before)
        same_state(anydevice.utils.get_state_dict_offloaded_model(model), state)
        again = copy.deepcopy(model)
        anydevice.undispatch(model, "sim:1")
        assert {p.device.type for p in model.parameters()} == {"sim"}
        same_state(anydevice.undispatch(model).state_dict(), state)
        same_state(anydevice.undispatch(again).state_dict(), state)
    bring_loose_tensors(model, "cpu")
    with torch.no_grad():
        check(model(IDS, MASK), undivided(description, "cpu", 3)[0][2], torch.device("cpu"))


def bring_loose_tensors(model, device):
    """Plain attributes are nobody's to place where a model lies whole on one device."""
    for module in model.modules():
        if isinstance(module, models.Loose):
            module.table = module.table.to(device)


def check(got, want, device):
    assert got["notes"] == want["notes"]
    for name in ("logits", "same"):
        assert got[name].device == device
        # On another device, or under glue, torch may take another kernel: the last bits differ.
        torch.testing.assert_close(
            got[name].cpu(), want[name].cpu(), rtol=1e-5, atol=1e-6, msg=name
        )


def same_state(got, want):
    assert got.keys() == want.keys()
    for name in want:
        assert torch.equal(got[name].cpu(), want[name].cpu()), name


@settings(SLOW, max_examples=25)
@given(st.data())
def test_gradients_are_those_of_the_undivided_model(sim, data):
    description = data.draw(models.descriptions)
    plain, model = build(description), build(description)
    device_map = models.draw_map(data.draw, model, [0, "sim:1", "cpu"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    anydevice.dispatch_model(model, device_map, force_hooks=True)
    other = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        for net, step in ((plain, other), (model, optimizer)):
            step.zero_grad()
            net(IDS, MASK)["logits"].square().mean().backward()
        for (name, want), got in zip(plain.named_parameters(), model.parameters(), strict=True):
            assert (want.grad is None) == (got.grad is None), name
            if want.grad is not None:
                # The second step begins from weights that differ by the rounding of the first.
                torch.testing.assert_close(
                    got.grad.cpu(), want.grad, rtol=1e-4, atol=1e-4, msg=name
                )
        other.step()
        optimizer.step()
    for (name, want), got in zip(plain.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(got.detach().cpu(), want.detach(), msg=name)


@pytest.mark.parametrize("kind", models.KINDS)
@pytest.mark.parametrize("place", [0, "cpu", "disk"])
def test_each_kind_of_part(sim, kind, place, tmp_path):
    device_map = {"": 1, "layers.0": place}
    plain = build(([kind], False, False))
    model = build(([kind], False, False))
    anydevice.dispatch_model(model, device_map, offload_dir=tmp_path)
    with torch.no_grad():
        got, want = model(IDS, MASK), plain(IDS, MASK)
    torch.testing.assert_close(got["logits"], want["logits"])
