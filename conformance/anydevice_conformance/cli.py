"""``anydevice certify`` and ``anydevice new-backend``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

__all__ = ["certify_command", "new_backend_command"]

_NEEDED = (
    "anydevice certify needs hypothesis, jsonschema and pytest: "
    "pip install 'anydevice[conformance]'"
)


def certify_command(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add ``certify``."""
    parser = subparsers.add_parser(
        "certify",
        help="check a backend against the specification, and write a report",
        description="Check a device's backend against the specification, and write a report: "
        "report.json, report.html, junit.xml and badge.svg.",
    )
    parser.add_argument(
        "device_type", nargs="?", metavar="TYPE", help="the device type, such as foo"
    )
    parser.add_argument("--quick", action="store_true", help="a first look: gives no certificate")
    parser.add_argument(
        "--examples", type=_positive, metavar="N", help="situations that each law is tried in"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the generated situations (default 0)"
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="default: certify-TYPE")
    parser.add_argument(
        "--known-failures", type=Path, metavar="FILE", help="JSON: check to reason and link"
    )
    parser.add_argument("--check", type=Path, metavar="REPORT", help="validate a report.json")
    parser.add_argument(
        "--static", metavar="TYPE", help="check a backend against its vendor's published API only"
    )
    parser.set_defaults(run=_certify)


def new_backend_command(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add ``new-backend``."""
    parser = subparsers.add_parser(
        "new-backend",
        help="write the package of a new backend",
        description="Write a complete package: the backend, its tests, its CI file, its README.",
    )
    parser.add_argument(
        "name", metavar="NAME", help="the distribution's name, such as anydevice-foo"
    )
    parser.add_argument(
        "--device-type", required=True, metavar="T", help="torch's name, such as foo"
    )
    parser.add_argument(
        "--imports", metavar="MODULE", help="the vendor's torch package, such as torch_foo"
    )
    parser.add_argument("--output", type=Path, default=Path(), metavar="DIR", help="default: here")
    parser.set_defaults(run=_new_backend)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def _certify(args: argparse.Namespace) -> int:
    if sum(map(bool, (args.device_type, args.check, args.static))) != 1:
        print(
            "anydevice certify: give one of TYPE, --check REPORT and --static TYPE", file=sys.stderr
        )
        return 2
    if args.static:
        return _check_static(args.static)
    try:
        import hypothesis  # noqa: F401
        import jsonschema  # noqa: F401
        import pytest  # noqa: F401
    except ImportError as error:
        print(f"{_NEEDED} ({error})", file=sys.stderr)
        return 1
    return _check_report(args.check) if args.check else _run_suite(args)


def _check_static(device_type: str) -> int:
    """Print what a vendor's published API says of a backend. Never a certificate."""
    from anydevice_conformance import static

    findings = static.check(device_type)
    for finding in findings:
        print(finding)
    surface = static.load_surface(device_type)
    calls = len(static.calls_of(device_type))
    print(
        f"{device_type}: static only, never certified: {calls} calls held against {surface.title}, "
        f"{len(findings)} not borne out"
    )
    return 1 if findings else 0


def _check_report(path: Path) -> int:
    from anydevice_conformance.report import validate

    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        print(f"{path} cannot be read: {error}", file=sys.stderr)
        return 1
    faults = validate(report)
    for fault in faults:
        print(f"{path}: {fault}", file=sys.stderr)
    if faults:
        print(f"{path}: not a sound report ({len(faults)} faults)", file=sys.stderr)
        return 1
    print(f"{path}: a sound report of {report['stamps']['device_type']}: {report['verdict']}")
    return 0


def _run_suite(args: argparse.Namespace) -> int:
    from anydevice_conformance import warm

    with warm.process():  # it imports torch while this process does
        return _run_suite_warm(args)


def _run_suite_warm(args: argparse.Namespace) -> int:
    from anydevice.backend_check import member_faults
    from anydevice.registry import get_backend
    from anydevice_conformance.certify import certify
    from anydevice_conformance.progress import Progress, summary

    backend = get_backend(args.device_type)  # an unknown type is named before any work starts
    for fault in member_faults(backend):
        print(f"NOTE {fault}")
    folder = (args.output or Path(f"certify-{args.device_type}")).absolute()
    progress = Progress()
    try:
        report = certify(
            args.device_type,
            folder,
            quick=args.quick,
            seed=args.seed,
            examples=args.examples,
            known_failures=args.known_failures,
            on_result=progress,
        )
    except RuntimeError as error:
        print(f"anydevice certify: {error}", file=sys.stderr)
        return 1
    progress.close()
    print(summary(report, folder))
    from anydevice_conformance.report import decide

    return decide(report).exit_code


def _new_backend(args: argparse.Namespace) -> int:
    from anydevice_conformance.scaffold import write_package

    try:
        written = write_package(args.name, args.device_type, args.output, imports=args.imports)
    except ValueError as error:
        print(f"anydevice new-backend: {error}", file=sys.stderr)
        return 1
    for path in written:
        print(path)
    root = args.output / args.name
    print(f"\nNext: pip install -e '{root}[test]' && anydevice certify {args.device_type}")
    return 0
