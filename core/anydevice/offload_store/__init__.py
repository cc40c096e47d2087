"""The offload store: weights in files on disk, which are mapped when they are used."""

from __future__ import annotations

from anydevice.offload_store.accelerate_format import (
    OffloadedWeightsLoader,
    load_offloaded_weights,
    offload_state_dict,
)
from anydevice.offload_store.store import OffloadStore, WeightSource, open_store, write_store

__all__ = [
    "OffloadStore",
    "OffloadedWeightsLoader",
    "WeightSource",
    "load_offloaded_weights",
    "offload_state_dict",
    "open_store",
    "write_store",
]
