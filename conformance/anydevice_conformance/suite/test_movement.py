"""MOV: tensors to the device and back."""
# ruff: noqa: N802 - a check's name carries its paragraph's id

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from anydevice import registry
from anydevice.devices import parse_device
from anydevice.modules import set_module_tensor_to_device
from anydevice.tensors import send_to_device
from anydevice_conformance.data import DTYPES, all_bits, same_bits, sample, specials
from anydevice_conformance.marks import slow, two_devices
from anydevice_conformance.outcomes import left_out, not_claimed
from anydevice_conformance.subject import Subject
from anydevice_conformance.threads import at_once
from anydevice_conformance.work import long_work

_BY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
_REAL_AND_SMALL = [d for d in DTYPES if d.is_floating_point]
_INTEGERS = [d for d in DTYPES if not (d.is_floating_point or d.is_complex or d is torch.bool)]


@_BY_DTYPE
def test_MOV_001_values_and_dtype(subject: Subject, index: int, dtype: torch.dtype) -> None:
    """A tensor of each dtype arrives with its dtype and shape, and comes back equal.

    Found: a dtype was cast on the way, or values changed.
    Fix: move bytes, without a cast; where the device lacks the dtype, `supports_dtype` says False.
    """
    _assert_supported(subject, dtype)
    source = all_bits(dtype, 3, 5, 7)
    there = subject.put(source, index)
    assert there.dtype is dtype, f"{dtype} arrived as {there.dtype}"
    assert there.shape == source.shape, f"shape {source.shape} arrived as {there.shape}"
    back = subject.fetch(there)
    assert back.dtype is dtype, f"{dtype} came back as {back.dtype}"
    assert same_bits(back, source), f"values changed: {_difference(back, source)}"


@pytest.mark.parametrize("dtype", _REAL_AND_SMALL, ids=lambda d: str(d).removeprefix("torch."))
def test_MOV_002_special_values(subject: Subject, index: int, dtype: torch.dtype) -> None:
    """Zeros of both signs, infinities, denormals and NaN payloads come back bit for bit.

    Found: bits changed: a negative zero lost its sign, a NaN its payload, a denormal was flushed.
    Fix: copy bytes; do not let the values pass through arithmetic or another dtype.
    """
    _assert_supported(subject, dtype)
    source = specials(dtype)
    for tensor in (source, source.repeat(50)[1:]):
        back = subject.fetch(subject.put(tensor, index))
        assert same_bits(back, tensor), f"bits changed: {_bit_difference(back, tensor)}"


@pytest.mark.parametrize("dtype", _INTEGERS, ids=lambda d: str(d).removeprefix("torch."))
def test_MOV_003_integer_extremes(subject: Subject, index: int, dtype: torch.dtype) -> None:
    """The least and greatest integers come back, and are right on the device.

    Found: values were truncated or rounded, for example int64 to int32.
    Fix: keep the width; where the device has no such integer, `supports_dtype` says False.
    """
    _assert_supported(subject, dtype)
    width = torch.iinfo(dtype)
    values = [width.min, width.min + 1, 0, 1, width.max - 1, width.max]
    values += [v for v in (2**24 + 1, 2**31, 2**32 + 5, 2**53 + 1, -(2**31) - 1) if _fits(v, width)]
    source = torch.tensor(values, dtype=dtype)
    there = subject.put(source, index)
    back = subject.fetch(there)
    assert back.tolist() == values, f"{values} came back as {back.tolist()}"
    shifted = subject.fetch(there // 2 if dtype is not torch.uint8 else there - 0)
    expected = source // 2 if dtype is not torch.uint8 else source
    assert shifted.tolist() == expected.tolist(), (
        f"on the device {values} are not what they are: half of them is {shifted.tolist()}"
    )


def test_MOV_004_lands_where_asked(subject: Subject) -> None:
    """The result is on the device, type and index, that was asked for, and back on the host.

    Found: the index was ignored, or the result is elsewhere.
    Fix: pass the whole `torch.device` on: ``tensor.to(device)``.
    """
    for index in subject.indices:
        for non_blocking in (False, True):
            there = subject.put(torch.ones(3), index, non_blocking=non_blocking)
            assert subject.is_on(there, index), f"asked for index {index}, is on {there.device}"
            back = subject.fetch(there)
            assert back.device.type == "cpu", f"asked for the host, is on {back.device}"


def test_MOV_005_device_computes_with_it(subject: Subject, index: int) -> None:
    """Operations on a moved tensor give what they give on the host.

    Found: the device computes with other values than were moved.
    Fix: see that the copy has the device's layout, and is done before kernels read it.
    """
    x, y = torch.arange(60.0).reshape(6, 10), torch.arange(6.0)
    there, other = subject.put(x, index), subject.put(y, index)
    pairs = {
        "x + x": (there + there, x + x),
        "x.t() + y": (there.t() + other, x.t() + y),
        "x.sum()": (there.sum(), x.sum()),
        "y @ x": (other @ there, y @ x),
        "x[2:4]": (there[2:4], x[2:4]),
    }
    for name, (found, expected) in pairs.items():
        assert subject.is_on(found, index), f"{name} is on {found.device}"
        assert torch.equal(subject.fetch(found), expected), f"{name} is wrong on the device"


def test_MOV_006_empty_and_scalar(subject: Subject, index: int) -> None:
    """Tensors without elements or without dimensions keep shape and dtype.

    Found: an empty or 0-dimensional tensor failed, or changed its shape.
    Fix: return an empty tensor of the same shape without asking the driver to copy 0 bytes.
    """
    for shape in ((0,), (3, 0, 2), (0, 0), ()):
        for dtype in (torch.float32, torch.int64, torch.bool):
            if not subject.backend.supports_dtype(dtype):
                continue
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
    if _is_dense(source):
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
        assert subject.fetch(turned).stride() == turned.stride(), (
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


def test_MOV_009_source_is_left(subject: Subject, index: int) -> None:
    """The source keeps its device, values, dtype, strides and `requires_grad`.

    Found: moving changed the tensor that was moved.
    Fix: return a new tensor; never assign to ``tensor.data`` or use in-place operations.
    """
    for source in (torch.arange(12.0).reshape(3, 4).t(), nn.Parameter(torch.arange(6.0))):
        values, strides, grad = source.detach().clone(), source.stride(), source.requires_grad
        version, address = source._version, source.data_ptr()
        for non_blocking in (False, True):
            there = subject.put(source, index, non_blocking=non_blocking)
            subject.backend.synchronize(index)
            assert source.device.type == "cpu", f"the source is now on {source.device}"
            assert torch.equal(source, values), "the source's values changed"
            assert source.stride() == strides, "the source's strides changed"
            assert source.requires_grad == grad, "the source's requires_grad changed"
            assert (source._version, source.data_ptr()) == (version, address), "it was written to"
            kept = subject.fetch(there.detach().clone())
            subject.fetch(there)
            assert subject.is_on(there, index), "moving back took the device's tensor along"
            assert torch.equal(subject.fetch(there), kept), (
                "moving back changed the device's tensor"
            )


def test_MOV_010_already_there(subject: Subject, index: int) -> None:
    """A tensor that is there already is returned itself.

    Found: a copy was made of what needs none.
    Fix: ``if tensor.device == device: return tensor``.
    """
    there = subject.put(torch.ones(3), index)
    assert subject.put(there, index) is there, "moved to where it is, another tensor came"
    assert subject.put(there, index, non_blocking=True) is there
    host = torch.ones(3)
    assert subject.fetch(host) is host, "moved from the host to the host, another tensor came"


def test_MOV_011_gradients(subject: Subject, index: int) -> None:
    """`requires_grad` is kept, and backward through a move reaches the source.

    Found: the result forgot `requires_grad`, or no gradient came back.
    Fix: use a differentiable copy (``tensor.to``), without ``detach``, ``.data`` or ``no_grad``.
    """
    for non_blocking in (False, True):
        source = torch.arange(4.0, requires_grad=True)
        there = subject.put(source, index, non_blocking=non_blocking)
        assert there.requires_grad, "requires_grad was lost on the way to the device"
        torch.autograd.backward((there * there).sum())
        assert source.grad is not None, "no gradient came back from the device"
        assert torch.equal(source.grad, 2 * source.detach()), f"wrong gradient {source.grad}"

        leaf = subject.put(torch.arange(4.0), index).detach().requires_grad_()
        back = subject.fetch(leaf, non_blocking=non_blocking)
        subject.backend.synchronize(index)
        assert back.requires_grad, "requires_grad was lost on the way to the host"
        torch.autograd.backward((back * 3).sum())
        assert leaf.grad is not None, "no gradient reached the device"
        assert subject.is_on(leaf.grad, index), f"the gradient is on {leaf.grad.device}"
        assert subject.fetch(leaf.grad).tolist() == [3.0] * 4

        plain = subject.put(torch.arange(4.0), index, non_blocking=non_blocking)
        assert not plain.requires_grad, "a tensor without requires_grad got it"
        assert not subject.fetch(plain).requires_grad


def test_MOV_012_ties(subject: Subject, index: int) -> None:
    """A tied weight is right under both names; two views of one storage keep their own values.

    Found: the tie broke, or one view got the other's values.
    Fix: give each call its own result; key no cache by a storage's address.
    """
    model = nn.ModuleDict({"embed": nn.Embedding(11, 4), "head": nn.Linear(4, 11, bias=False)})
    model["head"].weight = model["embed"].weight
    ids = torch.tensor([[1, 5, 10]])
    expected = model["head"](model["embed"](ids)).detach()
    device = subject.device(index)
    set_module_tensor_to_device(model, "embed.weight", device)
    weight = model.get_parameter("head.weight")
    assert weight is model.get_parameter("embed.weight"), "the tie broke"
    assert subject.is_on(weight, index), f"it is on {weight.device}"
    found = subject.fetch(model["head"](model["embed"](subject.put(ids, index)))).detach()
    assert torch.allclose(found, expected, atol=1e-3, rtol=1e-3), "the tied model computes wrong"

    storage = torch.arange(20.0)
    first, second = storage[:10], storage[10:]
    one, other = subject.put(first, index), subject.put(second, index)
    again = subject.put(storage[:10].view(2, 5), index)
    assert torch.equal(subject.fetch(one), first), "the first view of a storage is wrong"
    assert torch.equal(subject.fetch(other), second), "the second view got other values"
    assert torch.equal(subject.fetch(again), first.view(2, 5)), "a view of other shape is wrong"


def test_MOV_013_new_values(subject: Subject, index: int) -> None:
    """A second move sees what was changed since the first, and what took its place in memory.

    Found: a move gave old values.
    Fix: copy at each call; remember no earlier result.
    """
    source = torch.zeros(1000)
    for value in range(1, 6):
        source.fill_(value)
        found = subject.fetch(subject.put(source, index))
        assert set(found.tolist()) == {value}, f"source holds {value}, moved {found[0].item()}"
    there = subject.put(source, index)
    for value in range(1, 6):
        there.fill_(value)
        found = subject.fetch(there)
        assert set(found.tolist()) == {value}, f"device holds {value}, got {found[0].item()}"
    for value in range(20):  # the allocator gives the same address again
        found = subject.fetch(subject.put(torch.full((1000,), float(value)), index))
        assert set(found.tolist()) == {value}, f"a new tensor of {value} moved as {found[0]}"


def test_MOV_014_non_blocking_is_ordered(subject: Subject, index: int) -> None:
    """Work queued after a non-blocking move sees the moved values.

    Found: the device computed with what was there before the copy.
    Fix: queue the copy on the current stream, or have the current stream wait for it.
    """
    sources = {"pageable": torch.arange(500_000.0)}
    if subject.capabilities.pinned_memory:
        sources["pinned"] = subject.backend.pin_memory(sources["pageable"])
    for name, source in sources.items():
        for attempt in range(3):
            there = subject.put(source, index, non_blocking=True)
            doubled = there * 2
            found = subject.fetch(doubled)
            assert torch.equal(found, source * 2), f"{name} source, attempt {attempt}: stale values"
            del there, doubled  # the next attempt gets this memory, with these values in it
            gc.collect()
            source = source + 1 if name == "pageable" else source


def test_MOV_015_to_the_host_waits(subject: Subject, index: int) -> None:
    """A blocking move to the host returns finished results of the work queued before.

    Found: the host read before the device was done.
    Fix: without ``non_blocking``, wait for the current stream before returning.
    """
    work = long_work(subject, index)
    for _ in range(3):
        found = subject.fetch(work.run() + 1)
        assert torch.equal(found, work.pattern + 1), "the result was not there when move returned"


def test_MOV_016_synchronize_waits(subject: Subject, index: int) -> None:
    """After `synchronize` the result of a non-blocking move to the host is there.

    Found: `synchronize(index)` returned before the queued work was done.
    Fix: wait for all streams of that device; the index matters.
    """
    work = long_work(subject, index)
    for _ in range(3):
        found = subject.fetch(work.run() + 1, non_blocking=True)
        subject.backend.synchronize(index)
        assert torch.equal(found, work.pattern + 1), "synchronize returned before the copy was done"


@two_devices
def test_MOV_017_between_devices(subject: Subject) -> None:
    """A move between two devices is exact, after earlier work and before later work.

    Found: values changed, arrived too late, or stayed on the first device.
    Fix: order the copy on both devices' current streams, or go over the host and wait.
    """
    one, other = subject.pair()
    for here, there in ((one, other), (other, one)):
        for dtype in (torch.float32, torch.int64, torch.bfloat16):
            if subject.backend.supports_dtype(dtype):
                source = sample(dtype, 33, 9).t()
                moved = subject.put(subject.put(source, here), there)
                assert subject.is_on(moved, there), f"asked for {there}, is on {moved.device}"
                assert moved.dtype is dtype, f"{dtype} became {moved.dtype}"
                assert same_bits(subject.fetch(moved), source), f"{dtype} changed between devices"
        work = long_work(subject, here)
        for non_blocking in (False, True):
            moved = subject.put(work.run(), there, non_blocking=non_blocking)
            found = subject.fetch(moved + 1)
            assert torch.equal(found, work.pattern + 1), (
                f"from {here} to {there}, non_blocking={non_blocking}: not ordered"
            )


@two_devices
def test_MOV_017_gradients_between_devices(subject: Subject) -> None:
    """Backward through a move between two devices reaches the source.

    Found: no gradient, or a wrong one.
    Fix: use a differentiable copy (``tensor.to``). Torch needs the device's events for this; a
    device that claims no streams, and raises, is let off.
    """
    one, other = subject.pair()
    for here, there in ((one, other), (other, one)):
        leaf = subject.put(torch.ones(3), here).detach().requires_grad_()
        try:
            torch.autograd.backward((subject.put(leaf, there) * 2).sum())
        except RuntimeError as error:
            if subject.capabilities.streams or not subject.put(leaf, there).requires_grad:
                raise
            not_claimed(f"without streams no gradient crosses devices: {error}")
        assert leaf.grad is not None, "no gradient came back between devices"
        assert subject.fetch(leaf.grad).tolist() == [2.0] * 3


def test_MOV_018_index_spellings(subject: Subject) -> None:
    """Every spelling of a device names the same one.

    Found: a spelling led elsewhere, or was refused.
    Fix: `move` gets a `torch.device`; treat one without an index as index 0.
    """
    kind, data = subject.type, torch.ones(2)
    for index in subject.indices:
        spellings: list[object] = [subject.device(index), str(subject.device(index))]
        if not subject.is_host:
            spellings += [parse_device(f"{kind}:{index}")]
        if registry.primary_type() == kind:
            spellings += [index, str(index)]
        if index == 0:
            spellings += [kind, torch.device(kind)]
        for spelling in spellings:
            moved = send_to_device(data, spelling)  # type: ignore[arg-type]
            assert subject.is_on(moved, index), f"{spelling!r} led to {moved.device}"
            direct = subject.backend.move(data, parse_device(spelling).torch)  # type: ignore[arg-type]
            assert subject.is_on(direct, index), f"{spelling!r} led move to {direct.device}"
    bare = subject.backend.move(data, torch.device(kind))
    assert subject.is_on(bare, 0), f"a device without an index led move to {bare.device}"


def test_MOV_019_threads(subject: Subject) -> None:
    """Threads that move at once, in both directions and on all devices, get their own values.

    Found: threads disturb each other.
    Fix: keep no state between calls (a shared staging buffer, the current device), or lock it.
    """

    def work(number: int) -> None:
        index = subject.indices[number % len(subject.indices)]
        for turn in range(40):
            source = torch.full((200 + 37 * number,), float(100 * number + turn))
            there = subject.put(source, index, non_blocking=bool(turn % 2))
            assert subject.is_on(there, index), f"thread {number}: is on {there.device}"
            found = subject.fetch(there + 1)
            assert torch.equal(found, source + 1), f"thread {number}: got another's values"

    at_once(work, 8, subject.backend)


@slow
@pytest.mark.parametrize("direction", ["to the device", "to the host"])
def test_MOV_020_above_4_gib(subject: Subject, direction: str) -> None:
    """A tensor of more than 2^32 bytes moves whole.

    Found: bytes beyond 4 GiB (or 2 GiB) were lost.
    Fix: count bytes in 64 bits, or copy in pieces.
    """
    if subject.is_host:
        left_out("the device is the host: nothing is moved")
    size, marks = (1 << 32) + 4096, (5, (1 << 31) + 5, (1 << 32) - 5, (1 << 32) + 5, -1)
    index = max(subject.indices, key=lambda i: subject.memory(i).free)
    room = subject.memory(index).free
    spare = psutil.virtual_memory().available
    if room < size * 1.05:
        left_out(f"needs {size >> 20} MiB free on the device; there are {room >> 20}")
    if spare < size * 2.5:
        left_out(
            f"needs {int(size * 2.5) >> 20} MiB available on the host; there are {spare >> 20}"
        )
    if direction == "to the device":
        source = torch.zeros(size, dtype=torch.uint8)  # pages of zeros cost no memory
        for number, place in enumerate(marks, start=1):
            source[place] = number
        there = subject.put(source, index)
        found = [int(subject.fetch(there[place].clone()).item()) for place in marks]
    else:
        there = torch.zeros(size, dtype=torch.uint8, device=subject.device(index))
        for number, place in enumerate(marks, start=1):
            there[place] = number
        back = subject.fetch(there)
        found = [int(back[place].item()) for place in marks]
    assert found == list(range(1, len(marks) + 1)), f"bytes at {marks} are {found}"


def test_MOV_021_odd_sizes(subject: Subject, index: int) -> None:
    """Lengths and offsets that are multiples of nothing move whole.

    Found: the last elements, or those of an unaligned view, are wrong.
    Fix: copy the remainder that vector kernels leave; check alignment before wide copies.
    """
    for dtype in (torch.uint8, torch.float16, torch.float32):
        if not subject.backend.supports_dtype(dtype):
            continue
        base = sample(dtype, 70_000)
        whole = subject.put(base, index)
        for length in (1, 3, 7, 31, 33, 127, 129, 1000, 4097, 65_537):
            for offset in (0, 1, 3):
                view = base[offset : offset + length]
                back = subject.fetch(subject.put(view, index))
                assert same_bits(back, view), f"{length} of {dtype} from {offset} changed"
                piece = subject.fetch(whole[offset : offset + length])
                assert same_bits(piece, view), f"{length} of {dtype} from {offset}: back changed"


def test_MOV_022_pending_signs(subject: Subject, index: int) -> None:
    """Lazily conjugated and negated tensors move as the values they stand for.

    Found: the pending conjugation or negation was lost or done twice.
    Fix: resolve it before copying bytes (``tensor.resolve_conj().resolve_neg()``).
    """
    _assert_supported(subject, torch.complex64)
    source = sample(torch.complex64, 4, 3)
    conjugate, negative = source.conj(), source.conj().imag
    assert conjugate.is_conj()
    assert negative.is_neg()
    for tensor in (conjugate, negative):
        expected = tensor.resolve_conj().resolve_neg()
        back = subject.fetch(subject.put(tensor, index)).resolve_conj().resolve_neg()
        assert torch.equal(back, expected), "a pending sign was lost on the way"


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


def test_MOV_024_parameters_and_inference(subject: Subject, index: int) -> None:
    """Parameters and inference tensors move, with gradients on and off.

    Found: a Parameter, or a tensor made in inference mode, failed or changed.
    Fix: use operations that torch allows in inference mode (``to``, ``copy_``), not ``.data``.
    """
    values = torch.arange(6.0)
    parameter = nn.Parameter(values.clone())
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            made_here = values * 1
            for source in (parameter, made_here):
                there = subject.put(source, index)
                assert isinstance(there, torch.Tensor), f"{mode.__name__}: got {type(there)}"
                found = subject.fetch(there * 2)
                assert torch.equal(found, values * 2), f"{mode.__name__}: wrong values"
    assert parameter.device.type == "cpu", "the Parameter itself was moved"
    frozen = nn.Parameter(values.to(torch.int32), requires_grad=False)
    if subject.backend.supports_dtype(torch.int32):
        assert torch.equal(subject.fetch(subject.put(frozen, index)), frozen.data)


def _assert_supported(subject: Subject, dtype: torch.dtype) -> None:
    if not subject.backend.supports_dtype(dtype):
        not_claimed(f"{dtype} is not claimed")


def _fits(value: int, width: torch.iinfo) -> bool:
    return width.min <= value <= width.max


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory once, in whatever order of dimensions."""
    pairs = sorted(
        (stride, size)
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        if size > 1
    )
    expected = 1
    for stride, size in pairs:
        if stride != expected:
            return False
        expected *= size
    return True


def _difference(found: torch.Tensor, expected: torch.Tensor) -> str:
    places = (found != expected).nonzero()[:3].tolist()
    return ", ".join(f"at {p}: {found[tuple(p)]} for {expected[tuple(p)]}" for p in places)


def _bit_difference(found: torch.Tensor, expected: torch.Tensor) -> str:
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    one = found.contiguous().view(integer[found.dtype.itemsize])
    other = expected.contiguous().view(integer[expected.dtype.itemsize])
    places = (one != other).nonzero().flatten()[:3].tolist()
    return ", ".join(f"at {p}: {one[p].item():#x} for {other[p].item():#x}" for p in places)
