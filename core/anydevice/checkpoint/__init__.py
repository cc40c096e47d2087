"""Checkpoints: finding, downloading, reading and verifying them."""

from __future__ import annotations

import importlib
from typing import Any

from anydevice.checkpoint.checkpoint import Checkpoint
from anydevice.checkpoint.info import TensorInfo
from anydevice.checkpoint.opening import fetch_checkpoint, open_checkpoint

__all__ = ["Checkpoint", "TensorInfo", "fetch_checkpoint", "open_checkpoint"]

#: Public names that were part of this package once, and the package that has them now.
_MOVED = {
    "LoadReport": "loading",
    "OffloadStore": "offload_store",
    "OffloadedWeightsLoader": "offload_store",
    "WeightSource": "offload_store",
    "load_checkpoint_in_model": "loading",
    "load_offloaded_weights": "offload_store",
    "load_state_dict": "loading",
    "offload_state_dict": "offload_store",
    "open_store": "offload_store",
    "write_store": "offload_store",
}


def __getattr__(name: str) -> Any:
    if name not in _MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"anydevice.{_MOVED[name]}"), name)
