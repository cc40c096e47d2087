"""What ranks do in the tests of models over several processes."""

from __future__ import annotations

import datetime
import itertools
import os

import torch
from distributed import models
from torch import nn

import anydevice
from anydevice.distributed import load_pipeline, load_tensor_parallel


def answers(rank, size, folders, options=None):
    """Of each model: what it answers over the ranks, and what this rank has of it."""
    device = anydevice.PartialState().device
    found = {}
    for name, folder in folders.items():
        model = load_pipeline(folder, **(options or {}))
        found[name] = models.answers(model, device), model.anydevice_stage
    return found


def divided(rank, size, folders):
    """Of each model, divided over the ranks: what it answers, and the bytes that are here."""
    device = anydevice.PartialState().device
    found = {}
    for name, folder in folders.items():
        model = load_tensor_parallel(folder)
        here = {id(p): getattr(p, "_local_tensor", p) for p in model.parameters()}
        nbytes = sum(t.numel() * t.element_size() for t in here.values())
        found[name] = models.answers(model, device), nbytes
    return found


def narrowing():
    """A model of plain layers whose hidden states change their width."""
    torch.manual_seed(0)
    widths = [6, 10, 4, 8, 8, 3]
    pairs = itertools.pairwise(widths)
    return nn.Sequential(*[nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairs])


def plain_models(rank, size):
    """Outputs of a plain model, in one process and over the ranks, whole and in microbatches."""
    device = anydevice.PartialState().device
    inputs = torch.arange(24.0).reshape(4, 6) / 24
    found = {"alone": narrowing()(inputs).detach()}
    for count in (1, 2, 4):
        model = load_pipeline(narrowing(), example_inputs=inputs, microbatches=count)
        found[count] = model(inputs.to(device)).cpu()
    found["another batch"] = model(inputs.to(device)[:2]).cpu()
    divided = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
    found["alone in parts"] = divided(inputs).detach()
    divided.tp_plan = {"0": "colwise", "2": "rowwise"}
    found["in parts"] = load_tensor_parallel(divided)(inputs.to(device)).detach().cpu()
    return found


def offloaded(rank, size, folder, budget):
    """Answers where each rank's device holds about one block; and where its weights rest."""
    device = anydevice.PartialState().device
    budgets = {str(device): budget, "cpu": "10MB"}
    model = load_pipeline(folder, max_memory=budgets)
    placed = {str(kind) for kind in model.hf_device_map.values()}
    return models.answers(model, device, few=size > 2), placed, str(device)


def said(function):
    """The error that a call raises: its class and message."""
    try:
        function()
    except Exception as error:  # noqa: BLE001 - torch's own too
        return type(error).__name__, str(error)
    return "no error", ""


def refused(folder, mixture, quantized):
    """What is said of what cannot be divided, or not in that way; the same on every rank."""
    whole = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))
    whole.tp_plan = {"0": "colwise", "1": "rowwise"}
    in_parts = load_tensor_parallel(whole)
    return {
        "both": said(lambda: load_pipeline(folder, tp_size=2)),
        "both as well": said(lambda: load_tensor_parallel(folder, pp_size=2)),
        "misspelled": said(lambda: load_pipeline(folder, local_file_only=True)),
        "unknown": said(lambda: load_tensor_parallel(folder, headroom=1)),
        "quantizing": said(lambda: load_pipeline(folder, quantization_config={})),
        "divided": said(lambda: load_pipeline(in_parts, example_inputs=torch.zeros(1, 6))),
        "mixture": said(lambda: load_tensor_parallel(mixture)),
        "quantized": said(lambda: load_pipeline(quantized)),
        "quantized too": said(lambda: load_tensor_parallel(quantized)),
    }


def faults(rank, size, folder, *others):
    """What is said of arguments that differ between ranks, or cannot be used; and what can."""
    import transformers as tf

    model = load_pipeline(folder)
    ids = models.batch()["input_ids"]
    t5 = tf.T5Config(vocab_size=32, d_model=8, d_kv=4, d_ff=8, num_layers=2, num_heads=2)
    with anydevice.init_empty_weights(include_buffers=False):
        shared_bias = tf.T5ForConditionalGeneration(t5)
    inputs = {**models.batch(), "labels": models.batch()["input_ids"]}
    torch.manual_seed(rank)
    small = {"cpu": "1KB"} if rank == 1 else {"cpu": "1GB"}
    return refused(folder, *others) | {
        "loss": model(**inputs).loss,
        "drawn": model.generate(**models.batch(), max_new_tokens=4, do_sample=True),
        "mean": said(lambda: load_pipeline(folder, microbatches=3)(**inputs)),
        "microbatches": said(lambda: load_pipeline(folder, microbatches=1 + rank)),
        "inputs": said(lambda: model.generate(ids + rank, max_new_tokens=2)),
        "shapes": said(lambda: model(ids[: 2 + rank])),
        "states": said(lambda: model(ids, output_hidden_states=True)),
        "small": said(lambda: load_pipeline(folder, max_memory=small, offload=False)),
        "bias": said(lambda: load_pipeline(shared_bias, checkpoint=folder)),
        "empty": said(lambda: load_pipeline(shared_bias)),
        "labels": said(lambda: model(ids, labels=ids[:1, :2])),
        "dtype": said(lambda: load_pipeline(narrowing(), dtype="bfloat16")),
        "example": said(lambda: load_pipeline(narrowing())),
        "plan": said(lambda: load_tensor_parallel(narrowing())),
    }


def missing(rank, size, folder):
    """What is said of a rank that does not come to load."""
    anydevice.PartialState(timeout=datetime.timedelta(seconds=1.5))
    return "left" if rank == 1 else said(lambda: load_pipeline(folder))


def dying(rank, size, folder):
    """What is said of a rank that dies while tokens are generated."""
    model = load_pipeline(folder)
    if rank == 1:
        block = model.get_submodule(model.anydevice_stage.blocks[0])
        calls = []

        def die(*_):
            calls.append(1)
            if len(calls) > 4:
                os._exit(3)

        block.register_forward_pre_hook(die)
    return said(lambda: model.generate(**models.batch(), max_new_tokens=8))


def raising(rank, size, folder):
    """A block raises on one rank alone, at its first call or while tokens are generated."""
    model = load_pipeline(folder)
    block = model.get_submodule(model.anydevice_stage.blocks[0])
    found = {}
    for victim in range(size):
        for way, most in (("forward", 0), ("generate", 5)):
            calls = []

            def fail(*_, calls=calls, most=most):
                calls.append(1)
                if len(calls) > most:
                    raise ArithmeticError("too large")

            hook = block.register_forward_hook(fail) if rank == victim else None
            if way == "forward":
                found[victim, way] = said(lambda: model(**models.batch()))
            else:
                found[victim, way] = said(
                    lambda: model.generate(**models.batch(), max_new_tokens=8)
                )
            if hook is not None:
                hook.remove()
    return {"said": found, "logits": model(**models.batch()).logits.cpu()}
