"""PIN: page-locked memory."""
# ruff: noqa: N802 - a check's name carries its paragraph's id

from __future__ import annotations

import gc
import itertools
import random
import time
import weakref

import torch

from anydevice_conformance.covering import covering_situations, simpler
from anydevice_conformance.data import DTYPES, same_bits, sample
from anydevice_conformance.holdings import nothing_kept
from anydevice_conformance.laws import hold, hold_each
from anydevice_conformance.marks import needs
from anydevice_conformance.moves import Move, moves
from anydevice_conformance.moving import check_pinning
from anydevice_conformance.outcomes import not_claimed
from anydevice_conformance.pinning import check_pins
from anydevice_conformance.situations import Situation, restored, run_in
from anydevice_conformance.subject import Subject
from anydevice_conformance.work import is_done, long_work, still_running

pytestmark = needs("pinned_memory")
#: Copies that may be in flight: what they read may be kept.
_IN_FLIGHT = 16


def test_PIN_001_is_pinned(subject: Subject) -> None:
    """`pin_memory` gives a pinned host tensor of the same value.

    Found: the result is not page-locked, or is another tensor.
    Fix: do not claim ``pinned_memory`` where ``Tensor.pin_memory`` returns ordinary memory.
    """
    source = sample(torch.float32, 1000, 7)
    pinned = subject.backend.pin_memory(source)
    assert pinned.device.type == "cpu", f"it is on {pinned.device}"
    assert pinned.is_pinned(), "is_pinned() is False"
    assert not source.is_pinned(), "is_pinned() is True for ordinary memory, too"
    assert pinned.data_ptr() != source.data_ptr(), "it is the same memory"
    assert same_bits(pinned, source), "values, dtype or shape changed"
    view = pinned[10:20]
    assert view.is_pinned(), "a view of pinned memory is not pinned"


def test_PIN_002_original_left_alone(subject: Subject) -> None:
    """The original does not change, nor follow.

    Found: pinning changed the original, or the two share memory.
    Fix: copy into a new page-locked block; do not lock the caller's pages.
    """
    source = torch.arange(1000.0, requires_grad=False)
    pinned = subject.backend.pin_memory(source)
    assert torch.equal(source, torch.arange(1000.0)), "pinning changed the original"
    pinned.fill_(7)
    assert torch.equal(source, torch.arange(1000.0)), "the original follows the pinned tensor"
    again = subject.backend.pin_memory(source)
    source.fill_(3)
    assert torch.equal(again, torch.arange(1000.0)), "the pinned tensor follows the original"
    twice = subject.backend.pin_memory(again)
    assert twice.is_pinned(), "pinning a pinned tensor unpins it"
    assert torch.equal(twice, torch.arange(1000.0)), "pinning a pinned tensor changed it"


def test_PIN_003_copy_returns_early(subject: Subject, index: int) -> None:
    """A non-blocking move from pinned memory does not stop the host until the copy is done.

    Found: `move` returned only when the copy was done.
    Fix: pass ``non_blocking`` on; claim ``pinned_memory`` only where the driver copies by itself.
    """
    backend = subject.backend
    size = min(subject.room(index) // 4, 256 << 20)
    subject.put(backend.pin_memory(torch.ones(size, dtype=torch.uint8)), index)
    backend.synchronize(index)
    events = subject.capabilities.streams and _tells_idle(subject, index)
    early, shares = False, []
    for _ in range(6):
        source = backend.pin_memory(torch.ones(size, dtype=torch.uint8))
        begin = time.perf_counter()
        there = subject.put(source, index, non_blocking=True)
        returned = time.perf_counter()
        if events:
            early = early or not is_done(backend.record_event(backend.current_stream(index)))
        source[-1] = 2  # what has not been copied yet is copied as it is now
        backend.synchronize(index)
        shares.append((returned - begin) / (time.perf_counter() - begin))
        last = subject.fetch(there[-1:]).item()
        assert last in (1, 2), f"the last byte is {last}"
        early = early or last == 2
        del there
    if not subject.capabilities.streams:
        early = early or min(shares) < 0.5
    assert early, f"move returned after {min(shares):.0%} of the copy's time"


def test_PIN_003_on_any_stream(subject: Subject) -> None:
    """The same holds on side streams, for every size and dtype, in any thread.

    Found: `move` returned only when the work before it on its stream was done.
    Fix: queue the copy on the current stream, also where it is large; never wait for the stream.
    """
    if not subject.capabilities.streams:
        not_claimed("without streams nothing shows what is still queued")
    dtypes = subject.supported(torch.float32, torch.uint8, torch.int64, torch.bool)
    sources = [
        subject.backend.pin_memory(sample(dtype, 7).repeat(count // 7 + 1)[:count])
        for dtype, count in zip(dtypes * 3, (5, 4099, 70_001, 600_011, 9, 1_200_007), strict=False)
    ]
    sources += [source[3:] for source in sources[:4]]  # parts of pinned memory

    def law(example: tuple[Situation, int]) -> None:
        situation, count = example
        index = situation.index

        def queue() -> list[torch.Tensor]:
            return [subject.put(s, index, non_blocking=True) for s in sources[:count]]

        def late() -> bool:
            return still_running(subject, index, subject.backend.current_stream(index), queue)

        with restored(subject):
            running = run_in(subject, situation, late)
        assert running, "non-blocking moves from pinned memory waited for the work before them"

    every = covering_situations(subject)[:: 4 if subject.quick else 1]
    hold_each(
        subject,
        [(situation, len(sources)) for situation in every],
        law,
        lambda one: ((s, one[1]) for s in simpler(subject, one[0])),
    )


def _tells_idle(subject: Subject, index: int) -> bool:
    """Whether an event on an idle stream is done at once, so that one that is not means work."""
    stream = subject.backend.current_stream(index)
    subject.backend.synchronize(index)
    event = subject.backend.record_event(stream)
    time.sleep(0.01)
    return is_done(event)


def test_PIN_004_outlives_the_copy(subject: Subject, index: int) -> None:
    """Pinned memory that is deleted while a copy from it is queued is not used again before.

    Found: the copy delivered what was written to the memory later.
    Fix: record the stream with the pinned block, and reuse the block only after its copies.
    """
    backend, work = subject.backend, long_work(subject, index)
    values = torch.full((200_000,), 1.0)
    backend.pin_memory(values)
    for _ in range(3):
        busy = work.run()
        pinned = backend.pin_memory(values)
        there = subject.put(pinned, index, non_blocking=True)
        del pinned
        gc.collect()
        others = [backend.pin_memory(values * 5) for _ in range(3)]
        found = subject.fetch(there)
        assert torch.equal(found, values), "the copy delivered another tensor's values"
        del others, busy
        backend.synchronize(index)


def test_PIN_004_on_any_stream(subject: Subject) -> None:
    """The same holds for copies on a side stream, of any size, dtype and offset, in any thread.

    Found: a block was used again while a copy from it was still queued on another stream.
    Fix: record the stream that each copy is queued on, not the default one, with the whole block.
    """
    dtypes = subject.supported(*DTYPES)
    sizes = itertools.cycle([1, 33, 4096, 65_537, 300_000, 1_200_001])
    dice = random.Random(subject.seed)

    def law(situation: Situation) -> None:
        sources = []
        for _ in range(6):
            dtype, count = dice.choice(dtypes), next(sizes)
            offset = dice.choice((0, 1, 16))
            sources.append(sample(dtype, 9, seed=count).repeat(count // 9 + 3)[offset:][:count])
        run_in(subject, situation, lambda: _reused(subject, situation.index, sources))

    every = covering_situations(subject)
    hold_each(subject, every[:: 4 if subject.quick else 1], law, lambda one: simpler(subject, one))


def _reused(subject: Subject, index: int, sources: list[torch.Tensor]) -> None:
    """Pinned memory that is let go of and asked for again, while copies from it wait."""
    backend, work = subject.backend, long_work(subject, index)
    for values in sources:
        backend.pin_memory(values)
    resting = [subject.put(values.roll(1), index) for values in sources]
    subject.synchronize_all()
    busy = work.run()
    arrived, later = [], []
    for values, other in zip(sources, resting, strict=True):
        subject.fetch(other, non_blocking=True)  # let go of: nobody else gets its memory before
        arrived.append(subject.put(backend.pin_memory(values), index, non_blocking=True))
        later += [backend.pin_memory(torch.zeros_like(values)) for _ in range(3)]
    for values, there in zip(sources, arrived, strict=True):
        found = subject.fetch(there)
        assert same_bits(found, values), (
            f"a copy of {values.numel()} {values.dtype} delivered another tensor's values"
        )
    subject.backend.synchronize(index)
    for other in later:
        assert same_bits(other, torch.zeros_like(other)), (
            f"{other.numel()} pinned {other.dtype} were written by a copy of before"
        )
    del later, busy


def test_PIN_004_no_longer(subject: Subject, index: int) -> None:
    """Pinned memory goes with its tensor, once the copies from it are done.

    Found: it is kept until the device is synchronised, or until Python collects its garbage.
    Fix: free the block once the event after its last copy has passed; hold it by no cycle.
    """
    backend = subject.backend
    count = getattr(torch._C, "_storage_Use_Count", None)
    stream = backend.current_stream(index) if subject.capabilities.streams else None
    for size in (500, 20_000):
        gc.collect()
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            alive, storages = [], []
            for _ in range(3 * _IN_FLIGHT):
                pinned = backend.pin_memory(torch.ones(size))
                subject.put(pinned, index, non_blocking=True)
                alive.append(weakref.ref(pinned))
                storages.append(pinned.untyped_storage())
                del pinned
            if stream is None:
                backend.synchronize(index)
            else:
                backend.synchronize_event(backend.record_event(stream))
            backend.pin_memory(torch.ones(size))  # who looks for free memory finds it
            kept = sum(tensor() is not None for tensor in alive)
            if count is not None:
                kept = max(kept, sum(count(s._cdata) > 1 for s in storages))
        finally:
            if was_enabled:
                gc.enable()
        assert kept <= _IN_FLIGHT, (
            f"of {len(alive)} pinned tensors of {size} float32, moved and let go of, {kept} are "
            "kept, though the copies are done"
        )


def test_PIN_005_dtypes_and_layouts(subject: Subject) -> None:
    """Every dtype in every layout, and large sources, keep values, shape and strides.

    Found: a dtype, a layout, an empty tensor or a view lost its values or shape, or two results
    share memory.
    Fix: pin ``tensor.contiguous()`` or keep the strides; allow 0 bytes; lend no memory twice.
    """
    check_pins(subject)


def test_PIN_005_every_source(subject: Subject) -> None:
    """Every tensor can be pinned, in every situation; what is pinned moves as its original.

    Found: some dtype, layout, offset or kind of tensor loses values, or pinning changes the
    original, its neighbours in memory or the caller's state.
    Fix: as of the other check of this paragraph; look at nothing but the tensor's own elements.
    """

    def law(move: Move) -> None:
        check_pinning(subject, move)

    with nothing_kept(subject, "pinning in many situations"):
        hold(subject, moves(subject, pinning=True), law, examples=120)


def test_PIN_006_results_in_order(subject: Subject, index: int) -> None:
    """A non-blocking move to the host delivers what was computed when it was queued.

    Found: the result is from before, or from after, the copy's place in the queue.
    Fix: queue the copy on the current stream, from the tensor's memory as it is then.
    """
    backend, work = subject.backend, long_work(subject, index)
    for _ in range(3):
        result = work.run() + 1
        found = subject.fetch(result, non_blocking=True)
        result.fill_(-5)
        backend.synchronize(index)
        assert torch.equal(found, work.pattern + 1), "not what was computed when it was queued"
