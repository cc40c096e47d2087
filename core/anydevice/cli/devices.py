"""``anydevice devices``: what this machine has."""

from __future__ import annotations

import argparse
import json
from typing import Any

from anydevice import registry
from anydevice.cli.text import size_text, table

__all__ = ["describe_devices", "devices_table", "register"]


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser("devices", description="List the devices that can be used now.")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=_run)


def describe_devices() -> list[dict[str, Any]]:
    """Each device with its backend, package, name, memory in bytes, and capabilities."""
    packages = {r.device_type: r for r in registry.list_backends() if r.backend is not None}
    found = []
    for device in registry.available_devices():
        record = packages[device.type]
        backend = record.backend
        assert backend is not None
        index = device.index or 0
        entry: dict[str, Any] = {
            "device": str(device),
            "backend": type(backend).__name__,
            "package": record.package,
            "name": "?",
            "free": None,
            "total": None,
            "capabilities": backend.capabilities.claimed(),
        }
        # One device's fault must not hide the others.
        try:
            entry["name"] = record.ask("device_name", index)
        except Exception as error:  # noqa: BLE001 - see above
            entry["name_error"] = f"{type(error).__name__}: {error}"
        try:
            memory = record.memory_info(index)
            entry |= {"free": memory.free, "total": memory.total}
        except Exception as error:  # noqa: BLE001 - see above
            entry["memory_error"] = f"{type(error).__name__}: {error}"
        found.append(entry)
    return found


def devices_table(found: list[dict[str, Any]]) -> str:
    """The devices as a table for a person."""
    rows = [
        [
            entry["device"],
            entry["name"],
            size_text(entry["free"]),
            size_text(entry["total"]),
            entry["package"],
            entry["backend"],
            ", ".join(entry["capabilities"]) or "-",
        ]
        for entry in found
    ]
    head = ["DEVICE", "NAME", "FREE", "TOTAL", "PACKAGE", "BACKEND", "CAPABILITIES"]
    notes = [
        f"{entry['device']}: {entry[key]}"
        for entry in found
        for key in ("name_error", "memory_error")
        if key in entry
    ]
    return "\n".join([table(head, rows), *notes])


def _run(args: argparse.Namespace) -> int:
    found = describe_devices()
    print(json.dumps(found, indent=2) if args.json else devices_table(found))
    return 0
