"""What ranks do in the tests of pipelines."""

from __future__ import annotations

from distributed import models

import anydevice
from anydevice.distributed import load_pipeline


def answers(rank, size, folders, options=None):
    """Of each model: what it answers over the ranks, and what this rank has of it."""
    device = anydevice.PartialState().device
    found = {}
    for name, folder in folders.items():
        model = load_pipeline(folder, **(options or {}))
        found[name] = models.answers(model, device), model.anydevice_stage
    return found
