"""The reference's import path for configuration files. No logic here."""

from typing import Any

from anydevice.launch.config_file import default_path as _default_path
from anydevice.launch.config_file import load_config_from_file

__all__ = ["default_config_file", "load_config_from_file"]


def __getattr__(name: str) -> Any:
    if name == "default_config_file":  # read when asked for: the environment names the folder
        return str(_default_path())
    raise AttributeError(f"module 'anydevice.commands.config' has no attribute {name!r}")
