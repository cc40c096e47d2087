"""A fork, and the end of the interpreter, with weights under way."""

import os
import sys

import pytest
import torch
from tests.transfer.conftest import Offloaded, make_blocks, same
from warm import run_python

PROGRAM = """
import sys, torch
sys.path.insert(0, {root!r})
from anydevice_conformance import simulator
simulator.configure(devices=1, memory="64MiB", mode={mode!r}, h2d=5)
from tests.transfer.conftest import Offloaded, make_blocks
model = Offloaded(make_blocks(), prefetch_depth=3, pin_budget={budget!r})
with torch.no_grad():
    with model.groups[0].call():
        pass
assert model.engine._prefetcher._ahead
print("under way", flush=True)
{end}
"""
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


@pytest.mark.parametrize(
    ("mode", "budget", "end"),
    [
        ("lazy", None, "sys.exit(0)"),
        ("thread", 0, ""),
        ("thread", None, "raise KeyError('on purpose')"),
        ("lazy", 0, ""),
    ],
)
def test_the_interpreter_ends_cleanly(mode, budget, end):
    program = PROGRAM.format(root=ROOT, mode=mode, budget=budget, end=end)
    done = run_python("-W", "error", "-c", program, finalize=True)
    assert done.stdout == "under way\n"
    if "raise" in end:
        assert done.returncode == 1
        assert done.stderr.strip().splitlines()[-1] == "KeyError: 'on purpose'"
    else:
        assert (done.returncode, done.stderr) == (0, "")


def in_child(work):
    """Run work in a forked child; return what it wrote, or the error's text."""
    read, write = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write, str(work()).encode())
        except BaseException as error:  # noqa: BLE001 - told to the parent
            os.write(write, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        text = file.read().decode()
    os.waitpid(pid, 0)
    return text


@pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("budget", [None, 0], ids=["pinned", "staged"])
@pytest.mark.parametrize("mode", ["lazy", "thread"])
def test_parent_and_child_of_a_fork_go_on(sim, x, mode, budget):
    sim.configure(devices=1, memory="64MiB", mode=mode, **({"h2d": 20} if mode == "thread" else {}))
    model = Offloaded(make_blocks(), prefetch_depth=2, pin_budget=budget)
    wanted = model.plain(x)
    with torch.no_grad(), model.groups[0].call():
        pass

    def again():
        return [same(model(x), wanted), model.engine.close(), same(model(x), wanted)]

    assert in_child(again) == "[True, None, True]"
    assert again() == [True, None, True]
    model.engine.close()
