"""Several machines: as many launchers on loopback, and a step of SLURM."""

import json
import threading

import pytest
from launching import free_port

from .conftest import RECORD

# With the other tests of several processes: one worker has the process that forks them.
pytestmark = pytest.mark.xdist_group("distributed")


def launch_on_two_machines(launcher, script, *words):
    """Two launchers of two processes each; their exit codes."""
    shared = ["--cpu", "--num_machines", 2, "--num_processes", 4, "--main_process_ip", "127.0.0.1"]
    shared += ["--main_process_port", free_port(), *words]
    codes = {}

    def machine(rank):
        codes[rank] = launcher.run(*shared, "--machine_rank", rank, script)

    threads = [threading.Thread(target=machine, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return codes


def test_two_machines_on_loopback(launcher):
    assert launch_on_two_machines(launcher, launcher.script(RECORD)) == {0: 0, 1: 0}
    found = launcher.recorded()
    assert list(found) == ["0-0", "1-0", "2-0", "3-0"]
    places = [(r["env"]["GROUP_RANK"], r["env"]["LOCAL_RANK"]) for r in found.values()]
    assert places == [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")]
    assert {r["env"]["WORLD_SIZE"] for r in found.values()} == {"4"}


#: One of four processes is lost once, after all have started; the others wait for it.
LOST_ONCE = """
    import os, pathlib, time

    marks = pathlib.Path(os.environ["RECORD_FOLDER"]).parent
    lost = marks / "lost"
    first_time = not lost.exists()
    (marks / ("up-" + os.environ["RANK"])).touch()
    if first_time and os.environ["RANK"] == "3":
        while len(list(marks.glob("up-*"))) < 4:
            time.sleep(0.01)
        lost.touch()
        raise OSError("a cable")
    elif first_time:
        time.sleep(600)
"""


def test_a_failure_on_one_machine_starts_all_anew(launcher, capfd):
    script = launcher.script(LOST_ONCE + RECORD)
    words = ["--rdzv_backend", "c10d", "--max_restarts", 1]
    assert launch_on_two_machines(launcher, script, *words) == {0: 0, 1: 0}
    found = {name.partition("-")[0]: r["env"] for name, r in launcher.recorded().items()}
    assert list(found) == ["0", "1", "2", "3"]
    assert {environment["WORLD_SIZE"] for environment in found.values()} == {"4"}
    assert sorted(environment["GROUP_RANK"] for environment in found.values()) == list("0011")
    assert capfd.readouterr().err.count("OSError: a cable") == 1


SLURM = {
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_NODELIST": "node[1-2]",
}


def test_a_step_of_slurm_numbers_the_machines(launcher, capsys, monkeypatch):
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    script = launcher.script(RECORD)
    assert launcher.run("--cpu", "--num_processes", 4, "--dry-run", "--json", script) == 0
    said = json.loads(capsys.readouterr().out)["torchrun"]
    words = " ".join(said)
    assert "--nnodes 2 --node-rank 1 --master-addr node1 --master-port 29500" in words
    assert "--nproc-per-node 2" in words
