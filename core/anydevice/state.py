"""The reference's import path for the states of processes. No logic here."""

from anydevice.processes import DistributedType, PartialState
from anydevice.training.gradients import GradientState
from anydevice.training.state import AcceleratorState, is_initialized

__all__ = ["AcceleratorState", "DistributedType", "GradientState", "PartialState", "is_initialized"]
