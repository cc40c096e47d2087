"""Each setting's value and where it came from: flag, then environment, then file, then default."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from anydevice.errors import OptionError
from anydevice.launch.config_file import ConfigFile, find_config, read_config
from anydevice.launch.settings import Setting
from anydevice.launch.table import BY_NAME, SETTINGS
from anydevice.processes.environment import first_host

__all__ = ["Resolved", "resolve"]


@dataclasses.dataclass(frozen=True)
class Resolved:
    """The settings of a launch.

    Attributes:
        values: by name; those that nothing gives are absent.
        origins: for each, where it came from: ``"flag"``, ``"environment NAME"``,
            ``"file PATH (key)"``, ``"default"``.
        config: the configuration file that was read, if any.
    """

    values: dict[str, Any]
    origins: dict[str, str]
    config: ConfigFile | None

    def get(self, name: str) -> Any:
        """The value, or None."""
        return self.values.get(name)

    def where(self, name: str) -> str:
        """The setting's name with its source, for messages."""
        origin = self.origins.get(name, "default")
        return f"--{name}" if origin == "flag" else f"{name} (from {origin})"

    def without_effect(self) -> list[str]:
        """The settings that change nothing, each with the reason, and what to do instead."""
        found = []
        for name, value in self.values.items():
            setting, origin = BY_NAME[name], self.origins[name]
            # What every file of Accelerate says, and no script is told, is not worth a word.
            if setting.unused and value and (origin == "flag" or setting.variable):
                found.append(f"{self.where(name)} has no effect: {setting.unused}")
            elif setting.needs and origin.startswith("file") and not self.get(setting.needs):
                found.append(f"{self.where(name)} has no effect without --{setting.needs}")
        return found


def resolve(flags: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> Resolved:
    """Bring the sources together.

    Args:
        flags: what the command line gives, by name.
        environment: by default the process's.

    Raises:
        OptionError: the file or a variable cannot be read, or two settings contradict each other.
    """
    environment = os.environ if environment is None else environment
    path = find_config(flags.get("config_file"))
    config = read_config(path) if path is not None else None
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for setting in SETTINGS:
        found = _find(setting, flags, environment, config)
        if found is not None:
            values[setting.name], origins[setting.name] = found
    if config is not None:
        values["config_file"] = str(config.path)
        origins.setdefault("config_file", "found")
    resolved = Resolved(values, origins, config)
    _settle_device(resolved)
    _check(resolved, environment)
    return resolved


def _find(
    setting: Setting,
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    config: ConfigFile | None,
) -> tuple[Any, str] | None:
    if setting.name in flags:
        return flags[setting.name], "flag"
    own = setting.variable.replace("ACCELERATE_", "ANYDEVICE_", 1)
    for variable in dict.fromkeys((own, setting.variable, *setting.reads)):
        text = environment.get(variable, "") if variable else ""
        if text and _applies(variable, environment):
            return setting.read(text, variable), f"environment {variable}"
    nodes = environment.get("SLURM_STEP_NODELIST", "")
    if setting.name == "main_process_ip" and nodes and _applies("SLURM_", environment):
        return first_host(nodes), "environment SLURM_STEP_NODELIST"
    if config is not None and setting.name in config.values:
        key = config.origins[setting.name]
        return config.values[setting.name], f"file {config.path} ({key})"
    if setting.default is not None:
        return setting.default, "default"
    return None


def _applies(variable: str, environment: Mapping[str, str]) -> bool:
    """SLURM's variables count in a step that has one task on each node, as srun makes it."""
    if not variable.startswith("SLURM_"):
        return True
    nodes = environment.get("SLURM_STEP_NUM_NODES", "")
    return nodes not in ("", "1") and nodes == environment.get("SLURM_STEP_NUM_TASKS")


def _settle_device(resolved: Resolved) -> None:
    """``cpu``, ``multi_gpu`` and ``device_type`` say one thing: the strongest source decides."""
    order = ("flag", "environment", "file")
    asked = [n for n in ("device_type", "cpu", "multi_gpu") if resolved.get(n)]
    if len(asked) < 2:
        return
    rank = {n: order.index(resolved.origins[n].split()[0]) for n in asked}
    best = min(rank.values())
    strongest = [n for n in asked if rank[n] == best]
    kinds = {_says(resolved, n) for n in strongest}
    if len(kinds) > 1:
        raise OptionError(
            f"{' and '.join(resolved.where(n) for n in strongest)} contradict each other: give one"
        )
    for name in asked:
        if name not in strongest:
            del resolved.values[name], resolved.origins[name]


def _says(resolved: Resolved, name: str) -> bool:
    """Whether a setting asks for the host."""
    return resolved.get(name) == "cpu" if name == "device_type" else name == "cpu"


def _check(resolved: Resolved, environment: Mapping[str, str]) -> None:
    for name, origin in resolved.origins.items():
        needs = BY_NAME[name].needs
        if origin == "flag" and needs and not resolved.get(needs):
            instead = BY_NAME[name].instead
            raise OptionError(
                f"--{name} has no effect without --{needs}" + (f"; {instead}" if instead else "")
            )
    paradigms = [n for n in ("use_fsdp", "use_deepspeed", "use_megatron_lm") if resolved.get(n)]
    if len(paradigms) > 1:
        raise OptionError(f"{' and '.join(map(resolved.where, paradigms))}: choose one")
    world = environment.get("WORLD_SIZE", "")
    if world and world != str(resolved.get("num_processes")):
        raise OptionError(
            f"WORLD_SIZE={world} is set, and {resolved.where('num_processes')} is "
            f"{resolved.get('num_processes')}: unset WORLD_SIZE, or ask for as many processes"
        )
    if resolved.get("module") and resolved.get("no_python"):
        raise OptionError("--module and --no_python: choose one")
