"""The reference's import path for utilities on nested tensors. No logic here."""

from anydevice.utils import (
    concatenate,
    find_device,
    is_torch_tensor,
    listify,
    recursively_apply,
    send_to_device,
)

__all__ = [
    "concatenate",
    "find_device",
    "is_torch_tensor",
    "listify",
    "recursively_apply",
    "send_to_device",
]
