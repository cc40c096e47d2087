"""The reference's import path for launching from a program."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from anydevice.cli.launch import run_words

__all__ = ["launch_command", "launch_command_parser"]


class _Parser(argparse.ArgumentParser):
    """Takes all words as they are: the launcher reads them itself."""

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> argparse.Namespace:
        """The words, unread."""
        found = namespace or argparse.Namespace()
        found.words = list(sys.argv[1:] if args is None else args)
        return found


def launch_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """What reads the words of ``anydevice launch``, for `launch_command`.

    Args:
        subparsers: accepted for the reference's sake; None there too.

    Raises:
        OptionError: ``subparsers`` is given.

    Example:
        >>> from anydevice.commands.launch import launch_command_parser
        >>> launch_command_parser().parse_args(["--cpu", "script.py"]).words
        ['--cpu', 'script.py']
    """
    if subparsers is not None:
        from anydevice.errors import OptionError

        raise OptionError("subparsers= is not there: run `anydevice launch`, or leave it out")
    return _Parser(prog="anydevice launch")


def launch_command(args: argparse.Namespace) -> None:
    """Run a script in several processes, as ``anydevice launch`` does.

    Args:
        args: what `launch_command_parser` read.

    Raises:
        SystemExit: the script failed, or could not be started; with its code.
    """
    code = run_words(args.words)
    if code:
        raise SystemExit(code)
