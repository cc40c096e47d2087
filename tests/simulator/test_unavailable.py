"""A simulator that is not started says how to start it."""

from __future__ import annotations

from warm import run_python

CODE = """
from anydevice import list_backends
(record,) = [r for r in list_backends() if r.device_type == "sim"]
print(record.status, record.reason)
"""


def test_the_reason_says_how_to_start_it():
    done = run_python("-c", CODE, check=True)
    assert done.stdout.startswith("unavailable not started: set ANYDEVICE_SIMULATOR=1")
