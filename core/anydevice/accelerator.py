"""The reference's import path for `Accelerator`. No logic here."""

from anydevice.training import Accelerator, GradientAccumulationPlugin

__all__ = ["Accelerator", "GradientAccumulationPlugin"]
