"""The offload store: weights in files on disk, which are mapped when they are used."""

from __future__ import annotations

from anydevice.offload_store.accelerate_format import (
    OffloadedWeightsLoader,
    load_offloaded_weights,
    offload_state_dict,
)
from anydevice.offload_store.store import OffloadStore, WeightSource, open_store, write_store
from anydevice.offload_store.weight_files import (
    extract_submodules_state_dict,
    load_offloaded_weight,
    offload_weight,
    save_offload_index,
)

__all__ = [
    "OffloadStore",
    "OffloadedWeightsLoader",
    "WeightSource",
    "extract_submodules_state_dict",
    "load_offloaded_weight",
    "load_offloaded_weights",
    "offload_state_dict",
    "offload_weight",
    "open_store",
    "save_offload_index",
    "write_store",
]
