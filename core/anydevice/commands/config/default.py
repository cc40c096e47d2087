"""The reference's import path for writing a configuration. No logic here."""

from anydevice.utils import write_basic_config

__all__ = ["write_basic_config"]
