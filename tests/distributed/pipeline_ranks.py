"""What ranks do in the tests of pipelines."""

from __future__ import annotations

from distributed import models

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
