"""Tensors that are not one plain block of numbers: sparse, quantized and wrapped ones."""

from __future__ import annotations

import torch

from anydevice.checkpoint.info import TensorInfo, form_of
from anydevice.tensors import is_sharded

__all__ = ["fault_of_form"]


def fault_of_form(name: str, info: TensorInfo, old: torch.Tensor) -> str | None:
    """Why a tensor of a checkpoint cannot be loaded into the model's ``old``; None where it can."""
    if info.form == "meta":
        return (
            f"{name} has no data in the checkpoint: it was on meta when it was saved. Save it from "
            "a model that is loaded"
        )
    sharded = is_sharded(old)
    own = None if sharded else form_of(old)
    own = None if own == "meta" else own
    if info.form == own and (sharded or not hasattr(old, "__tensor_flatten__")):
        return None
    return (
        f"{name} is {info.form or 'dense'} in the checkpoint and {own or 'dense'} in the model: "
        "save it as dense numbers, or load it before the model's weight is converted"
    )
