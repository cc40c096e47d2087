"""``generate`` of a transformers model whose forward needs all ranks."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

import torch

from anydevice.nested import iter_tensors
from anydevice.processes import PartialState
from anydevice.randomness import synchronize_rng_states

__all__ = ["let_generate"]

#: Arguments that may differ between ranks: only one may want to print, say.
_MAY_DIFFER: Final = frozenset({"streamer"})
_PLAIN: Final = (str, bytes, int, float, bool, type(None))


def let_generate(
    model: Any,
    state: PartialState,
    trusted: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
) -> None:
    """Have ``model.generate`` run alike on all ranks.

    Before it starts, the ranks compare their arguments, and all take the random state of rank 0; so
    each draws the same tokens from the same logits, and the forwards need no check of their own.

    Args:
        model: nothing happens to one without ``generate``.
        state: of this process.
        trusted: a context in which forwards are not compared between ranks.

    Raises:
        CollectiveMismatchError: by ``generate``, where arguments differ.
    """
    own = getattr(model, "generate", None)
    if own is None or state.num_processes == 1:
        return

    @functools.wraps(own)
    def generate(*args: Any, **kwargs: Any) -> Any:
        state.meet("generate", _describe(args, kwargs))
        kinds = ["torch"]
        if state.device_backend.capabilities.device_rng:
            kinds.append(state.device.type)
        synchronize_rng_states(kinds)
        with trusted():
            return own(*args, **kwargs)

    model.generate = generate


def _describe(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Arguments as text: tensors by shape and a digest of their values."""
    found = []
    for name, value in [*enumerate(args), *sorted(kwargs.items())]:
        if name in _MAY_DIFFER:
            continue
        tensors = list(iter_tensors(value))
        if tensors:
            found.append(f"{name}: {', '.join(map(_digest, tensors))}")
        elif isinstance(value, _PLAIN):
            found.append(f"{name}={value!r}")
        else:
            found.append(f"{name}: {type(value).__name__}")
    return found


def _digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    digest = hashlib.blake2b(data, digest_size=4).hexdigest()
    return f"{tuple(tensor.shape)} {tensor.dtype} {digest}".replace("torch.", "")
