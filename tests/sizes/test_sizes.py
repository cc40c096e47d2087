"""Bytes of modules, and ties."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from anydevice.dtypes import dtype_bits
from anydevice.errors import ModelError
from anydevice.sizes import (
    calculate_maximum_sizes,
    compute_module_sizes,
    get_max_layer_size,
    tensor_bytes,
)
from anydevice.ties import find_tied_parameters, retie_parameters


class Tied(nn.Module):
    """An embedding whose head is tied, three layers, buffers of both kinds and a root parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(10, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("steps", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(5), persistent=False)
        self.scale = nn.Parameter(torch.ones(2))


def test_every_prefix_has_its_bytes_and_ties_count_once() -> None:
    sizes = compute_module_sizes(Tied())
    assert dict(sizes) == {
        "": 452,
        "emb": 160,
        "emb.weight": 160,
        "layers": 240,
        **{f"layers.{i}": 80 for i in range(3)},
        **{f"layers.{i}.weight": 64 for i in range(3)},
        **{f"layers.{i}.bias": 16 for i in range(3)},
        "steps": 24,
        "scratch": 20,
        "scale": 8,
    }
    assert sizes["head"] == 0


@pytest.mark.parametrize(
    ("dtype", "total"),
    [(torch.float16, 238), ("float16", 238), ("int4", 78), ("fp8", 131), (torch.float64, 880)],
)
def test_only_floating_point_weights_are_cast(dtype: str | torch.dtype, total: int) -> None:
    assert compute_module_sizes(Tied(), dtype=dtype)[""] == total


def test_special_dtypes_win_whatever_the_weight_is() -> None:
    special = {"scale": torch.float64, "steps": torch.int8}
    sizes = compute_module_sizes(Tied(), dtype="float16", special_dtypes=special)
    assert (sizes["scale"], sizes["steps"], sizes["scratch"], sizes[""]) == (16, 3, 10, 229)


def test_buffers_only() -> None:
    sizes = compute_module_sizes(Tied(), buffers_only=True)
    assert dict(sizes) == {"": 44, "steps": 24, "scratch": 20}


def test_meta_has_the_same_sizes_and_ties() -> None:
    with torch.device("meta"):
        model = Tied()
        model.head.weight = model.emb.weight
    assert compute_module_sizes(model) == compute_module_sizes(Tied())
    assert find_tied_parameters(model) == [["emb.weight", "head.weight"]]


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [
        (torch.float32, 32),
        (torch.bool, 8),
        (torch.int4, 4),
        (torch.uint3, 3),
        (torch.quint4x2, 4),
        ("int2", 2),
        ("nf4", 4),
        ("torch.bfloat16", 16),
        ("float8_e4m3fn", 8),
    ],
)
def test_width_of_a_dtype(dtype: str | torch.dtype, bits: int) -> None:
    assert dtype_bits(dtype) == bits


def test_a_dtype_that_is_none() -> None:
    with pytest.raises(ModelError, match="'flaot32' is not a dtype"):
        dtype_bits("flaot32")


def test_bytes_of_a_tensor_are_what_its_storage_takes() -> None:
    for dtype in (torch.float32, torch.bool, torch.uint4, torch.float8_e5m2):
        tensor = torch.empty(9, dtype=dtype, device="meta")
        assert tensor_bytes(tensor) == tensor.untyped_storage().nbytes()
    assert tensor_bytes(torch.empty(9), "int4") == 5


def test_a_tensor_made_of_tensors_is_their_sum() -> None:
    class Quantized(torch.Tensor):
        def __new__(cls, data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return torch.Tensor._make_wrapper_subclass(cls, (8, 8), dtype=torch.float32)

        def __init__(self, data: torch.Tensor, scale: torch.Tensor) -> None:
            self.data_, self.scale = data, scale

        def __tensor_flatten__(self) -> tuple[list[str], None]:
            return ["data_", "scale"], None

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            raise AssertionError(f"sizes computed with {func}")

    tensor = Quantized(torch.zeros(8, 8, dtype=torch.int8), torch.zeros(8))
    assert tensor_bytes(tensor) == 64 + 32


def test_a_lazy_module_says_what_to_do() -> None:
    with pytest.raises(ModelError, match="no shape yet: run its lazy module once"):
        compute_module_sizes(nn.LazyLinear(3))


def test_largest_layer() -> None:
    model = Tied()
    sizes = compute_module_sizes(model)
    assert get_max_layer_size(list(model.named_children()), sizes, []) == (160, ["emb"])
    assert get_max_layer_size([("layers", model.layers)], sizes, []) == (
        80,
        ["layers.0", "layers.1", "layers.2"],
    )
    assert get_max_layer_size([("", model)], sizes, ["ModuleList"]) == (240, ["layers"])
    assert calculate_maximum_sizes(model) == (452, (160, ["emb"]))


# ---------------------------------------------------------------------- ties


def test_ties_by_identity_by_storage_and_by_shared_module() -> None:
    model = nn.Module()
    model.a, model.b = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
    model.b.weight = nn.Parameter(model.a.weight.data)  # another object on one storage
    model.c = model.a
    buffer = torch.zeros(3)
    model.register_buffer("x", buffer)
    model.register_buffer("y", buffer)
    assert find_tied_parameters(model) == [
        ["x", "y"],
        ["a.weight", "b.weight", "c.weight"],
        ["a.bias", "c.bias"],
    ]


def test_parts_of_one_storage_are_not_ties() -> None:
    model = nn.Module()
    whole = torch.zeros(4, 2)
    model.q, model.k = nn.Parameter(whole[:2]), nn.Parameter(whole[2:])
    assert find_tied_parameters(model) == []
    assert compute_module_sizes(model)[""] == 32


def test_empty_tensors_are_not_ties() -> None:
    model = nn.Module()
    model.a, model.b = nn.Parameter(torch.zeros(0)), nn.Parameter(torch.zeros(0))
    assert find_tied_parameters(model) == []


def test_a_broken_tie_is_mended_with_what_holds_data() -> None:
    model = Tied()
    ties = find_tied_parameters(model)
    model.emb.weight = nn.Parameter(torch.empty(10, 4, device="meta"))
    kept = model.head.weight
    retie_parameters(model, ties)
    assert model.emb.weight is kept
    assert model.head.weight is kept
    with pytest.raises(ModelError, match="nowhere"):
        retie_parameters(model, [["emb.weight", "nowhere.weight"]])
