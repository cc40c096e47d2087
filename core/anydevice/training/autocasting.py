"""The reference's function for autocast."""

from __future__ import annotations

import contextlib
from typing import Any, Final

import torch

from anydevice.engines.precise import Autocast
from anydevice.handlers import AutocastKwargs
from anydevice.training.state import AcceleratorState

__all__ = ["get_mixed_precision_context_manager"]

_DTYPES: Final = {"fp16": torch.float16, "bf16": torch.bfloat16}


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: AutocastKwargs | None = None
) -> contextlib.AbstractContextManager[Any]:
    """A context that computes in the precision of the `AcceleratorState`.

    Args:
        native_amp: False: a context that does nothing.
        autocast_kwargs: more arguments of `torch.autocast`.

    Example:
        >>> from anydevice.utils import get_mixed_precision_context_manager
        >>> with get_mixed_precision_context_manager():  # not native: changes nothing
        ...     print(1)
        1
    """
    if not native_amp:
        return contextlib.nullcontext()
    state = AcceleratorState()
    options = {} if autocast_kwargs is None else autocast_kwargs.to_kwargs()
    made: contextlib.AbstractContextManager[Any] = Autocast(
        state.device.type, _DTYPES.get(state.mixed_precision), **options
    ).region()
    return made
