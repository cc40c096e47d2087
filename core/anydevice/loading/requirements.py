"""What must hold before a checkpoint is loaded, and what is worth a warning."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Final

from torch import nn

from anydevice.checkpoint.checkpoint import Checkpoint
from anydevice.errors import OffloadStoreError
from anydevice.loading.match import Plan, Target
from anydevice.loading.mismatch import require_match
from anydevice.loading.options import LoadOptions
from anydevice.loading.ties import broken_ties
from anydevice.text import list_some

__all__ = ["compare_ties", "require_loadable"]

_log: Final = logging.getLogger("anydevice.loading")


def require_loadable(
    model: nn.Module,
    checkpoint: Checkpoint,
    plan: Plan,
    options: LoadOptions,
    written: Sequence[Target],
) -> None:
    """Check that a checkpoint can be loaded as planned; warn of what is left out.

    ``written`` are the weights that must be written to the offload folder.

    Raises:
        CheckpointMismatchError: names or shapes do not match.
        OffloadStoreError: the offload folder is needed and not given, or is not a folder.
    """
    source = checkpoint.source
    require_match(plan, model, source, strict=options.strict, allow_missing=options.allow_missing)
    if written:
        _require_folder(options.offload_folder, written)
    if plan.unexpected:
        names, kind = list_some(plan.unexpected), type(model).__name__
        _log.warning("%s has no place for %s of %s", kind, names, source)
    if plan.left_on_meta:
        names = list_some(plan.left_on_meta)
        _log.warning("%s of %s stay on meta: %s has none", names, type(model).__name__, source)


def compare_ties(plan: Plan, checkpoint: Checkpoint, options: LoadOptions) -> None:
    """Report tied weights that would be dropped; with ``strict`` it is an error."""
    for line in broken_ties(plan, checkpoint, whole=options.strict):
        if options.strict:
            plan.mismatched.append(line)
        else:
            _log.warning("%s: %s; those of the latter are taken", checkpoint.source, line)


def _require_folder(folder: str | None, targets: Sequence[Target]) -> None:
    if folder is not None:
        if os.path.exists(folder) and not os.path.isdir(folder):
            raise OffloadStoreError(f"offload_folder={folder!r} is not a folder")
        return
    first = targets[0]
    if first.is_cast:
        why = f"cast from {first.info.dtype} to {first.dtype}"
    else:
        why = "not in a file as plain bytes"
    raise OffloadStoreError(
        f"{len(targets)} weights are placed on the disk and must be written first ({first.name} is "
        f"{why}): give offload_folder=, or keep the file's dtype with dtype='auto'"
    )
