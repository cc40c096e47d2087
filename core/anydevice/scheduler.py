"""The reference's import path for prepared schedulers. No logic here."""

from anydevice.training import AcceleratedScheduler

__all__ = ["AcceleratedScheduler"]
