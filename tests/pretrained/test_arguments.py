"""What transformers' own from_pretrained takes; what is refused, and how."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

import anydevice
from anydevice.errors import (
    CheckpointMismatchError,
    CheckpointNotFoundError,
    MissingDependencyError,
    ModelError,
    OptionError,
    UnknownArgumentError,
)


def copy_of(folder, target):
    shutil.copytree(folder, target)
    return target


def weights(folder):
    """The tensors of a checkpoint, whose files are removed."""
    state = {}
    for file in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
        state |= load_file(file) if file.suffix == ".safetensors" else {}
        file.unlink()
    return state


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"dtype": "auto"}, torch.float32),
        ({"torch_dtype": torch.float16}, torch.float16),
        ({"torch_dtype": "bfloat16", "dtype": "bfloat16"}, torch.bfloat16),
        ({"attn_implementation": "eager"}, torch.float32),
        ({"local_files_only": True, "cache_dir": "/nowhere"}, torch.float32),
        ({"initializer_range": 0.5}, torch.float32),
    ],
)
def test_arguments_of_transformers(tiny_llama, options, dtype):
    model = anydevice.from_pretrained(None, tiny_llama, device_map="cpu", **options)
    assert {p.dtype for p in model.parameters()} == {dtype}
    if "attn_implementation" in options:
        assert model.config._attn_implementation == "eager"
    assert model.config.initializer_range == options.get("initializer_range", 0.02)


def test_auto_keeps_the_dtype_of_the_file(tiny_llama, tmp_path):
    folder = copy_of(tiny_llama, tmp_path / "half")
    state = {name: tensor.to(torch.bfloat16) for name, tensor in weights(folder).items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, dtype=None, torch_dtype=None)
    model = anydevice.from_pretrained(None, folder, device_map="cpu", dtype="auto")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_a_subfolder(tiny_llama, tmp_path):
    copy_of(tiny_llama, tmp_path / "part")
    model = anydevice.from_pretrained(None, tmp_path, device_map="cpu", subfolder="part")
    assert type(model) is tf.LlamaForCausalLM
    with pytest.raises(CheckpointNotFoundError, match="subfolder 'other'"):
        anydevice.from_pretrained(None, tmp_path, subfolder="other")


def test_a_misspelled_argument_is_refused_before_anything_is_fetched():
    with pytest.raises(UnknownArgumentError, match=r"from_pretrained\(\).*'offload_foldr'.*mean"):
        anydevice.from_pretrained(None, "nobody/nothing", offload_foldr="x")
    with pytest.raises(TypeError, match="attn_implementation"):
        anydevice.from_pretrained(None, "nobody/nothing", atn_implementation="x")


def test_an_argument_that_no_config_has(tiny_llama):
    with pytest.raises(UnknownArgumentError, match="'wobble'"):
        anydevice.from_pretrained(None, tiny_llama, wobble=1)
    config = tf.AutoConfig.from_pretrained(tiny_llama)
    with pytest.raises(UnknownArgumentError, match="'wobble'"):
        anydevice.from_pretrained(None, tiny_llama, config=config, wobble=1)


def test_two_dtypes(tiny_llama):
    with pytest.raises(OptionError, match="torch_dtype"):
        anydevice.from_pretrained(None, tiny_llama, dtype="float16", torch_dtype="bfloat16")


def test_a_device_map_is_read_before_anything_is_fetched():
    with pytest.raises(anydevice.errors.UnknownDeviceError, match="fastest"):
        anydevice.from_pretrained(None, "nobody/nothing", device_map="fastest")


def test_an_old_transformers_is_named(tiny_llama, monkeypatch):
    monkeypatch.setattr("transformers.__version__", "4.48.0")
    with pytest.raises(MissingDependencyError, match=r"4\.56.*4\.48\.0"):
        anydevice.from_pretrained(None, tiny_llama)


def test_quantized_weights_are_never_random(tiny_llama, tmp_path):
    folder = copy_of(tiny_llama, tmp_path / "quantized")
    edit_config(folder, quantization_config={"quant_method": "fp8"})
    state = weights(folder)
    lacking = state.pop("model.layers.1.mlp.up_proj.weight")
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointMismatchError, match=r"lacks.*'fp8'.*layers\.1\.mlp\.up_proj"):
        anydevice.from_pretrained(None, folder, device_map="cpu")
    state["model.layers.1.mlp.up_proj.weight"] = lacking
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    model = anydevice.from_pretrained(None, folder, device_map="cpu")
    assert torch.equal(model.model.layers[1].mlp.up_proj.weight, lacking)


@pytest.mark.parametrize(
    ("method", "more"),
    [("gptq", {"bits": 4}), ("hqq", {}), ("compressed-tensors", {})],
)
def test_a_quantized_checkpoint_is_refused_by_name(tiny_llama, tmp_path, method, more):
    folder = copy_of(tiny_llama, tmp_path / "quantized")
    edit_config(folder, quantization_config={"quant_method": method, **more})
    with pytest.raises((MissingDependencyError, ModelError), match=method) as caught:
        anydevice.from_pretrained(None, folder, device_map="cpu")
    assert len(str(caught.value)) < 1000


def test_packed_weights_without_a_word_in_the_config(tiny_llama, tmp_path):
    folder = copy_of(tiny_llama, tmp_path / "packed")
    state = weights(folder)
    packed = {}
    for name, value in state.items():
        if name.endswith("proj.weight"):
            packed[name.replace("weight", "qweight")] = torch.zeros(4, 4, dtype=torch.int32)
            packed[name.replace("weight", "scales")] = torch.ones(4)
        else:
            packed[name] = value
    save_file(packed, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointMismatchError, match=r"qweight.*quantization_config") as caught:
        anydevice.from_pretrained(None, folder, device_map="cpu")
    assert len(str(caught.value)) < 1000
