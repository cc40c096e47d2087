"""The reference's import path for prepared optimizers. No logic here."""

from anydevice.training import AcceleratedOptimizer

__all__ = ["AcceleratedOptimizer"]
