"""Checkpoints: finding, reading, verifying and loading them; the offload store."""

from __future__ import annotations

from anydevice.checkpoint.applying import LoadReport
from anydevice.checkpoint.info import TensorInfo
from anydevice.checkpoint.loading import load_checkpoint_in_model
from anydevice.checkpoint.reading import Checkpoint, fetch_checkpoint, open_checkpoint
from anydevice.checkpoint.state_dicts import load_state_dict
from anydevice.checkpoint.store import OffloadStore, WeightSource, open_store, write_store
from anydevice.checkpoint.store_loader import (
    OffloadedWeightsLoader,
    load_offloaded_weights,
    offload_state_dict,
)

__all__ = [
    "Checkpoint",
    "LoadReport",
    "OffloadStore",
    "OffloadedWeightsLoader",
    "TensorInfo",
    "WeightSource",
    "fetch_checkpoint",
    "load_checkpoint_in_model",
    "load_offloaded_weights",
    "load_state_dict",
    "offload_state_dict",
    "open_checkpoint",
    "open_store",
    "write_store",
]
