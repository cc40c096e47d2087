"""``anydevice test``: check that processes of this machine's configuration work together."""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from typing import Any, Final

__all__ = ["FOLDER", "register"]

#: The variable that names a folder which all processes of this machine share.
FOLDER: Final = "ANYDEVICE_SELFTEST_FOLDER"


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "test",
        description="Launch a script with the configuration of this machine, and check processes, "
        "collectives, loaders, training, mixed precision, saving and loading. Takes less than a "
        "minute. The exit code is 0 when all is well. With --cpu, two processes are used unless "
        "--num_processes says otherwise.",
    )
    parser.add_argument("--config_file", "--config-file", metavar="PATH")
    parser.add_argument("--num_processes", "--num-processes", metavar="N")
    parser.add_argument("--device_type", "--device-type", metavar="TYPE")
    parser.add_argument("--cpu", action="store_true", help="test on the host")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from anydevice import registry
    from anydevice.launch.execute import execute
    from anydevice.launch.plan import make_plan
    from anydevice.launch.resolve import resolve
    from anydevice.launch.table import BY_NAME

    given = {
        name: BY_NAME[name].read(getattr(args, name), f"--{name}")
        for name in ("config_file", "num_processes", "device_type", "cpu", "debug")
        if getattr(args, name) not in (None, False)
    }
    settings = resolve({**given, "module": True, "quiet": True})
    on_host = settings.get("cpu") or settings.get("device_type") == "cpu"
    if settings.get("num_processes") is None and (on_host or registry.primary_type() is None):
        settings.values["num_processes"] = 2
        settings.origins["num_processes"] = "default: two on the host"
    with tempfile.TemporaryDirectory(prefix="anydevice-test-") as folder:
        plan = make_plan(settings, "anydevice.cli.selftest_script", ["--json"] * args.json)
        plan = dataclasses.replace(
            plan,
            environment={**plan.environment, FOLDER: folder},
            reasons={**plan.reasons, FOLDER: "anydevice test"},
        )
        code = execute(plan)
    if not args.json:
        print("all is well" if code == 0 else f"something is wrong (exit code {code})")
    return 1 if code == 1 else code
