"""Plans and estimates without weights."""

import json

import pytest
from safetensors.torch import load_file

from anydevice import cli
from anydevice.cli.plan_hosts import read_link
from anydevice_conformance.simulator.backend import SimulatorBackend

GIB = 1 << 30
#: Bytes of the model of `config_only` in bfloat16.
WEIGHTS = 13_476_831_232


def plan(capsys, *words):
    assert cli.main(["plan", *map(str, words), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    return found, {row["device"]: row for row in found["devices"]}


def test_pretended_devices_by_their_names(capsys, config_only):
    words = [
        "--device",
        "foo=8GiB",
        "--device",
        "foo=8GiB",
        "--device",
        "bar=1GiB",
        "--cpu",
        "64GiB",
    ]
    found, devices = plan(capsys, config_only, *words)
    assert list(devices) == ["foo:0", "foo:1", "bar:0", "cpu", "disk"]
    assert found["weights"] == sum(d["weights"] for d in devices.values())
    assert abs(found["weights"] - WEIGHTS) < 10_000
    assert devices["foo:0"]["budget"] == 8 * GIB
    assert all(d["weights"] <= d["budget"] for d in devices.values() if d["budget"] is not None)
    assert set(found["device_map"].values()) == {"foo:0", "foo:1"}
    assert found["class"] == "LlamaForCausalLM"


def test_a_table_for_a_person(capsys, config_only):
    words = ["plan", str(config_only / "config.json"), "--device", "foo=4GiB", "--cpu", "64GiB"]
    assert cli.main([*words, "--explain"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].split() == [
        "DEVICE", "BUDGET", "WEIGHTS", "RESERVED", "CACHE", "ACTIVATIONS", "FREE",
    ]  # fmt: skip
    assert "offloaded blocks run on foo:0" in out
    assert "12.6 GiB of weights" in out


def test_a_dtype_halves_it(capsys, config_only):
    found, _ = plan(capsys, config_only, "--device", "foo=30GiB", "--dtype", "int8")
    assert abs(found["weights"] - WEIGHTS / 2) < 10_000


def test_cache_and_activations_take_their_room(capsys, config_only):
    words = ["--device", "foo=8GiB", "--device", "foo=12GiB", "--cpu", "64GiB"]
    batch, context = 2, 4096
    found, devices = plan(capsys, config_only, *words, "--batch", batch, "--context", context)
    a_layer = 2 * batch * context * 4096 * 2  # keys and values, bfloat16
    assert sum(d["cache"] for d in devices.values()) == 32 * a_layer
    assert devices["cpu"]["cache"] == devices["disk"]["cache"] == 0
    logits = batch * context * 32000 * 4
    for name in ("foo:0", "foo:1"):
        device = devices[name]
        assert device["activations"] > logits
        parts = device["weights"] + device["reserved"] + device["cache"] + device["activations"]
        assert parts + device["free"] == device["budget"]
    assert found["weights"] == sum(d["weights"] for d in devices.values())


def test_a_cache_larger_than_the_device_rests_with_its_layers(capsys, config_only):
    words = ["--device", "foo=8GiB", "--cpu", "1GiB", "--batch", "1", "--context", "1000000"]
    found, devices = plan(capsys, config_only, *words)
    assert all(d["weights"] >= 0 for d in devices.values())
    assert found["weights"] == sum(d["weights"] for d in devices.values())
    assert sum(d["cache"] for d in devices.values()) == 32 * 2 * 10**6 * 4096 * 2
    assert devices["disk"]["cache"] > 0


def test_headers_alone_make_a_plan(capsys, tiny_llama, tmp_path):
    for file in tiny_llama.glob("model*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    found, devices = plan(capsys, tmp_path, "--device", "foo=100KiB", "--cpu", "1GiB")
    tensors = [t for file in tmp_path.glob("*.safetensors") for t in load_file(file).values()]
    assert found["weights"] == sum(t.nbytes for t in tensors)
    assert devices["foo:0"]["weights"] > 0
    assert any(name.startswith("model.layers") for name in found["device_map"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "foo"], "--device 'foo': write NAME=SIZE"),
        (["--device", "foo=much"], "--device foo=much: 'much' is not a size"),
        (["--device", "foo:0=1GiB", "--device", "foo:0=1GiB"], "named twice"),
        (["--cpu", "some"], "--cpu some"),
        (["--device", "foo=1GiB", "--disk", "0"], "DoesNotFitError"),
        (["--dtype", "float23"], "float23"),
    ],
)
def test_what_cannot_be_planned_is_named(capsys, config_only, words, message):
    assert cli.main(["plan", str(config_only), *words]) == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err


def test_a_cache_needs_a_config(capsys, tiny_llama, tmp_path):
    for file in tiny_llama.glob("model*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    words = ["plan", str(tmp_path), "--device", "foo=1GiB", "--context", "10"]
    assert cli.main(words) == 1
    assert "need a config" in capsys.readouterr().err


def test_a_plan_draws_itself(capsys, config_only, tmp_path):
    file = tmp_path / "plan.svg"
    words = ["plan", str(config_only), "--device", "foo=8GiB", "--cpu", "64GiB", "--picture"]
    assert cli.main([*words, str(file)]) == 0
    out = capsys.readouterr().out
    assert f"picture: {file}" in out
    assert "█ weights" in out
    assert file.read_text().startswith("<svg")
    assert cli.main([*words, "plan.gif"]) == 1
    assert "plan.gif: a picture ends in .svg, .png, .html or .txt" in capsys.readouterr().err


def test_no_such_model(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for command in ("plan", "estimate"):
        assert cli.main([command, "no-such-model-here"]) == 1
        assert "no-such-model-here: no file or folder" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["int4", "float16"])
def test_pretended_devices_hold_what_those_of_this_machine_cannot(
    capsys, config_only, sim, monkeypatch, dtype
):
    monkeypatch.setattr(SimulatorBackend, "supports_dtype", lambda backend, dtype: False)
    found, _ = plan(capsys, config_only, "--device", "foo=30GiB", "--dtype", dtype)
    assert set(found["device_map"].values()) == {"foo:0"}
    assert cli.main(["estimate", str(config_only), "--dtypes", dtype]) == 0
    sim.configure(devices=2, memory="8GiB")  # nothing is allocated
    assert cli.main(["plan", str(config_only), "--dtype", "float16"]) == 1
    error = capsys.readouterr().err
    assert "sim" in error
    assert "float16" in error


def test_int4_is_packed_by_a_quantizer_on_any_device(capsys, config_only, sim):
    found, _ = plan(capsys, config_only, "--dtype", "int4")
    assert abs(found["weights"] - WEIGHTS / 4) < 10_000


# ---------------------------------------------------------------------- estimates


def test_an_estimate_by_dtype(capsys, config_only):
    assert cli.main(["estimate-memory", str(config_only), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    by_dtype = {e["dtype"]: e for e in found["estimates"]}
    assert list(by_dtype) == ["float32", "float16", "int8", "int4"]
    for dtype, bits in [("float32", 32), ("float16", 16), ("int8", 8), ("int4", 4)]:
        one = by_dtype[dtype]
        assert abs(one["weights"] - found["parameters"] * bits / 8) < 10_000
        assert abs(one["training"] - 4 * one["weights"]) < 10_000
        assert one["largest_block"] < one["device"] == one["weights"]
        assert 0 < one["device_with_offload"] < one["device"]
    assert by_dtype["float32"]["largest_block_name"].startswith("model.layers.")


def test_the_smallest_device_runs_it_and_a_smaller_one_does_not(capsys, tiny_llama):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from anydevice import infer_auto_device_map

    assert cli.main(["estimate", str(tiny_llama), "--dtypes", "float32", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["estimates"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny_llama))

    def runs(size):
        placed = infer_auto_device_map(model, {0: size, "cpu": "1GiB"}, prefetch=False)
        return placed.main_device == 0 and not placed.host_run

    assert found["largest_block"] / 4 < found["device_with_offload"] < found["device"]
    assert runs(found["device_with_offload"])
    assert not runs(int(found["device_with_offload"] * 0.95))


def test_hosts_that_are_not_here(tiny_llama, capsys):
    options = ["--hosts", "3", "--link", "1MB/s", "--device", "foo=200KB", "--batch", "2"]
    words = ["plan", str(tiny_llama), *options, "--context", "8", "--microbatches", "4"]
    assert cli.main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    blocks = [(row["first"], row["blocks"]) for row in found["hosts"]]
    assert blocks == [("model.layers.0", 2), ("model.layers.2", 2), ("model.layers.4", 2)]
    # Two crossings, of two sequences of 32 numbers of 4 bytes.
    assert found["link_time_per_token"] == pytest.approx(2 * 2 * 32 * 4 / 1e6)
    assert found["link_time_of_prefill"] == pytest.approx(8 * 2 * 2 * 32 * 4 / 1e6)
    assert found["logits_time_per_token"] == pytest.approx(2 * 128 * 4 / 1e6)
    assert found["bubble"] == pytest.approx(2 / 6)
    assert set(found["formulas"]) <= set(found)
    # Keys and values of two layers: 2 sequences of 8 tokens, 2 heads of 8 numbers.
    assert all(row["cache"] == 2 * 2 * 2 * 8 * 2 * 8 * 4 for row in found["hosts"])
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert "(hosts - 1) / (microbatches + hosts - 1)" in out
    assert "33%" in out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--hosts", "7"], "6 blocks"),
        (["--hosts", "0"], "--hosts 0"),
        (["--hosts", "2", "--link", "fast"], "--link 'fast'"),
        (["--link", "1GB/s"], "--hosts"),
        (["--hosts", "2", "--dtype", "int4"], "--dtype int4"),
        (["--hosts", "2", "--device", "foo=1KB", "--disk", "0"], "does not fit"),
    ],
)
def test_hosts_that_cannot_be_planned(tiny_llama, capsys, options, said):
    assert cli.main(["plan", str(tiny_llama), *options]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "rate"), [("25GB/s", 25e9), ("200Gb/s", 25e9), ("1GiB/s", 2**30), ("8kbit/s", 1e3)]
)
def test_a_link(text, rate):
    assert read_link(text) == rate
