"""Launch a script in several processes: settings, the configuration file, ``torch.distributed.run``.

This package translates and starts; it distributes nothing itself. It does not import ``training``,
nor is it imported by it: the two meet in the environment variables that a launch sets.
"""

from anydevice.launch.arguments import Words, help_text, read_words
from anydevice.launch.config_file import (
    ConfigFile,
    default_path,
    find_config,
    read_config,
    write_config,
)
from anydevice.launch.execute import execute
from anydevice.launch.plan import LaunchPlan, make_plan
from anydevice.launch.resolve import Resolved, resolve
from anydevice.launch.settings import Setting
from anydevice.launch.table import SETTINGS

__all__ = [
    "SETTINGS",
    "ConfigFile",
    "LaunchPlan",
    "Resolved",
    "Setting",
    "Words",
    "default_path",
    "execute",
    "find_config",
    "help_text",
    "make_plan",
    "read_config",
    "read_words",
    "resolve",
    "write_config",
]
