"""torch's defaults around a call: default dtype and device, autocast."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from anydevice_conformance.subject import Subject

__all__ = ["AMBIENTS", "OF_SITUATIONS", "default_dtype"]


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


@contextlib.contextmanager
def _modes() -> Iterator[None]:
    """Another default dtype, deterministic algorithms, the host's autocast; no thread backward."""
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    choose = torch._C._set_deterministic_algorithms  # torch's own function imports its compiler
    choose(True, warn_only=True)
    try:
        with (
            default_dtype(torch.float64),
            torch.autocast("cpu", dtype=torch.bfloat16),
            torch.autograd.set_multithreading_enabled(False),
        ):
            yield
    finally:
        choose(before, warn_only=warns)


#: torch's defaults by name: set around a call alone, since what a check does besides needs its own.
AMBIENTS: Final[dict[str, Callable[[Subject], Any]]] = {
    "": lambda subject: contextlib.nullcontext(),
    "default dtype float64": lambda subject: default_dtype(torch.float64),
    "default dtype float64, deterministic, the host's autocast": lambda subject: _modes(),
    "default device": lambda subject: subject.device(subject.indices[-1]),
    "default device meta": lambda subject: torch.device("meta"),
    "autocast": lambda subject: _autocast(subject),
}

#: Of those, what members are called in: what holds another's modes stands for it.
OF_SITUATIONS: Final = [name for name in AMBIENTS if name != "default dtype float64"]
