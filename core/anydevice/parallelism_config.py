"""The reference's import path for `ParallelismConfig`. No logic here."""

from anydevice.engines import ParallelismConfig

__all__ = ["ParallelismConfig"]
