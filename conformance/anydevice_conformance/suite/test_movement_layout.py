"""MOV: shapes, strides, offsets and storages."""
# ruff: noqa: N802 - a check's name carries its paragraph's id

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from anydevice_conformance.data import same_bits, sample
from anydevice_conformance.layouts import is_dense
from anydevice_conformance.subject import Subject


def test_MOV_006_empty_and_scalar(subject: Subject, index: int) -> None:
    """Tensors without elements or without dimensions keep shape and dtype.

    Found: an empty or 0-dimensional tensor failed, or changed its shape.
    Fix: return an empty tensor of the same shape without asking the driver to copy 0 bytes.
    """
    for shape in ((0,), (3, 0, 2), (0, 0), ()):
        for dtype in subject.supported(torch.float32, torch.int64, torch.bool):
            source = sample(dtype, *shape)
            there = subject.put(source, index)
            assert there.shape == source.shape, f"{shape} arrived as {tuple(there.shape)}"
            assert there.dtype is dtype, f"empty {dtype} arrived as {there.dtype}"
            assert subject.is_on(there, index), f"{shape} is on {there.device}"
            back = subject.fetch(there)
            assert same_bits(back, source), f"{shape} came back as {tuple(back.shape)}"
            assert back.device.type == "cpu"


def _layouts() -> dict[str, torch.Tensor]:
    base = torch.arange(240.0)
    image = base.reshape(2, 3, 8, 5)
    return {
        "contiguous": base.reshape(6, 40),
        "transposed": base.reshape(16, 15).t(),
        "permuted": base.reshape(4, 6, 10).permute(2, 0, 1),
        "channels_last": image.contiguous(memory_format=torch.channels_last),
        "stepped": base[::3],
        "stepped columns": base.reshape(24, 10)[:, 1::2],
        "narrowed": base.reshape(24, 10)[3:9, 2:7],
        "expanded": base[:6].reshape(6, 1).expand(6, 5),
        "diagonal": base.reshape(12, 20).diagonal(),
        "overlapping": base.unfold(0, 8, 4),
    }


@pytest.mark.parametrize("layout", list(_layouts()))
def test_MOV_007_strides(subject: Subject, index: int, layout: str) -> None:
    """Views of every layout keep element [i, j] at [i, j], and dense ones keep their strides.

    Found: elements changed places, or a dense tensor lost its memory format.
    Fix: ``tensor.to(device)`` keeps both; a copy of raw storage needs size, stride and offset.
    """
    source = _layouts()[layout]
    there = subject.put(source, index)
    back = subject.fetch(there)
    assert there.shape == source.shape, f"{layout}: {source.shape} arrived as {there.shape}"
    assert torch.equal(subject.fetch(there + 0), source), f"{layout}: wrong on the device"
    assert torch.equal(back, source), f"{layout}: came back wrong"
    if is_dense(source) and subject.strided:
        assert there.stride() == source.stride(), (
            f"{layout}: strides {source.stride()} arrived as {there.stride()}"
        )
        assert back.stride() == source.stride(), (
            f"{layout}: strides {source.stride()} came back as {back.stride()}"
        )
    # The other direction by itself: a view that was made on the device.
    flat = subject.put(source.contiguous(), index)
    if source.dim() >= 2:
        turned = flat.transpose(0, 1)
        assert torch.equal(subject.fetch(turned), source.transpose(0, 1)), (
            f"{layout}: a transposed view of the device's came back wrong"
        )
        assert not subject.strided or subject.fetch(turned).stride() == turned.stride(), (
            f"{layout}: strides {turned.stride()} of the device's view were lost"
        )
    assert torch.equal(subject.fetch(flat[1::2]), source[1::2]), f"{layout}: stepped on the device"


def test_MOV_008_view_moves_alone(subject: Subject, index: int) -> None:
    """A view moves with its own elements, in memory of its own.

    Found: the storage's offset was lost, the whole storage travelled, or the result follows the
    original.
    Fix: copy ``numel()`` elements from ``data_ptr()``, not the storage from its beginning.
    """
    base = torch.arange(100_000.0)
    for view in (base[7:20], base[-13:], base.view(1000, 100)[500:503]):
        there = subject.put(view, index)
        assert torch.equal(subject.fetch(there), view), "a view with an offset arrived wrong"
        if not subject.is_host:
            kept = there.untyped_storage().nbytes()
            assert kept < base.nbytes // 2, f"a view of {view.nbytes} bytes took {kept}"
    if subject.is_host:
        return
    view = base[50:60]
    there, before = subject.put(view, index), view.clone()
    base.add_(1)
    assert torch.equal(subject.fetch(there), before), "the moved view follows the original"
    whole = subject.put(base, index)
    back = subject.fetch(whole[11:15])
    assert torch.equal(back, base[11:15]), "a view of the device's tensor came back wrong"
    assert back.untyped_storage().nbytes() < base.nbytes // 2, "a small view took all along"


def test_MOV_023_mapped_files(subject: Subject, index: int, tmp_path: Path) -> None:
    """Views of a privately mapped file move right, at any offset.

    Found: a tensor over a mapped file arrived wrong or was refused.
    Fix: treat it as any host tensor; do not insist on the allocator that made it.
    """
    values = torch.arange(50_000, dtype=torch.float32)
    file = tmp_path / "weights"
    file.write_bytes(b"header--" + values.numpy().tobytes())
    size = file.stat().st_size
    storage: Any = torch.UntypedStorage.from_file(str(file), shared=False, nbytes=size)
    mapped = torch.empty(0, dtype=torch.float32).set_(storage, 2, (50_000,), (1,))
    for view in (mapped, mapped[777:1777], mapped.view(500, 100).t()):
        for non_blocking in (False, True):
            found = subject.fetch(subject.put(view, index, non_blocking=non_blocking))
            assert torch.equal(found, view), "a view of a mapped file arrived wrong"
