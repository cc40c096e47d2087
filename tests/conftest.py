"""How a run of the tests starts; what fixtures it has stands in `shared_fixtures.py`."""

from __future__ import annotations

import gc
import shutil
import sys
import tempfile

import forking
from launching import warm_python

# What is imported and collected stays: to look for garbage in it takes a third of the time.
gc.disable()

# Tests here take seconds each. They start first, so that no worker ends long after the others.
_LONG = {"cli", "launch", "vendor"}


def pytest_configure(config):
    """Load the fixtures, or have workers that do so and are forks of one process.

    (Who only distributes the tests needs no torch. Elsewhere a process with libraries may not fork:
    there workers are new interpreters.)
    """
    if config.getoption("numprocesses", None) and config.option.tx:
        gc.enable()
        forking.start()
        if not sys.platform.startswith("linux"):
            return
        folder = tempfile.mkdtemp()
        config.add_cleanup(lambda: shutil.rmtree(folder))
        program = warm_python(folder, forking.TRANSFORMERS)
        config.option.tx = [f"popen//python={program}"] * len(config.option.tx)
    else:
        config.pluginmanager.import_plugin("shared_fixtures")


def pytest_collection_modifyitems(items):
    """Put the long tests first."""
    items.sort(key=lambda item: not _LONG & set(item.path.parts))


def pytest_collection_finish():
    """Leave what is there out of every collection of garbage, from now on."""
    gc.freeze()
    gc.enable()
