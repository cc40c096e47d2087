"""Weights that are cast on their way to the disk."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from anydevice.checkpoint import open_checkpoint
from anydevice.checkpoint.mapped import backing_of
from anydevice.errors import OffloadStoreError
from anydevice.loading import load_checkpoint_in_model, streaming
from anydevice.offload_store import WeightSource, write_store

COUNT = 8 << 20  # elements


class Big(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.empty(COUNT // 64, 64, device="meta"))


class Largest(TorchDispatchMode):
    """The most memory, in bytes, of any tensor made in this thread; views of files do not count."""

    seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not result.is_meta and backing_of(result) is None:
            self.seen = max(self.seen, result.untyped_storage().nbytes())
        return result


@pytest.fixture
def values():
    return torch.arange(float(COUNT)).view(-1, 64)


@pytest.mark.parametrize("kind", ["safetensors", "zip"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("buffer_bytes", [1, "16MiB"])
def test_in_pieces_that_the_buffers_bound(kind, dtype, buffer_bytes, values, tmp_path, monkeypatch):
    path = tmp_path / "m"
    save_file({"w": values}, path) if kind == "safetensors" else torch.save({"w": values}, path)
    asked = []
    real = streaming.stream

    def stream(requests, **options):
        asked.append((sum(r.shape.numel() * r.dtype.itemsize for r in requests), options))
        real(requests, **options)

    monkeypatch.setattr("anydevice.loading.converting.stream", stream)
    model, checkpoint = Big(), open_checkpoint(path)
    with Largest() as largest:
        report = load_checkpoint_in_model(
            model, checkpoint, "disk", tmp_path / "off", dtype, buffer_bytes=buffer_bytes, workers=2
        )
    assert largest.seen <= 2 << 20
    assert torch.equal(model.w, values.to(dtype))
    assert (report.read_bytes, report.written_bytes) == (values.nbytes, COUNT * dtype.itemsize)
    assert max(nbytes for nbytes, _ in asked) <= 2 << 20
    assert {options["workers"] for _, options in asked} == {2}


def test_what_the_folder_has_is_neither_read_nor_written(values, tmp_path):
    save_file({"w": values}, tmp_path / "m")
    options = {"device_map": "disk", "offload_folder": tmp_path / "off", "dtype": torch.bfloat16}
    load_checkpoint_in_model(Big(), tmp_path / "m", **options)
    model = Big()
    report = load_checkpoint_in_model(model, tmp_path / "m", **options)
    assert (report.read_bytes, report.written_bytes) == (0, 0)
    assert torch.equal(model.w, values.bfloat16())


def test_a_legacy_file_is_cast_in_pieces_too(values, tmp_path):
    torch.save({"w": values}, tmp_path / "m", _use_new_zipfile_serialization=False)
    model = Big()
    with Largest() as largest:
        load_checkpoint_in_model(model, tmp_path / "m", "disk", tmp_path / "off", torch.float64)
    assert largest.seen < values.nbytes * 2
    assert torch.equal(model.w, values.double())


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([torch.ones(2)], "2 elements"),
        ([torch.ones(2), torch.ones(3)], "5 or more elements"),
        ([torch.ones(4).half()], "float16"),
    ],
)
def test_pieces_that_are_not_the_weight_announced(parts, words, tmp_path):
    source = WeightSource(torch.float32, (2, 2), lambda: iter(parts))
    with pytest.raises(OffloadStoreError, match=f"w was announced as.*{words}"):
        write_store(tmp_path / "off", {"w": source})
    assert not list((tmp_path / "off").glob("*.safetensors*"))
    good = WeightSource(torch.float32, (2, 2), lambda: iter([torch.ones(1), torch.ones(3)]))
    assert write_store(tmp_path / "off", {"w": good})["w"].tolist() == [[1, 1], [1, 1]]
