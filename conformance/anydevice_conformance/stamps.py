"""What a report is stamped with, seen from the process that has the device."""

from __future__ import annotations

import dataclasses
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

import anydevice
from anydevice_conformance.catalogue import suite_digest
from anydevice_conformance.simulator import installed_name
from anydevice_conformance.subject import Subject

__all__ = ["command_line", "device_stamps", "stamps"]


def stamps(subject: Subject) -> dict[str, Any]:
    """Versions and declarations; nothing that touches a device."""
    record = subject.record
    claimed = dataclasses.asdict(subject.backend.capabilities)
    return {
        "device_type": subject.type,
        "anydevice": anydevice.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "plugin": {
            "distribution": record.distribution,
            "version": record.version,
            "entry_point": record.entry_point,
        },
        "capabilities": {name: {"claimed": c, "works": None} for name, c in claimed.items()},
        "quick": subject.quick,
        "assumed": sorted(subject.assumed),
        "seed": subject.seed,
        "examples": subject.count,
        "suite_digest": suite_digest(),
    }


def device_stamps(subject: Subject) -> dict[str, Any]:
    """Names and sizes of the devices, or why there is none, and the driver's version."""
    return {
        "no_device_because": subject.why_none() if not subject.indices else "",
        # Asked once the devices are there: the first question may have made them.
        "simulated": installed_name() == subject.type,
        "driver": _try(lambda: str(subject.backend.driver_version())) or "",
        "devices": [
            {
                "index": index,
                "name": _try(lambda index=index: str(subject.backend.device_name(index))) or "?",
                "total": _try(lambda index=index: int(subject.backend.memory_info(index).total)),
            }
            for index in subject.indices
        ],
    }


def command_line() -> list[str]:
    """The words that started this process, as a person would type them again."""
    program = Path(sys.argv[0])
    name = program.parent.name if program.name == "__main__.py" else program.stem
    return [name or "python", *sys.argv[1:]]


def shown(command: list[str]) -> str:
    """A command as one line."""
    return shlex.join(command)


def _try(read: Any) -> Any:
    try:
        return read()
    except Exception:  # noqa: BLE001 - a stamp that cannot be had is left empty; checks find the fault
        return None
