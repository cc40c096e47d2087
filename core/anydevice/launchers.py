"""The reference's import path for starting processes from a program. No logic here."""

from anydevice.training.launchers import debug_launcher, notebook_launcher

__all__ = ["debug_launcher", "notebook_launcher"]
