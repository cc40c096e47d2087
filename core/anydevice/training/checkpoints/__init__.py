"""Checkpoints of a training run: complete or absent, on any number of processes."""

from anydevice.training.checkpoints.background import BackgroundSave
from anydevice.training.checkpoints.loading import load_checkpoint
from anydevice.training.checkpoints.saving import SaveRequest, save_checkpoint

__all__ = ["BackgroundSave", "SaveRequest", "load_checkpoint", "save_checkpoint"]
