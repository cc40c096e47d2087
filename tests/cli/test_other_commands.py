"""env, completion, test, and what all commands share."""

import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from anydevice import cli


def _names():
    """Every command but launch, whose words are not argparse's."""
    (commands,) = (a for a in cli.full_parser()._actions if hasattr(a, "choices") and a.choices)
    return [name for name in commands.choices if name != "launch"]


def test_env_tells_versions_plugins_and_faults(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("ANYDEVICE_PROGRESS", "0")
    monkeypatch.setenv("ACCELERATE_SECRET_TOKEN", "hunter2")
    config = tmp_path / "hf" / "anydevice" / "default_config.yaml"
    config.parent.mkdir(parents=True)
    config.write_text("mixed_precision: fp61\n")
    assert cli.main(["env", "--json"]) == 0
    out = capsys.readouterr().out
    found = json.loads(out)
    assert found["versions"]["torch"] == importlib.metadata.version("torch")
    assert {b["device_type"] for b in found["backends"]} >= {"cpu", "npu"}
    assert "mixed_precision" in found["launch configuration"]["fault"]
    assert found["environment"]["ANYDEVICE_PROGRESS"] == "0"
    assert "hunter2" not in out
    assert cli.main(["env"]) == 0
    text = capsys.readouterr().out
    assert "torch_npu is not installed" in text
    (host,) = re.findall(r"device: cpu, .*, free: (.*?), total: (.*?), capabilities: (.*)", text)
    assert [re.fullmatch(r"[\d.]+ [GT]iB", size) is not None for size in host[:2]] == [True, True]
    assert "device_rng" in host[2].split(", ")


@pytest.mark.skipif(not os.path.exists("/bin/bash"), reason="this system has no bash")
def test_bash_completes_commands_and_options(capsys):
    assert cli.main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    for words, completed in [
        (["anydevice", "lau"], "launch"),
        (["anydevice", "launch", "--num_proc"], "--num_processes"),
        (["anydevice", "run", "--max-m"], "--max-memory"),
        (["anydevice", "certify", "--qui"], "--quick"),
    ]:
        ask = (
            f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _anydevice; "
            'echo "${COMPREPLY[@]}"'
        )
        done = subprocess.run(
            ["/bin/bash", "-c", script + ask], capture_output=True, text=True, check=True
        )
        assert done.stdout.split() == [completed], done.stderr


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_a_script(capsys, shell):
    assert cli.main(["completion", shell]) == 0
    out = capsys.readouterr().out
    assert "launch" in out
    assert "num_processes" in out


# ---------------------------------------------------------------------- what all commands share


def test_a_misspelled_command_is_answered_with_the_right_one(capsys):
    assert cli.main(["lanuch"]) == 2
    assert "did you mean 'launch'?" in capsys.readouterr().err
    assert cli.main(["certfy", "foo"]) == 2
    assert "did you mean 'certify'?" in capsys.readouterr().err


def test_version_typos_and_help_need_no_torch():
    script = """
        import sys
        from anydevice.cli import main

        assert main(["--version"]) == 0
        assert main(["lanuch"]) == 2
        assert main(["launch", "--num_proceses", "2", "x.py"]) == 2
        for words in (["launch", "--help"], ["--help"]):
            try:
                main(words)
            except SystemExit as stopped:
                assert stopped.code == 0
        assert "torch" not in sys.modules and "transformers" not in sys.modules
    """
    code = "\n".join(line[8:] for line in script.splitlines())
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", [["--help"], ["launch", "--help-all"], ["config", "--help"]])
def test_the_program_imports_no_torch_for_its_help(words):
    """Of the whole process, from the interpreter's start: ``--help`` costs less than torch."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "anydevice", *words],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "anydevice" in done.stdout
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert "anydevice.cli" in imported
    assert {name.split(".")[0] for name in imported}.isdisjoint({"torch", "transformers", "numpy"})


@pytest.mark.parametrize("command", [None, "launch", *_names()])
def test_help_fits_a_screen(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stopped:
        cli.main([command, "--help"] if command else ["--help"])
    assert stopped.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 32
    assert max(map(len, lines)) <= 80


def test_a_reader_that_goes_away(tmp_path):
    done = subprocess.run(
        ["/bin/sh", "-c", f"{{ {sys.executable} -m anydevice backends; echo $? >&2; }} | true"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr.strip() == "141"


@pytest.fixture
def _heeds_ctrl_c():
    """As in a terminal: a program that a shell starts in the background ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_heeds_ctrl_c")
def test_ctrl_c_is_one_line(monkeypatch, capsys):
    from anydevice.cli import devices

    def interrupted(args):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)

    monkeypatch.setattr(devices, "_run", interrupted)
    assert cli.main(["devices"]) == 130
    assert capsys.readouterr().err == "anydevice: interrupted\n"
