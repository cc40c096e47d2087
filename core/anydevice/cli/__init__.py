"""The ``anydevice`` command.

Subcommands of this package stand next to this file; each is imported when it is asked for, so that
``--version`` and a misspelled command do not wait for torch. Other packages add theirs by an entry
point in the group ``anydevice.commands``: a function ``register(subparsers)`` that adds one parser
and calls ``parser.set_defaults(run=function)``, where ``function(args)`` returns the exit code.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from anydevice._version import __version__
from anydevice.errors import AnyDeviceError
from anydevice.text import suggest

__all__ = ["COMMAND_GROUP", "full_parser", "main"]

#: The entry-point group by which other packages add subcommands.
COMMAND_GROUP: Final = "anydevice.commands"
#: Our own subcommands, in the order of ``--help``: the module next to this file, and its line in
#: the list of commands.
_COMMANDS: Final = {
    "run": ("run", "load a transformers model over the devices and run it"),
    "plan": ("plan", "show where a model's weights would go, without the weights"),
    "estimate": ("estimate", "say how much memory a model needs"),
    "launch": ("launch", "run a script in several processes"),
    "config": ("config", "write the configuration file of launch"),
    "test": ("selftest", "check that processes of this machine work together"),
    "merge-weights": ("merge_weights", "join a sharded checkpoint into safetensors files"),
    "devices": ("devices", "list the devices that can be used now"),
    "backends": ("backends", "list every backend plugin, also broken ones"),
    "env": ("env", "print what a bug report needs"),
    "completion": ("completion", "print a script that completes commands in a shell"),
}
_ALIASES: Final = {"estimate-memory": "estimate"}
#: Exit codes other than 0: an error that is explained on stderr; words that cannot be read.
_FAILED, _USAGE = 1, 2
_INTERRUPTED: Final = 130
_PIPE_CLOSED: Final = 141
#: Arguments of Python functions, as the command line spells them.
_ARGUMENTS: Final = re.compile(
    r"\b(max_memory|device_map|offload_folder|dtype|revision|variant|token|trust_remote_code|"
    r"headroom)(?==)"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the words after ``anydevice``; None takes them from the process.

    Returns:
        The exit code: 0 when all went well, 1 for an error that is explained on stderr, 2 for words
        that cannot be read, 130 after Ctrl-C, 141 when the reader of the output went away; for
        ``launch`` the script's.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] == "--version":
        print(f"anydevice {__version__}")
        return 0
    command = _ALIASES.get(words[0], words[0]) if words else ""
    try:
        if command == "launch":  # its words are not argparse's
            return _load("launch").run_words(words[1:])  # type: ignore[no-any-return]
        return _parse_and_run(command, words)
    except AnyDeviceError as error:
        message = _ARGUMENTS.sub(lambda m: "--" + m[1].replace("_", "-"), str(error))
        print(f"anydevice: {type(error).__name__}: {message}", file=sys.stderr)
        return _FAILED
    except KeyboardInterrupt:
        print("anydevice: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        # What Python flushes at its end would raise once more.
        with contextlib.suppress(Exception):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _PIPE_CLOSED


def _parse_and_run(command: str, words: list[str]) -> int:
    points = list(importlib.metadata.entry_points(group=COMMAND_GROUP))
    names = [*_COMMANDS, *_ALIASES, *(point.name for point in points)]
    if command and not command.startswith("-") and command not in names:
        hint = suggest(command, names) or "; anydevice --help lists them"
        print(f"anydevice: there is no command {command!r}{hint}", file=sys.stderr)
        return _USAGE
    parser = _parser(command, points)
    args, unknown = parser.parse_known_args(_prepared(command, words))
    if unknown:
        print(
            f"anydevice {args.command}: {_explained(parser, args.command, unknown)}",
            file=sys.stderr,
        )
        return _USAGE
    execute: Callable[[argparse.Namespace], int] = args.run
    code = execute(args)
    sys.stdout.flush()  # a reader that went away is noticed here, not at the interpreter's end
    return code


def _explained(parser: argparse.ArgumentParser, command: str, unknown: list[str]) -> str:
    """What is wrong with words that a command does not take, and what it takes instead."""
    option = next((word.partition("=")[0] for word in unknown if word.startswith("-")), None)
    if option is None:
        return (
            f"{unknown[0]!r} is one word too many; anydevice {command} --help shows what it takes"
        )
    hints = getattr(_load(_COMMANDS[command][0]), "HINTS", {}) if command in _COMMANDS else {}
    if option in hints:
        return f"there is no option {option}: {hints[option]}"
    subparsers: Any = next(a for a in parser._actions if a.dest == "command")
    known = subparsers.choices[command]._option_string_actions
    near = suggest(option, known) or f"; anydevice {command} --help lists them"
    return f"there is no option {option}{near}"


def full_parser() -> argparse.ArgumentParser:
    """The parser with the options of every command, other packages' too."""
    return _parser(None, importlib.metadata.entry_points(group=COMMAND_GROUP))


def _parser(
    command: str | None, points: Iterable[importlib.metadata.EntryPoint]
) -> argparse.ArgumentParser:
    """The parser, with the options of ``command``; None: of all."""
    parser = argparse.ArgumentParser(
        prog="anydevice",
        usage="anydevice [--version] COMMAND [options]",
        description="Run and train PyTorch models on any accelerator.",
    )
    parser.add_argument("--version", action="version", version=f"anydevice {__version__}")
    subparsers = parser.add_subparsers(
        dest="command",
        required=True,
        metavar="COMMAND [options]",
        title="commands (`anydevice COMMAND --help` shows the options of one)",
        prog="anydevice",
    )
    for name, (module, text) in _COMMANDS.items():
        if command in (name, None) and name != "launch":
            _load(module).register(subparsers)
        else:
            subparsers.add_parser(name, help=text)
    for point in points:
        try:
            point.load()(subparsers)
        except Exception as error:  # noqa: BLE001 - a broken plugin must not take the command with it
            print(f"anydevice: command {point.name!r} is broken: {error}", file=sys.stderr)
    return parser


def _prepared(command: str, words: list[str]) -> list[str]:
    """The words for the parser, with the command's own name, after its own reading of them."""
    if command not in _COMMANDS:
        return words
    prepare: Callable[[list[str]], list[str]] | None = getattr(
        _load(_COMMANDS[command][0]), "prepare", None
    )
    rest = words[1:]
    return [command, *(prepare(rest) if prepare is not None else rest)]


def _load(module: str) -> Any:
    return importlib.import_module(f"anydevice.cli.{module}")
