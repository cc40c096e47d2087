"""Trackers of experiments: one protocol, found by name among entry points."""

from anydevice.training.tracking.base import GeneralTracker, find_tracker, list_trackers
from anydevice.training.tracking.choosing import choose_trackers
from anydevice.training.tracking.jsonl import JSONLinesTracker
from anydevice.training.tracking.tensorboard import TensorBoardTracker
from anydevice.training.tracking.wandb import WandBTracker

__all__ = [
    "GeneralTracker",
    "JSONLinesTracker",
    "TensorBoardTracker",
    "WandBTracker",
    "choose_trackers",
    "find_tracker",
    "list_trackers",
]
