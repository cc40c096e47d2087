"""What can be stored as plain bytes, and what is refused before anything is written."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anydevice.errors import OffloadStoreError
from anydevice.offload_store.manifest import MANIFEST_NAME, _digest
from anydevice.offload_store.store import open_store, write_store
from anydevice.offload_store.tensor_bytes import is_plain_dtype, is_shape

QUANTIZED = [torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4]


@pytest.mark.filterwarnings(
    "ignore:torch.quantize_per_tensor", "ignore:The PyTorch API of nested", "ignore:Sparse CSR"
)
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8), "a quantized"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "a nested"),
        (lambda: torch.eye(3).to_sparse_csr(), "layout torch.sparse_csr"),
        (lambda: torch.ones(3, 3).to_mkldnn(), "layout torch._mkldnn"),
        (lambda: torch.ones(3, device="meta"), "on meta"),
    ],
)
def test_what_is_more_than_bytes_is_refused_by_name(make, words, tmp_path):
    with pytest.raises(OffloadStoreError, match=rf"^bad is .*{words}"):
        write_store(tmp_path / "store", {"good": torch.ones(2), "bad": make()})
    assert not (tmp_path / "store").exists()


def test_every_quantized_dtype_is_known():
    """Torch has no word for them; a new one would end the process that reads it."""
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    assert {dtype for dtype in dtypes if not is_plain_dtype(dtype)} == set(QUANTIZED)
    assert {dtype for dtype in dtypes if str(dtype).startswith(("torch.q", "torch.quint"))} == set(
        QUANTIZED
    )


def test_shapes():
    for good in ([], [0], [3, 4], [2**60], [2**63 - 1, 0]):
        assert is_shape(good)
        assert torch.empty(good, device="meta").shape == tuple(good)
    for bad in (None, 3, "3", (3,), [-1], [2.0], [True], [None], [2**63, 0], [2**40, 2**40, 0]):
        assert not is_shape(bad)


def rewrite(path, change):
    """Change a manifest, and its digest with it."""
    data = json.loads(path.read_bytes())
    change(data)
    del data["digest"]
    path.write_text(json.dumps({**data, "digest": _digest(data)}))


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("dtype", "qint8", "dtype 'qint8'"),
        ("dtype", "nn", "dtype 'nn'"),
        ("shape", [2**40, 2**40, 0], "shape"),
        ("shape", [True, 4], "shape"),
        ("shape", [1] * 100_000 + [5], "inside"),
    ],
)
def test_a_manifest_with_an_entry_that_cannot_be(field, value, words, tmp_path):
    write_store(tmp_path, {"w": torch.ones(4)})
    path = tmp_path / MANIFEST_NAME
    rewrite(path, lambda data: data["tensors"]["w"].update({field: value}))
    with pytest.raises(OffloadStoreError, match=words) as caught:
        open_store(tmp_path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1500


VALUES = st.one_of(
    st.integers(-1, 20),
    st.sampled_from([2**62, 2**63, 2**64, 1.0, 1e999, True, None, "4", "uint8", "qint8", "nn"]),
    st.lists(st.one_of(st.integers(-1, 5), st.sampled_from([2**40, None, 1.0])), max_size=3),
)


@settings.get_profile("readers")
@given(
    st.dictionaries(
        st.sampled_from(["file", "offset", "dtype", "shape", "content", "checksum"]),
        VALUES,
        max_size=3,
    ),
    st.dictionaries(st.sampled_from(["path", "nbytes", "mtime_ns"]), VALUES, max_size=1),
)
def test_fuzz_manifests(tmp_path, entry, file):
    """Even with its digest right, a manifest is refused, or gives tensors within its file."""
    folder = tmp_path / "store"
    (folder / MANIFEST_NAME).unlink(missing_ok=True)
    write_store(folder, {"w": torch.ones(4), "v": torch.ones(3)})

    def change(data):
        data["tensors"]["w"].update(entry)
        data["files"][0].update(file)

    rewrite(folder / MANIFEST_NAME, change)
    try:
        store = open_store(folder)
        tensors = {name: store[name] for name in store}
    except OffloadStoreError as error:
        refusal = str(error)
    else:
        assert all(tensor.nbytes <= 4096 for tensor in tensors.values())
        return
    assert str(folder) in refusal
