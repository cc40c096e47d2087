"""Checkpoints: finding, reading, verifying and loading them; the offload store."""

from __future__ import annotations

from anydevice.checkpoint.info import TensorInfo
from anydevice.checkpoint.reading import Checkpoint, fetch_checkpoint, open_checkpoint

__all__ = ["Checkpoint", "TensorInfo", "fetch_checkpoint", "open_checkpoint"]
