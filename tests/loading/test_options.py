"""Arguments are checked before any work starts."""

import re

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from anydevice.checkpoint import open_checkpoint
from anydevice.errors import (
    AnyDeviceError,
    CheckpointNotFoundError,
    ModelError,
    OffloadStoreError,
    OptionError,
)
from anydevice.loading import applying, load_checkpoint_in_model


class Net(nn.Module):
    def __init__(self, size=8):
        super().__init__()
        self.body = nn.Linear(size, size, bias=False)
        self.norm = nn.LayerNorm(size, bias=False)


@pytest.fixture
def path(tmp_path):
    save_file(Net().state_dict(), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("workers", 0),
        ("workers", -1),
        ("workers", 2.5),
        ("workers", True),
        ("workers", "2"),
        ("buffer_bytes", -5),
        ("buffer_bytes", "much"),
        ("buffer_bytes", float("nan")),
        ("buffer_bytes", None),
        ("keep_in_fp32_modules", 5),
        ("keep_in_fp32_modules", [5]),
        ("keep_in_fp32_modules", [""]),
        ("offload_folder", 5),
        ("variant", 5),
        ("revision", 5),
        ("subfolder", 5),
        ("checkpoint", 5),
        ("dtype", 5),
        ("dtype", "float17"),
        ("dtype", "int8"),
    ],
)
@pytest.mark.parametrize("more", [{}, {"dtype": torch.float16}])
def test_an_argument_that_cannot_be_used_is_named(name, value, more, path):
    model = Net()
    before = model.body.weight.detach().clone()
    with pytest.raises(AnyDeviceError, match=re.escape(f"{name}={value!r}")) as caught:
        load_checkpoint_in_model(model, **{"checkpoint": path, **more, name: value})
    assert isinstance(caught.value, (OptionError, ModelError))
    assert torch.equal(model.body.weight, before)


@pytest.mark.parametrize("size", [0, 1, 1 << 20, "1MiB", "256 MiB", 2e6])
def test_sizes_of_buffers_in_any_spelling(size, path):
    model = Net()
    load_checkpoint_in_model(model, path, dtype="float16", buffer_bytes=size, workers=1)
    assert model.body.weight.dtype is torch.float16


def test_a_size_is_read_before_it_is_used(path, monkeypatch):
    seen = []
    real = applying.stream

    def stream(requests, *, buffer_bytes, workers, advance):
        seen.append((buffer_bytes, workers))
        real(requests, buffer_bytes=buffer_bytes, workers=workers, advance=advance)

    monkeypatch.setattr(applying, "stream", stream)
    load_checkpoint_in_model(Net(), path, dtype="float16", buffer_bytes="64MiB", workers=3)
    assert set(seen) == {(64 << 20, 3)}


def test_one_name_is_one_module(path):
    model = Net()
    load_checkpoint_in_model(model, path, dtype="float16", keep_in_fp32_modules="norm")
    assert model.norm.weight.dtype is torch.float32
    assert model.body.weight.dtype is torch.float16


def test_a_file_that_does_not_carry_the_variant(path):
    with pytest.raises(CheckpointNotFoundError, match=r"model\.safetensors is not of.*'fp16'"):
        load_checkpoint_in_model(Net(), path, variant="fp16")
    with pytest.raises(CheckpointNotFoundError, match="variant='el'"):
        open_checkpoint(path, variant="el")
    index = path.with_name("model.safetensors.index.json")
    index.write_text('{"weight_map": {"body.weight": "model.safetensors"}}')
    with pytest.raises(CheckpointNotFoundError, match=r"index\.json is not of variant='fp16'"):
        open_checkpoint(index, variant="fp16")
    index = index.rename(path.with_name("model.safetensors.index.fp16.json"))
    assert "body.weight" in open_checkpoint(index, variant="fp16")
    named = path.rename(path.with_name("model.fp16.safetensors"))
    assert len(open_checkpoint(named, variant="fp16")) == 2


def test_an_offload_folder_that_is_a_file_is_refused_before_the_work(path):
    model = Net()
    with pytest.raises(OffloadStoreError, match=r"model\.safetensors' is not a folder"):
        load_checkpoint_in_model(model, path, "disk", path, dtype=torch.float16)
    assert model.body.weight.dtype is torch.float32


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float16"},
        {"dtype": "float16", "keep_in_fp32_modules": "norm"},
        {"dtype": "auto"},
    ],
)
def test_weights_are_placed_by_the_size_that_they_will_have(sim, options, tmp_path):
    state = Net(512).half().state_dict()  # 512 KiB in float16, 1 MiB as the model has them
    save_file(state, tmp_path / "m.safetensors")
    sim.configure(devices=1, memory="900KiB", mode="lazy")
    model = Net(512)
    load_checkpoint_in_model(
        model, tmp_path / "m.safetensors", "auto", tmp_path / "offload", **options
    )
    assert {str(p.device) for p in model.parameters()} == {"sim:0"}
