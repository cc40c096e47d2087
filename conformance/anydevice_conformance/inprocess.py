"""Running some checks in this process: how the suite is tested."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterable
from typing import Any
from unittest import mock

import pytest

from anydevice.registry import BackendRecord
from anydevice_conformance.catalogue import SUITE_FOLDER, load_catalogue
from anydevice_conformance.journal import Journal
from anydevice_conformance.runner import pytest_arguments
from anydevice_conformance.session import PLUGIN_NAME, Session
from anydevice_conformance.subject import Subject

__all__ = ["run_checks"]


class _Bring:
    """Registers a session that is there already, under the name by which the suite finds it."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def pytest_configure(self, config: pytest.Config) -> None:
        """Register it."""
        config.pluginmanager.register(self._session, PLUGIN_NAME)


def _forget(session: Session) -> None:
    """Let go of tensors on the device, and of the backend.

    Pytest leaves the last error to debuggers, whose frames hold tensors; and its plugins live on.
    """
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        vars(sys).pop(name, None)
    vars(session).clear()


def run_checks(
    record: BackendRecord, names: Iterable[str], *, quick: bool = False
) -> list[dict[str, Any]]:
    """Run checks of a backend; returns the journal's events.

    Args:
        record: the backend, as it stands in the registry.
        names: of checks.
        quick: leave out slow ones.

    Raises:
        RuntimeError: pytest itself failed.
    """
    assert record.backend is not None
    session = Session(Subject(record, record.backend, quick), Journal())
    catalogue = load_catalogue()
    chosen = [f"{SUITE_FOLDER / catalogue[name].module}.py::{name}" for name in names]
    arguments = [*chosen, *pytest_arguments()[1:], "--tb=no"]
    arguments += ["-panydevice_conformance.pytest_plugin", "-pno:faulthandler"]
    output = io.StringIO()
    with (
        mock.patch.dict(os.environ, {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}),
        contextlib.redirect_stdout(output),
    ):
        os.environ.pop("PYTEST_ADDOPTS", None)
        code = pytest.main(arguments, plugins=[_Bring(session)])
    events = session.journal.events
    _forget(session)
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"pytest ended with {code!r}:\n{output.getvalue()[-2000:]}")
    return events
