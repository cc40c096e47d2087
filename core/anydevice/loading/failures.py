"""Errors of a load: each says whether the model is as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from anydevice import registry
from anydevice.errors import AnyDeviceError, CheckpointError, DoesNotFitError
from anydevice.loading.match import Plan

if TYPE_CHECKING:
    from anydevice.loading.applying import Loading

__all__ = ["explained"]


@contextlib.contextmanager
def explained(loading: Loading) -> Iterator[None]:
    """Let every error say whether the model is as it was; one that stops the program too.

    Raises:
        CheckpointError: loading failed half-way.
        DoesNotFitError: a device has too little memory.
    """
    try:
        yield
    except Exception as error:
        explanation = _explain(loading, error)
        if explanation is error:
            raise
        raise explanation from error
    except BaseException as error:
        if loading.touched:
            error.args = (*error.args, _half_loaded(loading))
        raise


def _explain(loading: Loading, error: Exception) -> Exception:
    source = loading.checkpoint.source
    if loading.touched:
        reason = f"The reason: {type(error).__name__}: {error}"
        return CheckpointError(f"{_half_loaded(loading)} {reason}")
    short = _without_memory(loading.plan, error)
    if short and not isinstance(error, AnyDeviceError):
        return DoesNotFitError(
            f"{short} has too little memory for the weights that it should get from {source}; the "
            "model is unchanged. Place less on it, by device_map or max_memory. "
            f"({error!s:.300})"
        )
    return error


def _half_loaded(loading: Loading) -> str:
    return (
        f"{type(loading.model).__name__} is half-loaded: some of its weights are from "
        f"{loading.checkpoint.source} and some are not, since loading failed half-way. Load it "
        "again before it is used."
    )


def _without_memory(plan: Plan, error: Exception) -> str:
    """The devices of which one ran out; empty where none did. The error names only the type."""
    devices = sorted({t.device for t in plan.targets if t.device.is_accelerator}, key=str)
    short = [d for d in devices if registry.get_backend(d.type).is_out_of_memory(error)]
    return " or ".join(map(str, short))
