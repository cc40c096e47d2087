"""What a launch does, seen from the launched processes."""

import os

import pytest
from launching import warm_python

from anydevice_conformance.simulator.backend import SimulatorBackend

from .conftest import RECORD

# With the other tests of several processes: one worker has the process that forks them.
pytestmark = pytest.mark.xdist_group("distributed")


def test_four_processes_on_accelerators_with_their_devices_hidden(launcher, simulator, monkeypatch):
    simulator.configure(devices=6, memory="1MiB")
    monkeypatch.setattr(SimulatorBackend, "visible_devices_env", "SIM_VISIBLE_DEVICES")
    monkeypatch.setattr(
        SimulatorBackend, "process_environment", lambda self, n: {"SIM_PROCESSES": str(n)}
    )
    words = ["--device-type", "sim", "--gpu_ids", "0,2,3,5", "--num_machines", "1"]
    assert launcher.run(*words, launcher.script(RECORD)) == 0
    found = launcher.recorded()
    assert list(found) == ["0-0", "1-0", "2-0", "3-0"]
    for record in found.values():
        environment = record["env"]
        assert environment["SIM_VISIBLE_DEVICES"] == "0,2,3,5"
        assert environment["SIM_PROCESSES"] == "4"
        assert environment["ACCELERATE_TORCH_DEVICE"] == "sim"
        assert environment["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 4))


def test_a_module_and_its_package(launcher, monkeypatch):
    package = launcher.folder / "trainer"
    package.mkdir()
    (package / "__init__.py").write_text("")
    launcher.script(
        "from . import __name__ as parent\n" + RECORD.replace("\n    ", "\n"), "trainer/go.py"
    )
    monkeypatch.chdir(launcher.folder)
    assert launcher.run("--cpu", "-m", "trainer.go", "x") == 0
    record = launcher.recorded()["0-0"]
    assert record["argv"] == [str(package / "go.py"), "x"]
    assert record["name"] == "__main__"


def test_a_program_of_its_own(launcher):
    program = launcher.script(
        "#!/bin/sh\n"
        'env > "$RECORD_FOLDER/$RANK"; printf %s "$1" >> "$RECORD_FOLDER/$RANK"; exit 4\n',
        "go.sh",
    )
    os.chmod(program, 0o755)
    assert launcher.run("--cpu", "--no-python", "-q", program, "two words") == 4
    assert (launcher.records / "0").read_text().endswith("two words")


ACCELERATOR = """
    import json, os, pathlib
    import torch
    from anydevice import Accelerator

    a = Accelerator()
    file = pathlib.Path(os.environ["RECORD_FOLDER"]) / f"{a.process_index}.json"
    file.write_text(json.dumps([
        a.num_processes, str(a.device), a.mixed_precision, a.gradient_accumulation_steps,
        len(a.gather(torch.ones(1, device=a.device))),
    ]))
    a.end_training()
"""


def test_an_accelerator_is_as_the_flags_say(launcher, monkeypatch):
    """Four processes on the host; on accelerators: `tests/cli/test_selftest.py`."""
    monkeypatch.setenv("PYTHON_EXEC", warm_python(launcher.folder))
    words = ["--mixed_precision", "bf16", "--gradient_accumulation_steps", 3]
    words += ["--cpu", "--num_processes", 4]
    assert launcher.run(*words, launcher.script(ACCELERATOR)) == 0
    assert launcher.recorded() == {str(rank): [4, "cpu", "bf16", 3, 4] for rank in range(4)}
