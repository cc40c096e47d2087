"""Running the suite in a process of its own, so that a crash or a hang is one failed check."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from anydevice_conformance import warm
from anydevice_conformance.catalogue import SUITE_FOLDER
from anydevice_conformance.journal import Journal

__all__ = ["probe", "run_suite"]

Event = dict[str, Any]
#: How many checks may take the process with them before the run is given up.
_MOST_CRASHES: Final = 10
#: Characters of a process's output that a message shows.
_SHOWN: Final = 1500
_INI: Final = Path(__file__).with_name("certify.ini")
#: What of pytest's own environment would change the suite.
_FOREIGN: Final = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS")


def run_suite(
    device_type: str,
    folder: Path,
    *,
    quick: bool = False,
    seed: int = 0,
    examples: int | None = None,
    assume: Sequence[str] = (),
    only: Sequence[str] = (),
    on_result: Callable[[Event], object] = lambda event: None,
) -> list[Event]:
    """Run all checks of a backend; returns the journal's events.

    Args:
        device_type: whose backend.
        folder: where the journal and pytest's output are written.
        quick: leave out slow checks.
        seed: of the generated examples.
        examples: how many of each law; None for its ordinary number.
        assume: only the checks of these capabilities, which are not claimed.
        only: only the checks in whose names one of these stands.
        on_result: called with each result as it comes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = "probe" if assume else "run"
    folder.mkdir(parents=True, exist_ok=True)
    journal, log = folder / f"{name}.journal", folder / f"{name}.log"
    for file in (journal, log):
        file.unlink(missing_ok=True)
    arguments = [f"--anydevice-backend={device_type}", f"--anydevice-journal={journal}"]
    if quick:
        arguments.append("--anydevice-quick")
    arguments.append(f"--anydevice-seed={seed}")
    if examples:
        arguments.append(f"--anydevice-examples={examples}")
    if assume:
        arguments.append(f"--anydevice-assume={','.join(assume)}")
    if only:
        arguments.append(f"-k{' or '.join(only)}")
    for _ in range(_MOST_CRASHES):
        code = _run_once(arguments, journal, log, on_result)
        events = Journal.read(journal)
        if any(event["event"] == "finish" for event in events):
            return events
        victim = _unfinished(events)
        if victim is None:
            raise RuntimeError(f"pytest ended with code {code} before any check:\n{_tail(log)}")
        crash = {
            "check": victim["check"],
            "case": victim["case"],
            "needs": victim["needs"],
            "status": "failed",
            "message": f"{_cause(code)}, and took the process with it:\n{_crash(log)}",
            "seconds": 0.0,
        }
        Journal(journal).write("result", **crash)
        on_result({"event": "result", **crash})
    return Journal.read(journal)


def probe(device_type: str, capabilities: Sequence[str], folder: Path) -> dict[str, bool | None]:
    """Find out which unclaimed capabilities work.

    Returns:
        A capability to True when all its checks passed, False when one failed, None when none ran.
    """
    if not capabilities:
        return {}
    try:
        events = run_suite(device_type, folder, quick=True, assume=capabilities)
    except RuntimeError:
        return dict.fromkeys(capabilities)
    found: dict[str, bool | None] = {}
    for capability in capabilities:
        statuses = [
            event["status"]
            for event in events
            if event["event"] == "result"
            # a check of two unclaimed capabilities says nothing of either
            and set(event["needs"]) & set(capabilities) == {capability}
        ]
        if "failed" in statuses or "error" in statuses:
            found[capability] = False
        else:
            # A capability that one check could not see must not be recommended.
            seen = "passed" in statuses and "not claimed" not in statuses
            found[capability] = True if seen else None
    return found


def pytest_arguments() -> list[str]:
    """What keeps the surroundings' pytest settings out."""
    return [
        str(SUITE_FOLDER),
        f"-c{_INI}",
        f"--rootdir={SUITE_FOLDER}",
        f"--confcutdir={SUITE_FOLDER}",
        "-pno:cacheprovider",
        "-pno:logging",  # it visits every logger in each phase of each check
        "-pno:unraisableexception",  # it collects garbage ten times at the end
    ]


def _run_once(
    arguments: list[str], journal: Path, log: Path, on_result: Callable[[Event], object]
) -> int:
    # Nothing captured: what a dying process says last is then in the log.
    words = ["-s", "-panydevice_conformance.pytest_plugin", *pytest_arguments(), *arguments]
    environment = {k: v for k, v in os.environ.items() if k not in _FOREIGN}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    follower = _Follower(journal, on_result)
    with log.open("ab") as output:
        process = warm.start("pytest", words, environment=environment, output=output)
        try:
            while process.poll() is None:
                time.sleep(0.1)
                follower.tell()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    follower.tell()
    code: int = process.returncode
    return code


class _Follower:
    """Passes on the results that are added to a journal from now on."""

    def __init__(self, journal: Path, on_result: Callable[[Event], object]) -> None:
        self._journal = journal
        self._on_result = on_result
        self._read = journal.stat().st_size if journal.exists() else 0

    def tell(self) -> None:
        """Pass on what has come."""
        if not self._journal.exists():
            return
        with self._journal.open("rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):  # being written
                    break
                self._read += len(line)
                event = json.loads(line)
                if event["event"] == "result":
                    self._on_result(event)


def _unfinished(events: list[Event]) -> Event | None:
    started = [event for event in events if event["event"] in ("start", "result")]
    return started[-1] if started and started[-1]["event"] == "start" else None


def _cause(code: int) -> str:
    if code < 0:
        return f"it crashed ({signal.Signals(-code).name})"
    return "it hung or ended the process"


def _crash(log: Path) -> str:
    """Where the process crashed or hung: faulthandler's text, the innermost call first."""
    text = log.read_text(encoding="utf-8", errors="replace")
    start = max(text.rfind("Fatal Python error"), text.rfind("Timeout ("))
    if start < 0:
        return text[-_SHOWN:]
    threads = text[start:].partition("\n\nExtension modules")[0]
    # Other threads come before the one that crashed.
    return threads[max(0, threads.find("Current thread")) :][:_SHOWN]


def _tail(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-_SHOWN:]
