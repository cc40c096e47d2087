"""The command line, in this process; the demo in one of its own."""

from __future__ import annotations

import importlib.metadata
import json
import os
import textwrap

import pytest
from warm import run_python

from anydevice import cli


def test_devices_table_names_the_host(capsys):
    assert cli.main(["devices"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].split() == [
        "DEVICE", "NAME", "FREE", "TOTAL", "PACKAGE", "BACKEND", "CAPABILITIES",
    ]  # fmt: skip
    assert "\ncpu " in out


def test_devices_json_has_every_field(capsys, sim):
    assert cli.main(["devices", "--json"]) == 0
    found = {entry["device"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert list(found) == ["sim:0", "sim:1", "cpu"]
    assert found["sim:0"]["total"] == 64 * 2**20
    assert "streams" in found["sim:0"]["capabilities"]
    assert found["cpu"]["package"].startswith("anydevice ")
    assert 0 < found["cpu"]["free"] <= found["cpu"]["total"]


def test_backends_lists_all_with_package_and_reason(capsys):
    assert cli.main(["backends", "--json"]) == 0
    found = {entry["device_type"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert {"cpu", "cuda", "mps", "xpu", "npu", "mlu"} <= set(found)
    assert found["cpu"]["status"] == "available"
    assert found["cpu"]["reason"] == ""
    assert all(f["reason"] for f in found.values() if f["status"] != "available")
    assert found["cpu"]["version"] == importlib.metadata.version("anydevice")


def test_an_error_is_one_line_and_exit_code_1(capsys):
    assert cli.main(["run", "/nowhere/at/all"]) == 1
    captured = capsys.readouterr()
    assert "/nowhere/at/all" in captured.err
    assert "Traceback" not in captured.err


def test_a_budget_that_cannot_be_read_is_named(capsys, tiny_llama):
    assert cli.main(["run", str(tiny_llama), "--max-memory", "10gigs"]) == 1
    assert "10gigs" in capsys.readouterr().err


@pytest.mark.parametrize("count", ["0", "-3", "many", "1.5"])
def test_a_number_of_tokens_that_cannot_be_is_a_usage_error(capsys, tiny_llama, count):
    with pytest.raises(SystemExit):
        cli.main(["run", str(tiny_llama), f"--max-new-tokens={count}"])
    assert f"'{count}' is not a number from 1 up" in capsys.readouterr().err


def test_run_prints_devices_placement_result_and_peaks(capsys, tiny_llama, sim):
    budgets = ["0=120KiB", "1=90KiB", "cpu=50KiB"]
    assert cli.main(["run", str(tiny_llama), "--max-memory", *budgets]) == 0
    out = capsys.readouterr().out
    for part in (
        "sim:0",
        "disk",
        "synthetic batch -> CausalLMOutput",
        "imported transformers in",
        "loaded in",
        "PEAK MEMORY",
    ):
        assert part in out, f"{part!r} is missing in:\n{out}"


def test_loading_is_timed_without_the_import_of_transformers():
    """The bulk of transformers is imported before loading begins, not in its course."""
    script = """
        import sys
        from anydevice.cli import main, run

        def loads(*args, **kwargs):
            print("imported:", "transformers.modeling_utils" in sys.modules)
            sys.exit()

        assert "transformers" not in sys.modules
        run.from_pretrained = loads
        main(["run", "model"])
    """
    done = run_python("-c", textwrap.dedent(script))
    assert "imported: True" in done.stdout, done.stdout + done.stderr


def test_a_broken_command_plugin_leaves_the_rest(monkeypatch, capsys):
    class Broken:
        name = "broken"

        def load(self):
            raise ImportError("no module named nothing")

    def entry_points(group):
        return [Broken()] if group == cli.COMMAND_GROUP else []

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    cli.main(["backends"])
    assert "command 'broken' is broken: no module named nothing" in capsys.readouterr().err


def run_demo(**environment):
    return run_python("-m", "anydevice", "demo", env={**os.environ, **environment})


def test_demo_splits_a_real_model_and_gives_the_right_answer():
    done = run_demo()
    assert done.returncode == 0, done.stdout + done.stderr
    for part in ("sim:0", "sim:1", "cpu", "disk"):
        assert part in done.stdout
    difference = float(done.stdout.rsplit("on the host:", 1)[1].split()[0])
    assert difference <= 1e-6


def test_demo_without_a_compiler_goes_on_with_cpu_and_disk(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    done = run_demo(PATH=str(empty), CXX="", XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "none can be simulated" in done.stdout
    assert "disk" in done.stdout


@pytest.mark.parametrize(
    "command", ["devices", "backends", "run", "demo", "certify", "new-backend"]
)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main([command, "--help"])
    assert stopped.value.code == 0
    assert command in capsys.readouterr().out


def test_a_backend_that_raises_hides_no_other_device(capsys, sim, monkeypatch):
    from anydevice_conformance.simulator.backend import SimulatorBackend

    def broken(self, index):
        if index:
            return b"bytes"
        raise OSError("the driver is gone")

    monkeypatch.setattr(SimulatorBackend, "device_name", broken)
    monkeypatch.setattr(SimulatorBackend, "memory_info", lambda self, index: (1, 2))
    monkeypatch.setattr(SimulatorBackend, "memory_inof", None, raising=False)
    assert cli.main(["devices"]) == 0
    out = capsys.readouterr().out
    assert "sim:0: OSError: the driver is gone" in out
    assert "sim:1: BackendError: device_name() of SimulatorBackend returned b'bytes'" in out
    assert "memory_info(1) of SimulatorBackend returned (1, 2)" in out
    assert "\ncpu " in out
    assert cli.main(["backends"]) == 0
    out = capsys.readouterr().out
    assert "sim (anydevice): memory_info(1) of SimulatorBackend returned (1, 2)" in out
    assert "did you mean 'memory_info'?" in out
