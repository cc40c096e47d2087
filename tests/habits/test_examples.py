"""Each public function and class has an example in its docstring, and each example runs.

An example stands for itself: it imports what it uses. It runs in an empty working directory, on a
machine with two simulated accelerators.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib
import importlib.util
import inspect
import io
import os
from pathlib import Path
from unittest import mock

import pytest
import torch

import anydevice
from anydevice.state import AcceleratorState, GradientState

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("reference", ROOT / "scripts" / "make_reference.py")
reference = importlib.util.module_from_spec(spec)
spec.loader.exec_module(reference)

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
#: Examples that the system, or what is installed, must allow.
NEEDS = {
    "from_pretrained": "transformers",
    "TensorBoardTracker": "tensorboard",
}


#: What people use that the pages of the reference do not list.
OTHERS = {
    "anydevice.checkpoint": ["Checkpoint", "fetch_checkpoint", "open_checkpoint"],
    "anydevice.offload_store": ["open_store", "write_store"],
    "anydevice.placement": ["DeviceMap", "Placement", "find_blocks", "resolve_device_map"],
    "anydevice.transfer": ["Engine", "copy_batch", "profile_transfers"],
}


def public_things():
    """Each public function and class once, by its shortest name; of errors only the base."""
    found = {}
    for module, names in OTHERS.items():
        for name in names:
            thing = getattr(importlib.import_module(module), name)
            found[id(thing)] = (name, thing)
    for name in dict.fromkeys(["anydevice", *reference.MODULES]):
        module = importlib.import_module(name)
        for offered in module.__all__:
            thing = getattr(module, offered)
            if not callable(thing) or not str(getattr(thing, "__module__", "")).startswith(
                "anydevice"
            ):
                continue
            is_error = inspect.isclass(thing) and issubclass(thing, BaseException)
            if is_error and thing is not anydevice.AnyDeviceError:
                continue
            found.setdefault(id(thing), (offered, thing))
    return dict(found.values())


THINGS = public_things()


@pytest.fixture
def nothing_set():
    """What an example sets in the environment or in a shared state is undone."""
    with mock.patch.dict(os.environ), torch.random.fork_rng(devices=[]):
        AcceleratorState._reset_state(reset_partial_state=True)
        cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
        yield
        if cores is not None:
            os.sched_setaffinity(0, cores)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.mark.usefixtures("nothing_set", "sim")
@pytest.mark.parametrize("name", THINGS)
def test_example(name, tmp_path, monkeypatch):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    monkeypatch.chdir(tmp_path)
    text = inspect.getdoc(THINGS[name]) or ""
    test = doctest.DocTestParser().get_doctest(text, {"__name__": "__main__"}, name, name, 0)
    assert test.examples, f"{name} has no example in its docstring"
    report = io.StringIO()
    with contextlib.redirect_stderr(io.StringIO()):
        failed, _ = doctest.DocTestRunner(optionflags=FLAGS).run(test, out=report.write)
    assert not failed, report.getvalue()
