"""What cannot be a model's weight is refused before anything of the model is touched."""

import logging

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from anydevice.checkpoint import open_checkpoint
from anydevice.errors import CheckpointMismatchError
from anydevice.loading import load_checkpoint_in_model

SPARSE = torch.eye(4).to_sparse()


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4, bias=False)
        self.b = nn.Linear(4, 4, bias=False)


def saved(folder, **state):
    path = folder / f"{len(list(folder.iterdir()))}.bin"  # models go on using the ones before
    torch.save({k.replace("_", "."): v for k, v in state.items()}, path)
    return path


def refused(model, path, *words, **options):
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(CheckpointMismatchError) as caught:
        load_checkpoint_in_model(model, path, **options)
    for word in words:
        assert word in str(caught.value)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0, equal_nan=True)


# ---------------------------------------------------------------------- forms


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("device_map", [None, "disk", "sim:0"])
@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_a_weight_saved_from_meta_has_no_data(sim, legacy, device_map, dtype, tmp_path):
    state = {"a.weight": torch.empty(4, 4, device="meta"), "b.weight": torch.ones(4, 4)}
    torch.save(state, tmp_path / "m.bin", _use_new_zipfile_serialization=not legacy)
    refused(
        Two(), tmp_path / "m.bin", "a.weight has no data", device_map=device_map, dtype=dtype,
        offload_folder=tmp_path / "offload",
    )  # fmt: skip


def test_sparse_weights_are_for_sparse_models(tmp_path):
    path = saved(tmp_path, a_weight=SPARSE, b_weight=torch.ones(4, 4))
    refused(Two(), path, "a.weight is sparse_coo in the checkpoint and dense in the model")
    model = Two()
    model.a.weight = nn.Parameter(torch.zeros(4, 4).to_sparse())
    load_checkpoint_in_model(model, path)
    assert model.a.weight.layout is torch.sparse_coo
    assert torch.equal(model.a.weight.to_dense(), torch.eye(4))
    refused(
        model, path, "cannot be kept on disk", device_map="disk", offload_folder=tmp_path / "off"
    )
    dense = saved(tmp_path, a_weight=torch.ones(4, 4), b_weight=torch.ones(4, 4))
    refused(model, dense, "dense in the checkpoint and sparse_coo in the model")


def test_weights_made_of_other_tensors(tmp_path):
    pair = TwoTensor(torch.ones(4, 4), torch.ones(4, 4))
    dense = saved(tmp_path, a_weight=torch.ones(4, 4), b_weight=torch.ones(4, 4))
    model = Two()
    model.a.weight = nn.Parameter(pair.clone())
    with pytest.raises(CheckpointMismatchError, match=r"a\.weight is dense.*and TwoTensor in the"):
        load_checkpoint_in_model(model, dense)
    with torch.serialization.safe_globals([TwoTensor, torch._tensor._rebuild_from_type_v2]):
        checkpoint = open_checkpoint(saved(tmp_path, a_weight=pair, b_weight=torch.ones(4, 4)))
    refused(Two(), checkpoint, "a.weight is TwoTensor in the checkpoint and dense in the model")


# ---------------------------------------------------------------------- dtypes


def packed():
    return torch.arange(16, dtype=torch.uint8).view(4, 4).view(torch.float4_e2m1fn_x2)


def test_packed_floats_cannot_be_cast(tmp_path):
    save_file({"weight": packed()}, tmp_path / "m.safetensors")
    words = ("weight holds float4_e2m1fn_x2", "cannot cast to bfloat16", "dtype='auto'")
    refused(nn.Linear(4, 4, bias=False).bfloat16(), tmp_path / "m.safetensors", *words)
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros_like(packed()), requires_grad=False)
    load_checkpoint_in_model(model, tmp_path / "m.safetensors", dtype="bfloat16")
    assert torch.equal(model.weight.view(torch.uint8), packed().view(torch.uint8))
    inside = nn.Module()
    inside.part = model
    save_file({"part.weight": packed()}, tmp_path / "m.safetensors")
    with pytest.raises(CheckpointMismatchError, match="cannot cast to float32"):
        load_checkpoint_in_model(inside, tmp_path / "m.safetensors", keep_in_fp32_modules=["part"])


@pytest.mark.parametrize(
    "scale", ["a.weight_scale_inv", "a.weight_scale", "a.scale_weight", "a.weight._scale"]
)
def test_floats_of_8_bits_are_not_cast_without_their_scale(scale, tmp_path):
    eight = torch.full((4, 4), 2.0).to(torch.float8_e4m3fn)
    state = {"a.weight": eight, "b.weight": torch.ones(4, 4)}
    save_file({**state, scale: torch.ones(1)}, tmp_path / "m.safetensors")
    refused(Two().bfloat16(), tmp_path / "m.safetensors", "a.weight", scale, "dtype='auto'")
    model = Two().bfloat16()
    load_checkpoint_in_model(model, tmp_path / "m.safetensors", dtype="auto")
    assert model.a.weight.dtype is torch.float8_e4m3fn
    save_file(state, tmp_path / "m.safetensors")  # stored narrow, and no more to it
    load_checkpoint_in_model(model.bfloat16(), tmp_path / "m.safetensors")
    assert model.a.weight.tolist() == [[2.0] * 4] * 4


def test_wide_integers_are_refused_for_the_right_reason(tmp_path):
    save_file({"ids": torch.arange(3)}, tmp_path / "m.safetensors")
    model = nn.Module()
    model.register_buffer("ids", torch.zeros(3, dtype=torch.int32))
    refused(model, tmp_path / "m.safetensors", "cannot hold all its values", "int64", "int32")


# ---------------------------------------------------------------------- ties


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tied_names_with_different_values(dtype, tmp_path, caplog):
    model = Two()
    model.b.weight = model.a.weight
    values = torch.full((4, 4), float("nan"))
    save_file(
        {"a.weight": values, "b.weight": values.clone().to(dtype)}, tmp_path / "m.safetensors"
    )
    load_checkpoint_in_model(model, tmp_path / "m.safetensors", strict=True)
    assert caplog.records == []
    other = values.clone()
    other[3, 3] = 1
    save_file({"a.weight": values, "b.weight": other.to(dtype)}, tmp_path / "m.safetensors")
    with caplog.at_level(logging.WARNING, "anydevice"):
        load_checkpoint_in_model(model, tmp_path / "m.safetensors")
    assert [r.getMessage() for r in caplog.records] == [
        f"{tmp_path / 'm.safetensors'}: b.weight has other values in the checkpoint than a.weight, "
        "to which it is tied in the model; those of the latter are taken"
    ]
    refused(model, tmp_path / "m.safetensors", "b.weight has other values", strict=True)


def test_strict_compares_every_value_of_tied_names(tmp_path):
    class Long(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.zeros(3 << 20))
            self.b = self.a

    values = torch.zeros(3 << 20)
    values[(1 << 20) + 5] = 1
    state = {"a": torch.zeros(3 << 20), "b": values}
    save_file(state, tmp_path / "m.safetensors")
    refused(Long(), tmp_path / "m.safetensors", "b has other values", strict=True)


# ---------------------------------------------------------------------- buffers


def test_a_buffer_left_on_meta_is_told(tmp_path, caplog):
    class Rotary(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2))
            self.register_buffer("table", torch.ones(2), persistent=False)

    save_file({"weight": torch.ones(2)}, tmp_path / "m.safetensors")
    with torch.device("meta"):
        model = Rotary()
    with pytest.raises(CheckpointMismatchError, match=r"1 buffers stay on meta.*: table\."):
        load_checkpoint_in_model(model, tmp_path / "m.safetensors", strict=True)
    with caplog.at_level(logging.WARNING, "anydevice"):
        report = load_checkpoint_in_model(model, tmp_path / "m.safetensors")
    assert report.missing == ["table"]
    assert "table of Rotary stay on meta" in caplog.text
    report = load_checkpoint_in_model(
        model, tmp_path / "m.safetensors", strict=True, allow_missing=True
    )
    assert report.missing == ["table"]
    report = load_checkpoint_in_model(Rotary(), tmp_path / "m.safetensors", strict=True)
    assert report.missing == []


# ---------------------------------------------------------------------- the report


def test_a_weight_at_an_odd_place_is_a_copy_and_counted_so(tmp_path):
    header = b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'
    header += b" " * (-len(header) % 8 + 1)
    data = torch.arange(4.0).numpy().tobytes()
    (tmp_path / "m.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(4))
    report = load_checkpoint_in_model(model, tmp_path / "m.safetensors", "disk")
    assert (report.mapped_bytes, report.read_bytes) == (0, 16)
    assert model.w.tolist() == [0, 1, 2, 3]
