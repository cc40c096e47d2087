"""A run of the suite, seen from inside pytest: what each check ended as, and what was changed."""

from __future__ import annotations

import faulthandler
import gc
import inspect
import sys
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from anydevice import registry
from anydevice.errors import AnyDeviceError
from anydevice_conformance import stamps
from anydevice_conformance.elsewhere import take_elsewhere
from anydevice_conformance.items import (
    case_name,
    check_name,
    foreign_parts,
    is_check,
    is_ours,
    needs_of,
    place_of,
)
from anydevice_conformance.journal import Journal
from anydevice_conformance.monitor import monitored
from anydevice_conformance.outcomes import NoHardware, NotClaimed, _Outcome, left_out
from anydevice_conformance.statuses import Status
from anydevice_conformance.subject import Subject

__all__ = ["PLUGIN_NAME", "Session", "configure", "session_of", "subject_of"]

#: Under which a `Session` is registered with pytest.
PLUGIN_NAME: Final = "anydevice-conformance-session"
#: Seconds after which one check is taken to hang; the process then ends with all stacks printed.
CHECK_LIMIT: Final = 300
#: What a broken suite raises, and a broken backend does not.
_OUR_FAULTS: Final = (NameError, ImportError, SyntaxError)


def configure(config: pytest.Config) -> None:
    """Add the session plugin to a pytest run.

    Raises:
        pytest.UsageError: the backend cannot be had.
    """
    if config.pluginmanager.has_plugin(PLUGIN_NAME):  # a caller brought its own
        return
    session = Session(
        find_subject(
            config.getoption("--anydevice-backend"),
            quick=config.getoption("--anydevice-quick"),
            assumed=(config.getoption("--anydevice-assume") or "").split(","),
            seed=config.getoption("--anydevice-seed"),
            count=config.getoption("--anydevice-examples"),
        ),
        Journal(_path(config.getoption("--anydevice-journal"))),
        watchdog=True,
        twice=not config.getoption("--anydevice-quick"),
    )
    config.pluginmanager.register(session, PLUGIN_NAME)
    output = config.getoption("--anydevice-output")
    known = config.getoption("--anydevice-known-failures")
    if output or known or not config.getoption("--anydevice-journal"):
        from anydevice_conformance.certify import Reporter

        config.pluginmanager.register(Reporter(session, _path(output), _path(known)))


def find_subject(
    device_type: str,
    *,
    quick: bool = False,
    assumed: Sequence[str] = (),
    seed: int = 0,
    count: int | None = None,
) -> Subject:
    """The backend of a device type.

    Raises:
        pytest.UsageError: there is none that can be used.
    """
    try:
        backend = registry.get_backend(device_type)
    except AnyDeviceError as error:
        raise pytest.UsageError(f"--anydevice-backend {device_type}: {error}") from error
    (record,) = [r for r in registry.list_backends() if r.backend is backend]
    return Subject(record, backend, quick, frozenset(a for a in assumed if a), seed, count)


def session_of(config: pytest.Config) -> Session | None:
    """The session plugin of a run; None when no backend was named."""
    session = config.pluginmanager.get_plugin(PLUGIN_NAME)
    return session if isinstance(session, Session) else None


def subject_of(config: pytest.Config) -> Subject | None:
    """The subject of a run; None when no backend was named."""
    session = session_of(config)
    return session.subject if session is not None else None


class Session:
    """Listens to pytest and writes the journal."""

    def __init__(
        self,
        subject: Subject,
        journal: Journal,
        *,
        watchdog: bool = False,
        twice: bool = False,
    ) -> None:
        self.subject = subject
        self.journal = journal
        self._watchdog = watchdog
        self._twice = twice
        self._threads = 0
        self._cases: dict[str, dict[str, Any]] = {}
        self._earlier = journal.earlier()
        self._modules = 0  # that were imported when the collector was spared last

    # ------------------------------------------------------------------ collection

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Note which checks there are, and whether they are the suite's own."""
        if self.subject.assumed:
            items[:] = [i for i in items if self.subject.assumed & set(needs_of(i))]
        done = {(e["check"], e["case"]) for e in self._earlier if e["event"] == "result"}
        items[:] = [i for i in items if (check_name(i), case_name(i)) not in done]
        items.sort(key=place_of)
        names = dict.fromkeys(check_name(i) for i in items if is_check(i))
        self.journal.write("collected", checks=list(names))
        if not self._earlier:
            self.journal.write(
                "stamps", **stamps.stamps(self.subject), **stamps.device_stamps(self.subject)
            )
        for what in sorted({w for item in items for w in foreign_parts(item)}):
            self.journal.write("override", what=what)
        for plugin in config.pluginmanager.get_plugins():
            file = getattr(plugin, "__file__", None) or ""
            if Path(file).name == "conftest.py" and not is_ours(file):
                self.journal.write("override", what=f"conftest {file}")

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        """Note what an option left out."""
        names = dict.fromkeys(check_name(i) for i in items if is_check(i))
        self.journal.write("deselected", checks=list(names))

    def _spare_collector(self) -> None:
        """Spare the garbage collector what has been imported by now: checks collect often."""
        if len(sys.modules) > self._modules + 100:
            self._modules = len(sys.modules)
            gc.collect()
            gc.freeze()

    # ------------------------------------------------------------------ running

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """End a check that this backend or machine is not for."""
        if not is_check(item):
            return
        for capability in needs_of(item):
            if not getattr(self.subject.capabilities, capability):
                raise NotClaimed(f"capability {capability!r} is not claimed")
        if item.get_closest_marker("anydevice_two_devices") and len(self.subject.indices) < 2:
            raise NoHardware(f"needs two devices of type {self.subject.type!r}")
        if self.subject.quick and item.get_closest_marker("anydevice_slow"):
            left_out("left out by --quick")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Note the beginning and the end of each run of a check."""
        if not is_check(item):
            return (yield)
        self._spare_collector()
        case = case_name(item)
        needs = needs_of(item)
        self.journal.write("start", check=check_name(item), case=case, needs=needs)
        self._cases[item.nodeid] = {"status": Status.PASSED, "message": ""}
        start = time.perf_counter()
        if self._watchdog:
            faulthandler.dump_traceback_later(CHECK_LIMIT, exit=True, file=sys.__stderr__ or 2)
        try:
            return (yield)
        finally:
            if self._watchdog:
                faulthandler.cancel_dump_traceback_later()
            found = self._cases.pop(item.nodeid)
            self.journal.write(
                "result",
                check=check_name(item),
                case=case,
                needs=needs,
                status=found["status"].text,
                message=found["message"],
                seconds=round(time.perf_counter() - start, 4),
            )

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Watch the members that a check calls."""
        if not is_check(item):
            return (yield)
        with monitored(self.subject) as faults:
            result = yield
        assert not faults, f"DEV-012: a call in this check went wrong: {'; '.join(faults)}"
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Generator[None, object, object]:
        """Take a check again in another situation, where a whole run is wanted."""
        result = yield
        slow = pyfuncitem.get_closest_marker("anydevice_slow")
        if self._twice and is_check(pyfuncitem) and slow is None:
            names = inspect.signature(pyfuncitem.obj).parameters
            arguments = {name: pyfuncitem.funcargs[name] for name in names}
            take_elsewhere(self.subject, lambda: pyfuncitem.obj(**arguments))
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Read off what a phase of a check ended as."""
        report = yield
        case = self._cases.get(item.nodeid)
        if case is not None and call.excinfo is not None:
            status = _classify(call)
            if status is Status.SKIPPED and not isinstance(call.excinfo.value, _Outcome):
                self.journal.write("override", what=f"{check_name(item)} was skipped from outside")
            if hasattr(report, "wasxfail"):
                self.journal.write("override", what=f"{check_name(item)} was marked xfail")
            if status >= case["status"] or case["status"] is Status.PASSED:
                case["status"] = status
                case["message"] = _message(call, report)
        return report

    def pytest_sessionstart(self) -> None:
        """One thread for the host's own operators: quickly, all of them are small.

        More threads gain nothing there, and wait for each other where the machine is busy.
        """
        self._threads = torch.get_num_threads()
        if self.subject.quick:
            torch.set_num_threads(1)

    def pytest_sessionfinish(self) -> None:
        """The process came to its end."""
        torch.set_num_threads(self._threads)
        gc.unfreeze()
        self.journal.write("finish")


def _path(text: str | None) -> Path | None:
    return Path(text).absolute() if text else None


def _classify(call: pytest.CallInfo[None]) -> Status:
    assert call.excinfo is not None
    error = call.excinfo.value
    if isinstance(error, _Outcome):
        return error.status
    if isinstance(error, pytest.skip.Exception):
        return Status.SKIPPED
    if call.when != "call":
        return Status.ERROR
    innermost = str(call.excinfo.traceback[-1].path) if len(call.excinfo.traceback) else ""
    if isinstance(error, _OUR_FAULTS) and is_ours(innermost) and "simulator" not in innermost:
        return Status.ERROR
    return Status.FAILED


def _message(call: pytest.CallInfo[None], report: pytest.TestReport) -> str:
    assert call.excinfo is not None
    error = call.excinfo.value
    if isinstance(error, pytest.skip.Exception):
        return str(error.msg)
    text = str(error).strip()
    if not isinstance(error, (AssertionError, pytest.fail.Exception)):
        text = f"{type(error).__name__}: {text}"
    return text[:4000]
