"""The reference's import path for utilities on offload folders. No logic here."""

from anydevice.utils import (
    OffloadedWeightsLoader,
    load_offloaded_weights,
    offload_state_dict,
)

__all__ = [
    "OffloadedWeightsLoader",
    "load_offloaded_weights",
    "offload_state_dict",
]
