"""The reference's import path for names of files. No logic here."""

from anydevice import constants
from anydevice.constants import *  # noqa: F403 - a face: all of them

__all__ = constants.__all__
