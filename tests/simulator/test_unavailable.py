"""A simulator that is not started says how to start it."""

from __future__ import annotations

import subprocess
import sys

CODE = """
from anydevice import list_backends
(record,) = [r for r in list_backends() if r.device_type == "sim"]
print(record.status, record.reason)
"""


def test_the_reason_says_how_to_start_it():
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.startswith("unavailable not started: set ANYDEVICE_SIMULATOR=1")
