"""Checkpoints: finding, downloading, reading and verifying them."""

from __future__ import annotations

from anydevice.checkpoint.checkpoint import Checkpoint, fetch_checkpoint, open_checkpoint
from anydevice.checkpoint.info import TensorInfo

__all__ = ["Checkpoint", "TensorInfo", "fetch_checkpoint", "open_checkpoint"]
