"""transformers' quantizers, with weights planned by the size that they have once quantized."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
import zoo
from safetensors.torch import load_file, save_file

from anydevice.errors import DeviceMapError, DoesNotFitError

pytestmark = [pytest.mark.xdist_group("integrations")]


@pytest.fixture(scope="module")
def torchao():
    """The package; importing it warns of what this build of torch lacks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torchao.quantization

        return torchao.quantization


@pytest.fixture(scope="module", params=["int8", "int4"])
def quantized(request, torchao, saved, tmp_path_factory):
    """How to quantize, and the plain quantized model with what it gives, saved too."""
    from transformers import TorchAoConfig

    how, dtype = {
        "int8": (torchao.Int8WeightOnlyConfig(), torch.float32),
        "int4": (
            torchao.IntxWeightOnlyConfig(torch.int4, granularity=torchao.PerGroup(16)),
            torch.bfloat16,
        ),
    }[request.param]
    options = {"quantization_config": TorchAoConfig(how), "dtype": dtype}
    llama = saved("llama")
    plain = llama.model_class.from_pretrained(llama.folder, **options)
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "int8":
        plain.save_pretrained(folder)
    with torch.no_grad():
        return options, plain(**llama.inputs).logits, folder, request.param


def check(model, inputs, expected):
    weight = model.model.layers[2].mlp.up_proj.weight
    assert type(weight.data).__name__.startswith("Int")
    with torch.no_grad():
        logits = model(**{name: value.to(model.device) for name, value in inputs.items()}).logits
    torch.testing.assert_close(logits.cpu(), expected, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize(
    "budgets", [None, {0: "36KiB", "cpu": "1GiB"}, {0: "20KiB", 1: "20KiB", "cpu": "1GiB"}]
)
def test_torchao_while_loading_and_from_a_checkpoint(budgets, quantized, saved, sim, enabled):
    options, expected, folder, name = quantized
    model = saved("llama").load(max_memory=budgets, **options)
    check(model, saved("llama").inputs, expected)
    if budgets is not None:
        assert {0, "cpu"} <= set(model.hf_device_map.values())
    if name == "int8":
        again = saved("llama").model_class.from_pretrained(
            folder, device_map="auto", max_memory=budgets
        )
        check(again, saved("llama").inputs, expected)


def test_quantized_sizes_are_planned(quantized, saved, sim, enabled):
    options, _, _, _ = quantized
    plain = saved("llama").load("cpu").anydevice_placement.bytes_on("cpu")
    assert saved("llama").load("cpu", **options).anydevice_placement.bytes_on("cpu") < plain * 0.6


def test_weights_of_torchao_are_not_for_the_disk(quantized, saved, sim, enabled, tmp_path):
    options, _, _, _ = quantized
    with pytest.raises(DoesNotFitError, match="disk"):
        saved("llama").load(max_memory={0: "30KiB", "cpu": "1KiB"}, **options)
    with pytest.raises(DeviceMapError, match="torchao"):
        saved("llama").load({"": "disk"}, offload_folder=tmp_path, **options)


@pytest.fixture(scope="module")
def float8(saved, tmp_path_factory):
    """A checkpoint of float8 weights with a scale for each block, and what the model gives."""
    llama = saved("llama")
    folder = tmp_path_factory.mktemp("float8")
    stored, plain = {}, {}
    for name, value in load_file(f"{llama.folder}/model.safetensors").items():
        stored[name] = plain[name] = value
        if value.ndim == 2 and ".layers." in name:
            rows, columns = (size // 16 for size in value.shape)
            blocks = value.reshape(rows, 16, columns, 16)
            scale = blocks.abs().amax((1, 3), keepdim=True) / 448
            packed = (blocks / scale).to(torch.float8_e4m3fn)
            stored[name] = packed.reshape(value.shape)
            stored[f"{name}_scale_inv"] = scale.reshape(rows, columns).contiguous()
            plain[name] = (packed.float() * scale).reshape(value.shape)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = llama.plain.config.to_dict()
    config["quantization_config"] = {
        "quant_method": "fp8",
        "weight_block_size": [16, 16],
        "activation_scheme": "dynamic",
    }
    (folder / "config.json").write_text(json.dumps(config))
    model = type(llama.plain)(llama.plain.config).eval()
    model.load_state_dict(plain)
    with torch.no_grad():
        return folder, model(**llama.inputs).logits


@pytest.mark.parametrize(
    "options",
    [
        {"device_map": "cpu"},
        {"device_map": 0},
        {"device_map": "auto", "max_memory": {0: "60KiB", "cpu": "30KiB"}},
    ],
)
def test_float8_checkpoints_with_scales(options, float8, saved, sim, enabled, tmp_path):
    folder, expected = float8
    model = saved("llama").model_class.from_pretrained(
        folder, offload_folder=tmp_path / "offload", **options
    )
    if "max_memory" in options:
        assert {"cpu", "disk"} <= set(model.hf_device_map.values())
    with torch.no_grad():
        logits = model(zoo.IDS.to(model.device)).logits
    torch.testing.assert_close(logits.cpu(), expected, atol=1e-4, rtol=1e-4)
