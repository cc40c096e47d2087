"""What a launch does, seen from the launched processes."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
from launching import free_port

from anydevice_conformance.simulator.backend import SimulatorBackend

from .conftest import RECORD


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


# ---------------------------------------------------------------------- scripts that fail


#: Rank 1 does it; rank 0 waits, or fails after it because of it.
FAILURES = """
    import os, pathlib, signal, sys, time

    how, after = sys.argv[1:]
    mark = pathlib.Path(os.environ["RECORD_FOLDER"]) / "failed"
    if os.environ["RANK"] == "1":
        mark.touch()
        if how == "raise":
            raise ValueError("the first")
        elif how == "exit":
            sys.exit(3)
        os.kill(os.getpid(), signal.SIGKILL)
    while not mark.exists():
        time.sleep(0.01)
    if after == "fails":
        time.sleep(0.2)
        raise RuntimeError("connection closed by peer")
    time.sleep(600)
"""


@pytest.mark.parametrize(
    ("how", "after", "code", "words"),
    [
        ("raise", "fails", 1, "rank 1 .* exited with code 1"),
        ("exit", "waits", 3, r"rank 1 .* exited with code 3\."),
        ("kill", "waits", 137, r"rank 1 .* was ended by signal 9 \(SIGKILL\)"),
    ],
)
def test_a_script_that_fails(launcher, capfd, how, after, code, words):
    script = launcher.script(FAILURES)
    assert launcher.run("--cpu", "--num_processes", 2, script, how, after) == code
    error = capfd.readouterr().err
    assert re.search(words, error), error
    assert error.count("Traceback") == (how == "raise")
    assert error.count("ValueError: the first") == (how == "raise")
    assert "connection closed" not in error
    assert "worker.py" not in error
    assert "ChildFailedError" not in error


def test_a_script_is_started_anew(launcher, capfd):
    text = (
        RECORD + "\n    if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': raise OSError('lost')\n"
    )
    assert launcher.run("--cpu", "--max_restarts", 1, launcher.script(text)) == 0
    assert list(launcher.recorded()) == ["0-0", "0-1"]
    assert "OSError: lost" in capfd.readouterr().err


HANGS = """
    import os, pathlib, signal, sys, time

    if sys.argv[1] == "stubborn":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    (pathlib.Path(os.environ["RECORD_FOLDER"]) / str(os.getpid())).touch()
    time.sleep(600)
"""


def _wait_for(condition, what):
    end = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def _is_gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize(
    ("kind", "number", "times"), [("willing", 2, 1), ("stubborn", 2, 2), ("willing", 15, 1)]
)
def test_a_signal_ends_all(launcher, kind, number, times):
    command = [sys.executable, "-m", "anydevice", "launch", "--cpu", "--num_processes", "2"]
    process = subprocess.Popen(
        [*command, launcher.script(HANGS), kind], stderr=subprocess.PIPE, text=True
    )
    records = launcher.records
    _wait_for(lambda: len(list(records.iterdir())) == 2, "the processes never came")
    for _ in range(times):
        process.send_signal(number)
        line = process.stderr.readline() if times else ""
        assert "ending the script's processes" in line or times == 2
    code = process.wait(timeout=60)
    assert code == 128 + (number if times == 1 else signal.SIGKILL)
    for file in records.iterdir():
        _wait_for(lambda pid=int(file.name): _is_gone(pid), "a process lives on")
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()


# ---------------------------------------------------------------------- two machines


def test_two_machines_on_loopback(launcher):
    script = launcher.script(RECORD)
    shared = ["--cpu", "--num_machines", 2, "--num_processes", 4, "--main_process_ip", "127.0.0.1"]
    shared += ["--main_process_port", free_port()]
    codes = {}

    def machine(rank):
        codes[rank] = launcher.run(*shared, "--machine_rank", rank, script)

    threads = [threading.Thread(target=machine, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == {0: 0, 1: 0}
    found = launcher.recorded()
    assert list(found) == ["0-0", "1-0", "2-0", "3-0"]
    places = [(r["env"]["GROUP_RANK"], r["env"]["LOCAL_RANK"]) for r in found.values()]
    assert places == [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")]
    assert {r["env"]["WORLD_SIZE"] for r in found.values()} == {"4"}


# ---------------------------------------------------------------------- before anything starts


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num_proceses", "2"], "did you mean '--num_processes'"),
        (["--fsdp-ofload-params", "1"], "did you mean '--fsdp_offload_params'"),
        (["--num_processes", "0"], "--num_processes: '0' is less than 1"),
        (["--num-processes", "two"], "--num-processes: 'two' is not a whole number"),
        (["--mixed_precision", "bf61"], "did you mean 'bf16'"),
        (["--dynamo_backend", "indcutor"], "did you mean 'INDUCTOR'"),
        (["--main_process_port", "70000"], "is more than 65535"),
        (["--machine_rank", "1"], "it is at most 0"),
        (["--num_machines", "2", "--num_processes", "3"], "not a multiple of"),
        (["--num_machines", "2", "--num_processes", "2"], "needs --main_process_ip"),
        (["--device_type", "nope"], "no backend for device type 'nope'"),
        (["--device_type", "npu"], "torch_npu is not installed"),
        (["--cpu", "--device_type", "npu"], "contradict each other"),
        (["--multi_gpu"], "has no accelerator"),
        (["--gpu_ids", "0", "--cpu"], "names no variable that hides devices"),
        (["--fsdp_version", "2"], "no effect without --use_fsdp"),
        (["--use_fsdp", "--use_deepspeed"], "choose one"),
        (["--use_deepspeed"], "pip install deepspeed"),
        (["--fsdp_offload_params", "maybe", "--use_fsdp"], "neither true nor false"),
        (["--tpu_use_sudo"], "TPU pods are not launched"),
        (["--megatron_lm_tp_degree", "2"], "has no meaning here"),
        (["--config_file", "/nowhere.yaml"], "there is no such file"),
        (["-m", "--no_python"], "choose one"),
    ],
)
def test_bad_values_are_named_before_anything_starts(launcher, capsys, words, message):
    assert launcher.run(*words, launcher.script(RECORD)) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert launcher.recorded() == {}


def test_an_option_without_its_value(launcher, capsys):
    assert launcher.run("--num_processes") == 2
    assert "--num_processes needs a value" in capsys.readouterr().err


def test_more_processes_than_devices_are_refused(launcher, sim, capsys):
    assert launcher.run("--num_processes", 3, launcher.script(RECORD)) == 2
    assert "3 processes on this machine, which has 2 sim devices" in capsys.readouterr().err


def test_a_script_that_is_missing(launcher, capsys):
    for words, message in [
        ([], "the script is missing"),
        (["nothere.py"], "there is no such script"),
        (["-m", "a b"], "not the name of a module"),
        (["--no_python", "no-such-program"], "no such program"),
    ]:
        assert launcher.run("--cpu", *words) == 2
        assert message in capsys.readouterr().err


def test_a_busy_port_is_named(launcher, capsys):
    import socket

    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert launcher.run("--cpu", "--main_process_port", port, launcher.script(RECORD)) == 2
    assert f"{port} cannot be used" in capsys.readouterr().err


def test_a_world_size_in_the_environment_is_used_or_refused(launcher, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    script = launcher.script(RECORD)
    assert launcher.run("--cpu", "--num_processes", 4, script) == 2
    assert "WORLD_SIZE=2 is set" in capsys.readouterr().err
    assert launcher.run("--cpu", "--dry_run", "--json", script) == 0
    assert json.loads(capsys.readouterr().out)["processes"] == 2


# ---------------------------------------------------------------------- precedence


def test_a_dry_run_says_where_each_value_came_from(launcher, capsys, monkeypatch):
    config = launcher.folder / "c.yaml"
    config.write_text(
        "mixed_precision: fp16\nnum_processes: 3\ngradient_accumulation_steps: 5\nuse_cpu: true\n"
        "unheard_of: 7\n"
    )
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ANYDEVICE_GRADIENT_ACCUMULATION_STEPS", "6")
    script = launcher.script(RECORD, "a script.py")
    words = ["--dry-run", "--config_file", config, "--num_processes", 2, script, "two words"]
    assert launcher.run("--json", *words) == 0
    said = json.loads(capsys.readouterr().out)
    origin = {name: (v["value"], v["from"]) for name, v in said["settings"].items()}
    assert origin["num_processes"] == (2, "flag")
    assert origin["mixed_precision"] == ("bf16", "environment ACCELERATE_MIXED_PRECISION")
    assert origin["gradient_accumulation_steps"][0] == 6
    assert origin["cpu"] == (True, f"file {config} (use_cpu)")
    assert origin["max_restarts"] == (0, "default")
    assert said["left_aside"] == ["unheard_of"]
    environment = {k: v["value"] for k, v in said["environment"].items()}
    assert environment["ANYDEVICE_GRADIENT_ACCUMULATION_STEPS"] == "6"
    assert said["torchrun"][-2:] == [script, "two words"]
    assert launcher.run(*words) == 0
    text = capsys.readouterr().out
    assert "-m torch.distributed.run --standalone --nproc-per-node 2" in text
    assert "'two words'" in text
    assert "ACCELERATE_MIXED_PRECISION=bf16  (environment ACCELERATE_MIXED_PRECISION)" in text
    assert launcher.recorded() == {}


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


# ---------------------------------------------------------------------- with an Accelerator


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


def test_an_accelerator_is_as_the_flags_say(launcher, sim, monkeypatch):
    monkeypatch.setenv("ANYDEVICE_SIMULATOR", "devices=2,memory=64MiB")
    words = ["--mixed_precision", "bf16", "--gradient_accumulation_steps", 3]
    assert launcher.run(*words, launcher.script(ACCELERATOR)) == 0
    found = launcher.recorded()
    assert found == {r: [2, f"sim:{r}", "bf16", 3, 2] for r in ("0", "1")}
