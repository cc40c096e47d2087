"""``anydevice backends``: every plugin found, and why one is not used."""

from __future__ import annotations

import argparse
import json
from typing import Any

from anydevice import registry
from anydevice.backend_check import member_faults
from anydevice.cli.text import table

__all__ = ["describe_backends", "register"]


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "backends", description="List every backend plugin, also broken ones."
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=_run)


def describe_backends() -> list[dict[str, Any]]:
    """Each backend with its status, the reason, and what is wrong with it."""
    found: list[dict[str, Any]] = [
        {
            "device_type": record.device_type,
            "status": record.status,
            "reason": record.reason,
            "notes": [
                *record.notes,
                *(member_faults(record.backend) if record.backend is not None else ()),
            ],
            "distribution": record.distribution,
            "version": record.version,
            "entry_point": record.entry_point,
        }
        for record in registry.list_backends()
    ]
    return found


def _run(args: argparse.Namespace) -> int:
    found = describe_backends()
    if args.json:
        print(json.dumps(found, indent=2))
        return 0
    head = ["TYPE", "STATUS", "PACKAGE", "REASON"]
    rows = [
        [f["device_type"], f["status"], f"{f['distribution']} {f['version']}".strip(), f["reason"]]
        for f in found
    ]
    print(table(head, rows))
    for f in found:
        for note in f["notes"]:
            print(f"{f['device_type']} ({f['distribution']}): {note}")
    return 0
