"""torch's defaults around a call: default dtype and device, autocast."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from anydevice_conformance.subject import Subject

__all__ = ["AMBIENTS", "default_dtype"]


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Another default dtype meanwhile."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _autocast(subject: Subject) -> contextlib.AbstractContextManager[Any]:
    """Autocast, where the device has it."""
    try:
        dtypes = sorted(subject.backend.autocast_dtypes(), key=str)
        return torch.autocast(subject.type, dtype=dtypes[0])
    except Exception:  # noqa: BLE001 - it has none
        return contextlib.nullcontext()


#: torch's defaults by name: set around a call alone, since what a check does besides needs its own.
AMBIENTS: Final[dict[str, Callable[[Subject], Any]]] = {
    "": lambda subject: contextlib.nullcontext(),
    "default dtype float64": lambda subject: default_dtype(torch.float64),
    "default device": lambda subject: subject.device(subject.indices[-1]),
    "default device meta": lambda subject: torch.device("meta"),
    "autocast": lambda subject: _autocast(subject),
}
