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
        main(["run", "."])
    """
    done = run_python("-c", textwrap.dedent(script))
    assert "imported: True" in done.stdout, done.stdout + done.stderr


def run_demo(*words, **environment):
    imports = ("transformers.modeling_utils",)
    return run_python(
        "-m", "anydevice", "demo", *words, env={**os.environ, **environment}, imports=imports
    )


def test_demo_splits_a_real_model_and_gives_the_right_answer(tmp_path):
    done = run_demo("--output", str(tmp_path / "made"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "BertModel: 86.7 MiB over 4 devices" in done.stdout
    assert f"picture: {tmp_path / 'made' / 'placement.html'}" in done.stdout
    assert "<svg" in (tmp_path / "made" / "placement.html").read_text()
    trace = json.loads((tmp_path / "made" / "transfers.json").read_text())
    assert {e["cat"] for e in trace["traceEvents"] if e["ph"] == "X"} == {"link", "compute"}
    for part in ("sim:0", "sim:1", "cpu", "disk"):
        assert part in done.stdout
    difference = float(done.stdout.rsplit("on the host:", 1)[1].split()[0])
    assert difference <= 1e-6


def test_demo_without_a_compiler_goes_on_with_cpu_and_disk(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    done = run_demo(
        PATH=str(empty), CXX="", XDG_CACHE_HOME=str(tmp_path / "cache"), TMPDIR=str(tmp_path)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "none can be simulated" in done.stdout
    assert "disk" in done.stdout


@pytest.mark.parametrize(
    "command",
    [
        "devices",
        "backends",
        "run",
        "demo",
        "certify",
        "new-backend",
        "launch",
        "config",
        "test",
        "plan",
        "estimate",
        "merge-weights",
        "env",
        "completion",
    ],
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


# ---------------------------------------------------------------------- run: users' mistakes


def save_model(folder, model):
    model.eval().save_pretrained(folder)
    return str(folder)


def tiny(kind):
    """A model of each kind of input, small and random."""
    import transformers as t

    if kind == "vision":
        config = t.ViTConfig(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
            image_size=16, patch_size=8,
        )  # fmt: skip
        return t.ViTModel(config)
    if kind == "audio":
        config = t.WhisperConfig(
            vocab_size=64, d_model=16, encoder_layers=1, decoder_layers=1, num_mel_bins=8,
            encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16,
            decoder_ffn_dim=16, max_source_positions=20, max_target_positions=20,
            decoder_start_token_id=1, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        return t.WhisperModel(config)
    if kind == "both":
        text = {
            "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
            "intermediate_size": 16, "eos_token_id": 2,
        }  # fmt: skip
        vision = {**text, "image_size": 16, "patch_size": 8}
        return t.CLIPModel(t.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))
    config = t.Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        conv_dim=(8,), conv_kernel=(10,), conv_stride=(5,), num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, num_feat_extract_layers=1, do_stable_layer_norm=False,
    )  # fmt: skip
    return t.Wav2Vec2Model(config)


@pytest.mark.parametrize("kind", ["vision", "audio", "both", "sound"])
def test_models_of_other_inputs_run_on_a_batch_of_the_right_shape(capsys, tmp_path, kind):
    assert cli.main(["run", save_model(tmp_path, tiny(kind))]) == 0
    assert " -> " in capsys.readouterr().out


def test_a_model_that_cannot_be_run_is_a_clear_no(capsys, tiny_llama, monkeypatch):
    from transformers import LlamaForCausalLM

    monkeypatch.setattr(LlamaForCausalLM, "main_input_name", "point_cloud")
    assert cli.main(["run", str(tiny_llama)]) == 1
    assert "takes 'point_cloud', for which no synthetic batch is known" in capsys.readouterr().err
    monkeypatch.setattr(LlamaForCausalLM, "main_input_name", "input_ids")
    monkeypatch.setattr(LlamaForCausalLM, "forward", lambda self, input_ids: input_ids.nothing)
    assert cli.main(["run", str(tiny_llama)]) == 1
    error = capsys.readouterr().err
    assert "was loaded and placed, and could not be run" in error
    assert "Traceback" not in error


def test_budgets_do_not_swallow_the_path(capsys, tiny_llama):
    words = ["run", "--max-memory", "cpu=1GiB", str(tiny_llama), "--text", "a=b", "--json"]
    assert cli.main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["device_map"] == {"": "cpu"}
    assert found["result"].startswith("synthetic batch")
    assert "no tokenizer" in found["result"]
    assert {"importing", "loading", "running"} == set(found["seconds"])


def test_a_device_map_from_a_file(capsys, tiny_llama, sim, tmp_path):
    placed = {"": 0, "model.layers.1": "sim:1", "model.layers.2": "cpu"}
    file = tmp_path / "map.json"
    file.write_text(json.dumps(placed))
    assert cli.main(["run", str(tiny_llama), "--device-map", str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["device_map"]
    assert str(found["model.layers.1"]) == "sim:1"
    for text, message in [("[1]", "a JSON object is needed"), ("{", "cannot be read")]:
        file.write_text(text)
        assert cli.main(["run", str(tiny_llama), "--device-map", str(file)]) == 1
        assert message in capsys.readouterr().err


def test_errors_name_the_options_of_the_command_line(capsys, monkeypatch, tiny_llama):
    from anydevice.cli import run
    from anydevice.errors import BudgetError

    def refuse(*args, **kwargs):
        raise BudgetError("give max_memory={0: '8GiB'} or offload_folder='x'")

    monkeypatch.setattr(run, "from_pretrained", refuse)
    assert cli.main(["run", str(tiny_llama)]) == 1
    error = capsys.readouterr().err
    assert "--max-memory" in error
    assert "--offload-folder" in error


def test_options_reach_from_pretrained(monkeypatch, tiny_llama):
    from anydevice.cli import run
    from anydevice.errors import OptionError

    given = {}

    def note(*args, **kwargs):
        given.update(kwargs)
        raise OptionError("enough")

    monkeypatch.setattr(run, "from_pretrained", note)
    words = ["--variant", "fp16", "--token", "t", "--trust-remote-code", "--revision", "r"]
    assert cli.main(["run", str(tiny_llama), *words]) == 1
    wanted = {"variant": "fp16", "token": "t", "trust_remote_code": True, "revision": "r"}
    assert given.items() >= {**wanted, "progress": False}.items()


@pytest.mark.parametrize("command", ["run", "plan", "estimate"])
def test_without_a_network_a_misspelled_name_is_not_asked_for_again_and_again(
    capsys, monkeypatch, command
):
    import socket

    tries = []

    def nowhere(address, timeout=None):
        tries.append(address)
        raise OSError("no route")

    monkeypatch.setattr(socket, "create_connection", nowhere)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    assert cli.main([command, "gpt22-no-such-name"]) == 1
    assert len(tries) == 1
    error = capsys.readouterr().err
    assert "gpt22-no-such-name" in error
    assert "Traceback" not in error


@pytest.mark.parametrize("command", ["run", "plan", "estimate"])
@pytest.mark.parametrize("name", ["no-such/model", "./no/such/folder"])
def test_a_misspelled_name_is_refused_before_transformers_is_imported(command, name):
    code = (
        "import sys; from anydevice import cli; code = cli.main(sys.argv[1:]);"
        "print(code, 'transformers' in sys.modules)"
    )
    done = run_python("-c", code, command, name, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert done.stdout.split()[-2:] == ["1", "False"]
    assert f"{name}: no " in done.stderr
    assert "file or folder" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["plan", "m", "--max-memory", "0=1GiB"],
            "no option --max-memory: give --device NAME=SIZE",
        ),
        (["plan", "m", "--max_memory=1GiB"], "no option --max_memory: give --device NAME=SIZE"),
        (["devices", "--jsom"], "no option --jsom; did you mean '--json'?"),
        (["devices", "--quite-other"], "anydevice devices --help lists them"),
        (["devices", "gpt2"], "'gpt2' is one word too many"),
    ],
)
def test_words_that_a_command_does_not_take_are_explained(capsys, words, said):
    assert cli.main(words) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"anydevice {words[0]}: ")
    assert said in message
    assert message.count("\n") == 1
