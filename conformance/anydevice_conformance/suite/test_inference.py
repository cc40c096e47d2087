"""INF: the jobs that users run, each equal to the host's answer."""
# ruff: noqa: N802 - a check's name carries its paragraph's id

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from anydevice import (
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    infer_auto_device_map,
    load_checkpoint_and_dispatch,
)
from anydevice.devices import parse_device
from anydevice.hooks import attach_layerwise_casting_hooks
from anydevice_conformance.jobs import (
    Toy,
    assert_close,
    caps,
    checkpoint,
    exact_toy,
    ids,
)
from anydevice_conformance.marks import slow
from anydevice_conformance.outcomes import left_out, not_claimed
from anydevice_conformance.subject import Subject
from anydevice_conformance.threads import at_once


def test_INF_001_auto_map(subject: Subject, tmp_path: Path) -> None:
    """A model divided over all devices, host and disk by an automatic map gives the host's answer.

    Found: wrong numbers, or a failure, when a model is divided.
    Fix: see MOV-017 and MOV-014 for activations, MEM-009 for budgets; else report it to anydevice.
    """
    model, plain = exact_toy(blocks=max(8, 3 * len(subject.indices)))
    placement = infer_auto_device_map(
        model, max_memory=caps(subject, model), no_split_module_classes=["Block"]
    )
    used = {str(parse_device(place)) for place in placement.values()}
    wanted = {str(parse_device(str(subject.device(index)))) for index in subject.indices}
    assert wanted <= used, f"the map uses {sorted(used)}, and not all of {sorted(wanted)}"
    dispatch_model(model, placement, offload_dir=tmp_path)
    with subject.inference():
        for seed in range(3):
            assert_close(subject, model(ids(seed)), plain(ids(seed)), f"input {seed}")


def test_INF_002_cpu_offload(subject: Subject, index: int) -> None:
    """With `cpu_offload` every forward gives the host's answer.

    Found: wrong numbers with weights on the host.
    Fix: see MOV-014, STR-005 and PIN-004; else report it to anydevice.
    """
    model, plain = exact_toy()
    cpu_offload(model, execution_device=subject.device(index))
    with subject.inference():
        for seed in range(4):
            assert_close(subject, model(ids(seed)), plain(ids(seed)), f"forward {seed}")
            subject.backend.empty_cache(index)


@slow
def test_INF_003_disk_offload(subject: Subject, index: int, tmp_path: Path) -> None:
    """With `disk_offload` every forward gives the host's answer.

    Found: wrong numbers with weights on the disk.
    Fix: see MOV-023, MOV-014 and PIN-004; else report it to anydevice.
    """
    model, plain = exact_toy(seed=1)
    disk_offload(model, tmp_path, execution_device=subject.device(index))
    with subject.inference():
        for seed in range(3):
            assert_close(subject, model(ids(seed)), plain(ids(seed)), f"forward {seed}")


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_INF_004_prefetch(subject: Subject, index: int, depth: int) -> None:
    """With prefetching, forwards with changing weights give the host's answers.

    Found: a block ran with another block's weights, or with old ones.
    Fix: see STR-004, STR-005, STR-009, PIN-004 and MOV-013; else report it to anydevice.
    """
    if subject.quick and depth != 1:
        left_out("left out by --quick")
    model, plain = exact_toy(blocks=8)
    place = str(subject.device(index))
    names = {"embed": place, "head": place, **{f"blocks.{n}": "cpu" for n in range(8)}}
    dispatch_model(model, names, main_device=place, prefetch_depth=depth, force_hooks=True)
    for seed in range(4):
        other = Toy(blocks=8, seed=seed)
        if seed % 2:
            with torch.no_grad():
                for target in (model, plain):
                    mine = dict(target.named_parameters())
                    for name, value in other.named_parameters():
                        if name.startswith("blocks"):
                            mine[name].copy_(value)
        with subject.inference():
            for _ in range(2):
                assert_close(subject, model(ids(seed)), plain(ids(seed)), f"weights {seed}")


@slow
def test_INF_005_models_take_turns(subject: Subject, index: int) -> None:
    """A chain by `cpu_offload_with_hook` gives the host's answer, each model in its place.

    Found: wrong numbers, or a model that stayed or left.
    Fix: see MOV-014 to MOV-016; else report it to anydevice.
    """
    place = subject.device(index)
    plain = [Toy(blocks=2, seed=seed) for seed in range(3)]
    models, hooks, hook = [], [], None
    for seed in range(3):
        model, hook = cpu_offload_with_hook(Toy(blocks=2, seed=seed), place, hook)
        models.append(model)
        hooks.append(hook)
    with subject.inference():
        for _ in range(2):
            found, expected = ids(), ids()
            for one, other in zip(models, plain, strict=True):
                logits, wanted = one(found), other(expected)
                assert_close(subject, logits, wanted, "a model of the chain")
                found = expected = wanted.argmax(-1)
                assert subject.is_on(next(iter(one.parameters())), index), "it is not on the device"
    assert next(iter(models[0].parameters())).device.type == "cpu", "the first one did not leave"
    hooks[-1].offload()
    assert next(iter(models[-1].parameters())).device.type == "cpu", "the last one did not leave"


@slow
def test_INF_006_layerwise_casting(subject: Subject, index: int) -> None:
    """Weights held in a small dtype and computed in a larger one give what the host gives so.

    Found: casts on the device differ from the host's, or fail.
    Fix: see DTY-002 and DTY-006.
    """
    supports = subject.backend.supports_dtype
    small = [d for d in (torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16) if supports(d)]
    large = [d for d in (torch.bfloat16, torch.float32) if supports(d)]
    if not small or not large or small[0] is large[-1]:
        not_claimed("no pair of a smaller and a larger dtype is supported")
    storage, compute = small[0], large[0] if small[0] is not large[0] else large[-1]

    def made(device: torch.device) -> nn.Module:
        layers = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)))
        with torch.no_grad():
            for number, parameter in enumerate(layers.parameters()):
                generator = torch.Generator().manual_seed(number)
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
        layers = layers.to(compute)
        attach_layerwise_casting_hooks(layers, storage, compute, skip_modules_pattern=())
        return layers if device.type == "cpu" else layers.to(device)

    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(9)).to(compute)
    found, plain = made(subject.device(index)), made(torch.device("cpu"))
    with subject.inference():
        for _ in range(2):
            assert_close(subject, found(subject.put(x, index)), plain(x), f"{storage} to {compute}")
    held = next(found.parameters())
    assert held.dtype is storage, f"after the forward weights are held in {held.dtype}"
    assert subject.is_on(held, index), f"weights are on {held.device}"


@slow
def test_INF_010_two_threads(subject: Subject, index: int) -> None:
    """Threads that run an offloaded model at once get their own right answers.

    Found: threads disturb each other.
    Fix: see STR-003, MOV-019 and DEV-010; else report it to anydevice.
    """
    model, plain = exact_toy()
    cpu_offload(model, execution_device=subject.device(index))
    with subject.inference():
        expected = [plain(ids(seed)) for seed in range(4)]

    def run(seed: int) -> None:
        with subject.inference():
            for _ in range(4):
                assert_close(subject, model(ids(seed)), expected[seed], f"thread {seed}")

    at_once(run, 4, subject.backend)


@slow
def test_INF_013_gradients(subject: Subject) -> None:
    """A backward through a divided model gives the host's gradients.

    Found: wrong or missing gradients.
    Fix: see MOV-011 and MOV-017; else report it to anydevice.
    """
    model, plain = exact_toy(blocks=4)
    # Torch's backward crosses devices by their events: without streams, one device and the host.
    indices = subject.indices if subject.capabilities.streams else subject.indices[:1]
    places: list[str] = [str(subject.device(index)) for index in indices] + ["cpu"]
    names = {f"blocks.{n}": places[n % len(places)] for n in range(4)}
    dispatch_model(model, {"embed": places[0], "head": places[0], **names}, force_hooks=True)
    for one in (model, plain):
        one(ids()).float().pow(2).mean().backward()
    wanted = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} got no gradient"
        gradient = wanted[name].grad
        assert gradient is not None
        assert_close(subject, parameter.grad, gradient, f"gradient of {name}", loose=5)


def test_INF_014_half_precision(subject: Subject, index: int, tmp_path: Path) -> None:
    """A checkpoint loaded in 16 bits gives the host's answer in 16 bits.

    Found: wrong numbers in half precision.
    Fix: see DTY-003 and DTY-006.
    """
    supported = subject.supported(torch.bfloat16, torch.float16)
    if not supported:
        not_claimed("neither bfloat16 nor float16 is claimed")
    for dtype in supported:
        model, plain = exact_toy()
        file = checkpoint(plain, tmp_path)
        place = str(subject.device(index))
        load_checkpoint_and_dispatch(model, file, device_map={"": place}, dtype=dtype)
        assert next(model.parameters()).dtype is dtype, (
            f"loaded in {next(model.parameters()).dtype}"
        )
        with subject.inference():
            found = model(subject.put(ids(), index))
            assert_close(subject, found, plain.to(dtype)(ids()), str(dtype))
