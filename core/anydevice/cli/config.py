"""``anydevice config``: write, show and update the configuration file of ``anydevice launch``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from anydevice.errors import OptionError

__all__ = ["register"]

#: What a file of the newest version always says.
_ALWAYS = {"num_machines": 1, "num_processes": 1, "machine_rank": 0, "mixed_precision": "no"}


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "config",
        description="Write the configuration file that `anydevice launch` reads. Without a "
        "terminal, or with --default, it is written at once from what the machine has; else a few "
        "questions are asked. Accelerate's own file is read, too: its values are offered.",
    )
    parser.add_argument(
        "action",
        nargs="?",
        choices=["show", "update", "default"],
        help="show what a launch would use; update a file of an older version in place; write the "
        "default file",
    )
    parser.add_argument(
        "--config_file", "--config-file", metavar="PATH", help="default: in Hugging Face's cache"
    )
    parser.add_argument("--default", action="store_true", help="ask no questions")
    parser.add_argument(
        "--mixed_precision",
        "--mixed-precision",
        choices=["no", "fp16", "bf16"],
        help="of --default",
    )
    parser.add_argument("--json", action="store_true", help="with show: print JSON")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from anydevice.launch.config_file import default_path

    if args.action == "show":
        return _show(args)
    if args.action == "update":
        return _update(args)
    path = Path(args.config_file).expanduser() if args.config_file else default_path()
    asks = args.action is None and not args.default and sys.stdin.isatty()
    return _write(path, asks, args.mixed_precision)


def _write(path: Path, asks: bool, precision: str | None) -> int:
    from anydevice.launch.config_file import write_config
    from anydevice.launch.questions import ask, machine_defaults

    values = machine_defaults()
    if asks:
        values |= _known(path)
        values = ask(input, print, values)
    if precision is not None:
        values["mixed_precision"] = precision
    print(f"written: {write_config(values, path)}")
    return 0


def _known(path: Path) -> dict[str, Any]:
    """The values of the file that a launch reads now, to be offered."""
    from anydevice.launch.config_file import find_config, read_config

    found = path if path.is_file() else find_config()
    if found is None:
        return {}
    config = read_config(found)
    print(f"offering the values of {found}")
    if config.left_aside:
        print(f"left aside: {', '.join(config.left_aside)}")
    return config.values


def _show(args: argparse.Namespace) -> int:
    from anydevice.launch.resolve import resolve

    settings = resolve({"config_file": args.config_file} if args.config_file else {})
    path = settings.config.path if settings.config else None
    left = settings.config.left_aside if settings.config else []
    if args.json:
        values = {
            name: {"value": value, "from": settings.origins[name]}
            for name, value in settings.values.items()
        }
        print(
            json.dumps({"file": path and str(path), "values": values, "left_aside": left}, indent=2)
        )
        return 0
    print(f"file: {path or 'none; `anydevice config` writes one'}")
    for name, value in settings.values.items():
        if name != "config_file":
            print(f"  {name} = {value}  ({settings.origins[name]})")
    if left:
        print(f"without effect here: {', '.join(left)}")
    return 0


def _update(args: argparse.Namespace) -> int:
    from anydevice.launch.config_file import default_path, find_config, read_config, write_config

    found = find_config(args.config_file)
    if found is None:
        raise OptionError("there is no configuration file to update; write one: anydevice config")
    target = found if args.config_file else default_path()
    config = read_config(found)
    write_config({**_ALWAYS, **config.values}, target)
    print(f"updated: {target}" + (f" (from {found})" if target != found else ""))
    if config.left_aside:
        print(f"left aside: {', '.join(config.left_aside)}")
    return 0
