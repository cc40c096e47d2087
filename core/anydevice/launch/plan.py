"""From settings to a command of ``torch.distributed.run`` and the environment of the script."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from anydevice import registry
from anydevice.backend import DeviceBackend
from anydevice.errors import MissingDependencyError, OptionError
from anydevice.launch.rendezvous import rendezvous
from anydevice.launch.resolve import Resolved
from anydevice.launch.table import SETTINGS

__all__ = ["LaunchPlan", "make_plan"]

_HOST: Final = "cpu"
_ABOUT_OUTPUT: Final = frozenset({"dry_run", "json"})


@dataclasses.dataclass(frozen=True)
class LaunchPlan:
    """What a launch does.

    Attributes:
        torchrun: arguments of ``torch.distributed.run``, up to the script.
        script: how each process runs the script: its words after those arguments.
        environment: what is added to the environment of the processes.
        reasons: for each added variable, where its value came from.
        settings: the settings that it was made from.
        device_type: the type of device that the script uses.
        processes: how many on this machine.
    """

    torchrun: list[str]
    script: list[str]
    environment: dict[str, str]
    reasons: dict[str, str]
    settings: Resolved
    device_type: str
    processes: int

    def command(self) -> list[str]:
        """The command that is run: ``torch.distributed.run`` in a process that reports failures."""
        python = [] if self._plain else ["-m", "anydevice.launch.worker"]
        return [
            sys.executable,
            "-m",
            "anydevice.launch.agent",
            *self.torchrun,
            *(["--no-python"] if self._plain else []),
            *python,
            *([] if self._plain or not self.settings.get("module") else ["--module"]),
            *self.script,
        ]

    def equivalent(self) -> list[str]:
        """The same in words of PyTorch alone."""
        kind = [f"--{w}" for w in ("module", "no-python") if self.settings.get(w.replace("-", "_"))]
        return [sys.executable, "-m", "torch.distributed.run", *self.torchrun, *kind, *self.script]

    @property
    def _plain(self) -> bool:
        """Whether the script is a program that Python does not run."""
        return bool(self.settings.get("no_python"))

    def text(self) -> str:
        """What ``--dry-run`` prints."""
        rows = ["command:", f"  {shlex.join(self.command())}", "the same without the report:"]
        rows += [f"  {shlex.join(self.equivalent())}", "environment:"]
        rows += [
            f"  {k}={shlex.quote(v)}  ({self.reasons[k]})" for k, v in self.environment.items()
        ]
        rows.append("settings:")
        rows += [
            f"  {name} = {value}  ({self.settings.origins[name]})"
            for name, value in self.settings.values.items()
            if name not in _ABOUT_OUTPUT
        ]
        if self.settings.config is not None and self.settings.config.left_aside:
            rows.append(f"left aside in {self.settings.config.path}:")
            rows += [f"  {key}" for key in self.settings.config.left_aside]
        if idle := self.settings.without_effect():
            rows += ["without effect:", *(f"  {line}" for line in idle)]
        return "\n".join(rows)

    def as_json(self) -> dict[str, Any]:
        """The same for a program."""
        return {
            "command": self.command(),
            "torchrun": self.equivalent(),
            "environment": {
                k: {"value": v, "from": self.reasons[k]} for k, v in self.environment.items()
            },
            "settings": {
                k: {"value": v, "from": self.settings.origins[k]}
                for k, v in self.settings.values.items()
                if k not in _ABOUT_OUTPUT
            },
            "left_aside": self.settings.config.left_aside if self.settings.config else [],
            "without_effect": self.settings.without_effect(),
            "device_type": self.device_type,
            "processes": self.processes,
        }


def make_plan(settings: Resolved, script: str, arguments: Sequence[str]) -> LaunchPlan:
    """Decide on devices, processes and rendezvous; check everything before anything starts.

    Raises:
        OptionError: settings that this machine cannot meet, or a script that is not there.
        UnknownDeviceError: a device type that is not known.
        MissingDependencyError: a package that a setting needs is not installed.
    """
    _check_script(settings, script)
    _check_packages(settings)
    kind = _device_type(settings)
    backend = registry.get_backend(kind)
    machines = int(settings.get("num_machines"))
    processes = _processes(settings, kind, backend, machines)
    environment, reasons = _environment(settings, kind, backend, processes)
    torchrun = [
        *rendezvous(settings, machines),
        "--nproc-per-node",
        str(processes),
        "--max-restarts",
        str(settings.get("max_restarts")),
        "--monitor-interval",
        str(settings.get("monitor_interval")),
    ]
    for name in ("role", "tee", "log_dir"):
        if settings.get(name) is not None:
            torchrun += [f"--{name.replace('_', '-')}", str(settings.get(name))]
    words = [script, *arguments]
    return LaunchPlan(torchrun, words, environment, reasons, settings, kind, processes)


def _check_script(settings: Resolved, script: str) -> None:
    if settings.get("no_python"):
        if shutil.which(script) is None:
            raise OptionError(f"{script}: there is no such program, or it may not be run")
    elif settings.get("module"):
        if not all(part.isidentifier() for part in script.split(".")):
            raise OptionError(f"-m {script}: this is not the name of a module")
    elif not Path(script).exists():
        raise OptionError(f"{script}: there is no such script (for a module: -m {script})")


def _check_packages(settings: Resolved) -> None:
    for name, module, package in (
        ("use_deepspeed", "deepspeed", "deepspeed"),
        ("use_megatron_lm", "megatron", "megatron-core"),
    ):
        if settings.get(name) and importlib.util.find_spec(module) is None:
            raise MissingDependencyError(
                f"{settings.where(name)} needs {package}, which is not installed: pip install "
                f"{package}; or use --use_fsdp, which PyTorch brings along"
            )


# ---------------------------------------------------------------------- devices and processes


def _device_type(settings: Resolved) -> str:
    if settings.get("cpu"):
        return _HOST
    kind: str | None = settings.get("device_type")
    primary = registry.primary_type()
    if kind is None:
        if settings.get("multi_gpu") and primary is None:
            raise OptionError(
                f"{settings.where('multi_gpu')}: this machine has no accelerator; give --cpu"
            )
        return primary or _HOST
    if kind == _HOST:
        return _HOST
    registry.get_backend(kind)  # an unknown type is named
    here = [d for d in registry.available_devices() if d.type == kind]
    if not here:
        record = next(r for r in registry.list_backends() if r.device_type == kind)
        raise OptionError(
            f"{settings.where('device_type')} {kind}: no such device on this machine "
            f"({record.reason or record.status}); `anydevice devices` lists what there is"
        )
    return kind


def _processes(settings: Resolved, kind: str, backend: DeviceBackend, machines: int) -> int:
    """How many processes on this machine."""
    ids = _ids(settings, backend)
    devices = len(ids) if ids else (1 if kind == _HOST else backend.device_count())
    total = settings.get("num_processes")
    if total is None:
        settings.values["num_processes"] = devices * machines
        settings.origins["num_processes"] = f"default: one for each {kind} device"
        return devices
    if total % machines:
        raise OptionError(
            f"{settings.where('num_processes')} {total} is not a multiple of "
            f"{settings.where('num_machines')} {machines}; it counts the processes of all machines"
        )
    processes = int(total) // machines
    own = type(backend).local_device is not DeviceBackend.local_device
    if kind != _HOST and processes > devices and not own:
        raise OptionError(
            f"{settings.where('num_processes')}: {processes} processes on this machine, which has "
            f"{devices} {kind} {'device' if devices == 1 else 'devices'}; give at most as many, or "
            "--cpu"
        )
    return processes


def _ids(settings: Resolved, backend: DeviceBackend) -> list[str]:
    """The devices of ``--gpu_ids``; none when all may be used."""
    text = settings.get("gpu_ids")
    if text is None or str(text).lower() == "all":
        return []
    ids = [word.strip() for word in str(text).split(",")]
    where = f"{settings.where('gpu_ids')} {text!r}"
    if not all(ids) or len(set(ids)) != len(ids):
        raise OptionError(f"{where}: give indices of devices, each once, such as 0,2")
    if backend.visible_devices_env is None:
        raise OptionError(
            f"{where}: the backend of {backend.device_type!r} names no variable that hides devices"
        )
    count = backend.device_count()
    for word in ids:
        if word.isdecimal() and int(word) >= count:
            raise OptionError(f"{where}: there is no device {word}; this machine has {count}")
    return ids


# ---------------------------------------------------------------------- the environment


def _environment(
    settings: Resolved, kind: str, backend: DeviceBackend, processes: int
) -> tuple[dict[str, str], dict[str, str]]:
    """Variables of the script, and where each came from. Our own environment is not touched."""
    found: dict[str, str] = {}
    reasons: dict[str, str] = {}

    def add(name: str, value: str, reason: str) -> None:
        found[name], reasons[name] = value, reason

    vendor: Mapping[str, str] = backend.process_environment(processes)
    for name, value in vendor.items():
        if name not in os.environ:
            add(name, str(value), f"backend of {kind}")
    origin = settings.origins.get("device_type") or settings.origins.get("cpu")
    add("ACCELERATE_TORCH_DEVICE", kind, origin or "default: the machine's first type of device")
    for setting in SETTINGS:
        value = settings.get(setting.name)
        if setting.variable and value is not None and setting.name != "device_type":
            add(setting.variable, setting.render(value), settings.origins[setting.name])
    for name in list(found):
        own = name.replace("ACCELERATE_", "ANYDEVICE_", 1)
        if own != name and own in os.environ:  # it would be read first
            add(own, found[name], reasons[name])
    if "OMP_NUM_THREADS" not in found:
        threads = max(1, (_cores() or 1) // processes)
        add("OMP_NUM_THREADS", str(threads), f"default: cores divided by {processes} processes")
    ids = _ids(settings, backend)
    if ids and backend.visible_devices_env:
        add(backend.visible_devices_env, ",".join(ids), settings.origins["gpu_ids"])
    return found, reasons


def _cores() -> int | None:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return torch.get_num_threads()
