"""Certifying a backend: run the suite, try what is not claimed, write the report."""

from __future__ import annotations

import datetime
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anydevice_conformance import report as reports
from anydevice_conformance import stamps
from anydevice_conformance.known import load_known
from anydevice_conformance.runner import probe, run_suite

if TYPE_CHECKING:
    import pytest

    from anydevice_conformance.session import Session

__all__ = ["Reporter", "certify", "finish"]

Event = dict[str, Any]


def certify(
    device_type: str,
    folder: Path,
    *,
    quick: bool = False,
    seed: int = 0,
    examples: int | None = None,
    known_failures: Path | None = None,
    command: Sequence[str] | None = None,
    on_result: Callable[[Event], object] = lambda event: None,
) -> dict[str, Any]:
    """Check the backend of a device type and write the report.

    Args:
        device_type: whose backend.
        folder: where ``report.json``, ``report.html``, ``junit.xml`` and ``badge.svg`` are written.
        quick: leave out slow checks; gives no certificate.
        seed: of the generated examples.
        examples: how many of each law; None for its ordinary number.
        known_failures: the vendor's file, see `anydevice_conformance.known`.
        command: what was typed, for the report.
        on_result: called with each result as it comes.

    Returns:
        The report.

    Raises:
        RuntimeError: the suite could not be started.
    """
    folder.mkdir(parents=True, exist_ok=True)
    begin, started = time.monotonic(), _now()
    events = run_suite(
        device_type, folder, quick=quick, seed=seed, examples=examples, on_result=on_result
    )
    return finish(
        events,
        folder,
        started=started,
        begin=begin,
        command=list(command or stamps.command_line()),
        known_failures=known_failures,
    )


def finish(
    events: list[Event],
    folder: Path,
    *,
    started: str,
    begin: float,
    command: list[str],
    known_failures: Path | None = None,
) -> dict[str, Any]:
    """Try what is not claimed (a quick run does not), build the report, write it."""
    stamped: dict[str, Any] = next((e for e in events if e["event"] == "stamps"), {})
    capabilities = stamped.get("capabilities", {})
    if stamped.get("devices") and not stamped["quick"]:
        events = events + _tried(stamped["device_type"], capabilities, folder)
    events.append(
        {
            "event": "stamps",
            "started": started,
            "seconds": round(time.monotonic() - begin, 2),
            "command": command,
        }
    )
    known, complaints = load_known(known_failures)
    report = reports.build(events, known, complaints)
    reports.write(report, folder)
    return report


def _tried(device_type: str, capabilities: Mapping[str, Any], folder: Path) -> list[Event]:
    """Try the capabilities that are not claimed; what works is flagged."""
    unclaimed = [name for name, entry in capabilities.items() if not entry["claimed"]]
    if device_type == "cpu":  # the host cannot share its memory with itself
        unclaimed = [name for name in unclaimed if name != "unified_memory"]
    found = probe(device_type, unclaimed, folder)
    entries = {name: {**entry, "works": found.get(name)} for name, entry in capabilities.items()}
    events: list[Event] = [{"event": "stamps", "capabilities": entries}]
    for name, works in found.items():
        if works:
            message = f"capability {name!r} is not claimed, and all its checks pass: claim it"
            events.append({"event": "flag", "what": name, "message": message})
    return events


class Reporter:
    """Writes the report at the end of a run that pytest itself was called for."""

    def __init__(self, session: Session, folder: Path | None, known: Path | None) -> None:
        self._session = session
        self._folder = folder
        self._known = known
        self._begin, self._started = time.monotonic(), _now()
        self._report: dict[str, Any] | None = None

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Build the report."""
        if session.config.getoption("collectonly", False):
            return
        with tempfile.TemporaryDirectory() as scratch:
            self._report = finish(
                list(self._session.journal.events),
                self._folder or Path(scratch),
                started=self._started,
                begin=self._begin,
                command=["pytest", *(str(a) for a in session.config.invocation_params.args)],
                known_failures=self._known,
            )

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say the verdict."""
        if self._report is None:
            return
        terminalreporter.section("anydevice conformance")
        terminalreporter.write_line(f"verdict: {self._report['verdict']}")
        for reason in self._report["because"][:20]:
            terminalreporter.write_line(f"  {reason}")
        if self._folder is not None:
            terminalreporter.write_line(f"report: {self._folder / 'report.html'}")


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
