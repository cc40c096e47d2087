"""A progress bar over bytes, and reading the pages of mapped weights."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import torch

from anydevice.interrupts import check, stopper
from anydevice.text import FALSE_WORDS

__all__ = ["Progress", "touch"]

_PAGE: Final = 4096
_STEP: Final = 32 << 20


class Progress:
    """A bar that may be off. `advance` may be called from any thread."""

    def __init__(self, shown: bool) -> None:
        self.shown = shown and os.environ.get("ANYDEVICE_PROGRESS", "").lower() not in FALSE_WORDS
        self._bar: Any = None
        self._lock = threading.Lock()

    def begin(self, total: int, what: str) -> None:
        """Show a new bar of ``total`` bytes, unless there is nothing to do."""
        self._end()
        if self.shown and total:
            from tqdm.auto import tqdm

            self._bar = tqdm(
                total=total, desc=what, unit="B", unit_scale=True, unit_divisor=1024, leave=False
            )

    def advance(self, nbytes: int) -> None:
        """Count bytes that are done."""
        if self._bar is not None:
            with self._lock:
                self._bar.update(nbytes)

    def _end(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_error: object) -> None:
        self._end()


def touch(tensors: Iterable[torch.Tensor], progress: Progress) -> None:
    """Read a byte of each page of host tensors, so that their files' pages are in memory."""
    pieces: list[torch.Tensor] = []
    for tensor in tensors:
        if tensor.is_contiguous() and tensor.layout is torch.strided and tensor.numel():
            flat = tensor.detach().view(-1).view(torch.uint8)
            pieces += [flat[at : at + _STEP] for at in range(0, len(flat), _STEP)]
    progress.begin(sum(len(piece) for piece in pieces), "Reading")

    must_stop = stopper()

    def read(piece: torch.Tensor) -> None:
        if must_stop():
            return
        piece[::_PAGE].max()
        progress.advance(len(piece))

    with ThreadPoolExecutor(2, "anydevice-touch") as pool:
        for _ in pool.map(read, pieces):
            pass
    check()
