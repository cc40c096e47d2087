"""The reference's import path for trackers. No logic here."""

from anydevice.training.tracking import (
    GeneralTracker,
    JSONLinesTracker,
    TensorBoardTracker,
    WandBTracker,
)

__all__ = ["GeneralTracker", "JSONLinesTracker", "TensorBoardTracker", "WandBTracker"]
