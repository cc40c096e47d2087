"""The ``anydevice`` command.

Subcommands of this package stand beside this file. Other packages add theirs by an entry point in
the group ``anydevice.commands``: a function ``register(subparsers)`` that adds one parser and calls
``parser.set_defaults(run=function)``, where ``function(args)`` returns the exit code.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

from anydevice import __version__
from anydevice.cli import backends, devices, run
from anydevice.errors import AnyDeviceError

__all__ = ["COMMAND_GROUP", "main"]

#: The entry-point group by which other packages add subcommands.
COMMAND_GROUP: Final = "anydevice.commands"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the words after ``anydevice``; None takes them from the process.

    Returns:
        The exit code: 0 when all went well, 1 for an error that is explained on stderr, 2 for words
        that cannot be read.
    """
    parser = argparse.ArgumentParser(
        prog="anydevice",
        description="Run PyTorch models that do not fit on one device, on any accelerator.",
    )
    parser.add_argument("--version", action="version", version=f"anydevice {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for register in (devices.register, backends.register, run.register):
        register(subparsers)
    _add_plugins(subparsers)
    args = parser.parse_args(argv)
    execute: Callable[[argparse.Namespace], int] = args.run
    try:
        return execute(args)
    except AnyDeviceError as error:
        print(f"anydevice: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


def _add_plugins(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add other packages' subcommands; one that cannot be loaded leaves the rest as they are."""
    for point in importlib.metadata.entry_points(group=COMMAND_GROUP):
        try:
            point.load()(subparsers)
        except Exception as error:  # noqa: BLE001 - a broken plugin must not take the command with it
            print(f"anydevice: command {point.name!r} is broken: {error}", file=sys.stderr)
