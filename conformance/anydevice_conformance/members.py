"""Small questions to single members, whose right answers are known: asked in every situation."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import torch

from anydevice_conformance.data import DTYPES, same_bits
from anydevice_conformance.situations import restored
from anydevice_conformance.subject import Subject
from anydevice_conformance.watching import Watched

__all__ = ["Probe", "probes"]

_MIB: Final = 1 << 20
#: What a backend declares, once and for all.
_DECLARED: Final = (
    "device_type",
    "priority",
    "capabilities",
    "collective_backend",
    "visible_devices_env",
)


@dataclasses.dataclass(frozen=True)
class Probe:
    """A question to a member.

    Attributes:
        name: the members that it asks.
        run: asks for a device's index, and raises AssertionError for a wrong answer.
        repeat: a plain call, for many times; None where there is none.
        may_decline: whether NotImplementedError is an answer.
    """

    name: str
    run: Callable[[int], object]
    repeat: Callable[[int], object] | None = None
    may_decline: bool = False

    def __repr__(self) -> str:
        return self.name


def probes(subject: Subject) -> list[Probe]:
    """The questions that the backend's claims allow; the right answers are noted beforehand."""
    cached: list[Probe] | None = subject.__dict__.get("_probes")
    if cached is None:
        with restored(subject):
            cached = list(_made(subject))
        subject.__dict__["_probes"] = cached
    return cached


def _made(subject: Subject) -> Iterator[Probe]:
    claims = subject.capabilities
    yield _presence(subject)
    yield from _memory(subject)
    yield _errors(subject)
    yield _dtypes(subject)
    yield _waiting(subject)
    yield Probe(
        "move",
        lambda index: _assert_round_trip(subject, index),
        lambda index: subject.fetch(subject.put(torch.ones(30), index)),
    )
    if claims.streams:
        yield from _streams(subject)
    if claims.device_rng:
        yield from _random(subject)
    if claims.pinned_memory:
        yield _pinning(subject)


# ---------------------------------------------------------------------- presence and numbers


def _presence(subject: Subject) -> Probe:
    backend = Watched(subject)
    names = {index: backend.device_name(index) for index in subject.indices}
    count = len(subject.indices)
    declared = {name: getattr(backend, name) for name in _DECLARED}

    def run(index: int) -> None:
        for member, value in declared.items():
            now: Any = getattr(backend, member)
            assert now == value, f"{member} was {value!r}, and is {now!r}"
        found: Any = backend.device_count()
        assert type(found) is int, f"device_count() returned {found!r}"
        assert found == count, f"device_count() was {count}, and is {found}"
        available: Any = backend.is_available()
        assert available is True, f"is_available() is {available!r} with {count} devices"
        name: Any = backend.device_name(index)
        assert isinstance(name, str), f"device_name({index}) returned {name!r}"
        assert name == names[index], f"device_name({index}) was {names[index]!r}, and is {name!r}"

    def repeat(index: int) -> None:
        subject.backend.is_available()
        subject.backend.device_count()
        subject.backend.device_name(index)

    return Probe("is_available, device_count and device_name", run, repeat)


def _dtypes(subject: Subject) -> Probe:
    backend = Watched(subject)
    known = {dtype: backend.supports_dtype(dtype) for dtype in DTYPES}
    dtypes = itertools.cycle(DTYPES)

    def run(index: int) -> None:
        for dtype in DTYPES:
            found: Any = backend.supports_dtype(dtype)
            assert found is known[dtype], f"supports_dtype({dtype}) was {known[dtype]}, is {found}"

    return Probe("supports_dtype", run, lambda index: subject.backend.supports_dtype(next(dtypes)))


def _errors(subject: Subject) -> Probe:
    backend = Watched(subject)
    real = None if subject.is_host else _provoked(subject)

    def run(index: int) -> None:
        if real is not None:
            found: Any = backend.is_out_of_memory(real)
            assert found is True, f"is_out_of_memory is {found!r} for {real!s:.120}"
        for error in (
            RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)"),
            ValueError("no such layer"),
            IndexError("index out of range in self"),
        ):
            found = backend.is_out_of_memory(error)
            assert found is False, f"is_out_of_memory is {found!r} for {error!r}"

    def repeat(index: int) -> None:
        subject.backend.is_out_of_memory(RuntimeError("no"))
        if real is not None:
            subject.backend.is_out_of_memory(real)

    return Probe("is_out_of_memory", run, repeat)


def _provoked(subject: Subject) -> BaseException | None:
    try:
        torch.empty(1 << 50, dtype=torch.uint8, device=subject.device(subject.indices[0]))
    except Exception as error:  # noqa: BLE001 - whichever the device raises
        return error.with_traceback(None)
    return None


# ---------------------------------------------------------------------- memory


class _Memory:
    """Questions about memory, with sizes that the device was seen to tell apart."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.backend: Any = Watched(subject)
        self.totals = {i: self.read("memory_info", i, "total") for i in subject.indices}
        self.size = 0
        for size in (_MIB, 24 * _MIB):
            free = min((self.read("memory_info", i, "free") or 0) for i in subject.indices)
            if self.size or free < size * 4 or self.hosted():
                continue
            if self.moves("memory_info", "free", -size) or self.moves("memory_allocated", "", size):
                self.size = size
        self.gives_back = bool(self.size) and self.returned(subject.indices[0])

    def hosted(self) -> bool:
        """Whether the memory is the host's, where others come and go."""
        return self.subject.is_host or self.backend.capabilities.unified_memory

    def read(self, member: str, index: int, field: str = "") -> int | None:
        """A number, or None where the device does not say."""
        try:
            found = getattr(self.backend, member)(index)
        except NotImplementedError:
            return None
        return getattr(found, field, None) if field else found

    def moves(self, member: str, field: str, size: int) -> bool:
        """Whether a number follows a tensor of so many bytes: asked on the first device only.

        A backend that is wrong on another one, or wrong in the other number, must not be let off.
        """
        index = self.subject.indices[0]
        before = self.read(member, index, field)
        tensor = self.tensor(index, abs(size))
        during = self.read(member, index, field)
        del tensor
        if not isinstance(before, int) or not isinstance(during, int):
            return False
        return abs(during - before - size) <= abs(size) // 4

    def tensor(self, index: int, size: int) -> torch.Tensor:
        """So many bytes on a device."""
        return torch.ones(size, dtype=torch.uint8, device=self.subject.device(index))

    def reserved(self, index: int) -> int | None:
        """What the device's own module says that its allocator holds."""
        read = getattr(self.subject.module, "memory_reserved", None)
        try:
            return None if read is None else int(read(index))
        except Exception:  # noqa: BLE001 - it does not say
            return None

    def returned(self, index: int) -> bool:
        """Whether `empty_cache` was seen to give such a tensor's memory back."""
        if not self.backend.capabilities.caching_allocator or self.reserved(index) is None:
            return False
        tensor = self.tensor(index, self.size)
        with_it = self.reserved(index) or 0
        del tensor
        self.backend.synchronize(index)
        self.backend.empty_cache(index)
        return (self.reserved(index) or 0) <= with_it - self.size


def _memory(subject: Subject) -> Iterator[Probe]:
    memory, backend = _Memory(subject), Watched(subject)

    def info(index: int) -> None:
        before = backend.memory_info(index)
        assert type(before).__name__ == "MemoryInfo", f"memory_info returned {before!r}"
        assert before.total == memory.totals[index], (
            f"total of device {index} was {memory.totals[index]}, and is {before.total}"
        )
        if memory.size:
            _assert_follows(memory, index, "memory_info", "free", -memory.size)

    def allocated(index: int) -> None:
        found: Any = backend.memory_allocated(index)
        assert type(found) is int, f"memory_allocated({index}) returned {found!r}"
        if memory.size:
            _assert_follows(memory, index, "memory_allocated", "", memory.size)

    def peaks(index: int) -> None:
        backend.reset_peak_memory(index)
        others = {i: backend.peak_memory_allocated(i) for i in subject.indices if i != index}
        base = backend.peak_memory_allocated(index)
        assert type(base) is int, f"peak_memory_allocated({index}) returned {base!r}"
        if not memory.size:
            return
        tensor = memory.tensor(index, memory.size)
        peak = backend.peak_memory_allocated(index)
        assert peak >= base + memory.size, f"{memory.size} bytes came, the peak rose {peak - base}"
        del tensor
        assert backend.peak_memory_allocated(index) >= peak, "the peak fell when a tensor went"
        backend.reset_peak_memory(index)
        after = backend.peak_memory_allocated(index)
        assert after < peak, f"after the reset of device {index} its peak is still {after}"
        for other, one in others.items():
            found = backend.peak_memory_allocated(other)
            assert found == one, f"the peak of device {other} was {one}, and is {found}"

    def cache(index: int) -> None:
        backend.empty_cache(index)
        if not memory.gives_back:
            return
        tensor = memory.tensor(index, memory.size)
        with_it = memory.reserved(index) or 0
        del tensor
        _settle(subject, index)
        backend.empty_cache(index)
        found = memory.reserved(index) or 0
        assert found <= with_it - memory.size, (
            f"empty_cache({index}) kept {found} bytes reserved, of {with_it}"
        )

    yield Probe("memory_info", info, subject.backend.memory_info, may_decline=True)
    yield Probe("memory_allocated", allocated, subject.backend.memory_allocated, may_decline=True)

    def repeat(index: int) -> None:
        subject.backend.reset_peak_memory(index)
        subject.backend.peak_memory_allocated(index)

    yield Probe("peak_memory_allocated and reset_peak_memory", peaks, repeat, may_decline=True)
    yield Probe("empty_cache", cache, subject.backend.empty_cache)


def _settle(subject: Subject, index: int) -> None:
    """Wait by torch itself, so that a broken `synchronize` is not what shows."""
    torch.zeros(1, device=subject.device(index)).cpu()


def _assert_follows(memory: _Memory, index: int, member: str, field: str, size: int) -> None:
    indices = memory.subject.indices
    before = {i: memory.read(member, i, field) for i in indices}
    tensor = memory.tensor(index, abs(size))
    during = {i: memory.read(member, i, field) for i in indices}
    del tensor
    after = {i: memory.read(member, i, field) for i in indices}
    name = f"{member}.{field}" if field else member
    slack = abs(size) // 4
    for i in indices:
        one, two, three = before[i], during[i], after[i]
        assert type(one) is int and type(two) is int and type(three) is int, (  # noqa: PT018
            f"{name} of device {i} is {one!r}"
        )
        wanted = size if i == index else 0
        assert abs(two - one - wanted) <= slack, (
            f"{abs(size)} bytes came on device {index}, and {name} of device {i} "
            f"moved by {two - one}"
        )
        assert abs(three - one) <= slack, (
            f"{abs(size)} bytes went on device {index}, and {name} of device {i} is "
            f"{three - one} from what it was"
        )


# ---------------------------------------------------------------------- work


def _assert_round_trip(subject: Subject, index: int) -> None:
    values = torch.arange(30.0)
    there = subject.put(values, index)
    assert subject.is_on(there, index), f"asked for device {index}, is on {there.device}"
    assert torch.equal(subject.fetch(there + 1), values + 1), "a round trip changed values"


def _waiting(subject: Subject) -> Probe:
    backend, host = Watched(subject), torch.device("cpu")

    def run(index: int) -> None:
        values = torch.arange(2000.0)
        there = values.to(subject.device(index))
        streams = [_stream(subject, index)] if subject.capabilities.streams else []
        found = [(there * 3).to(host, non_blocking=True)]
        for stream in streams:
            event = backend.record_event(backend.current_stream(index))
            backend.wait_event(stream, event)
            with backend.use_stream(stream):
                found.append((there * 3).to(host, non_blocking=True))
        backend.synchronize(index)
        for number, copy in enumerate(found):
            where = "a side stream" if number else "the current stream"
            assert torch.equal(copy, values * 3), f"after synchronize the work of {where} lacks"

    return Probe("synchronize", run, subject.backend.synchronize)


def _stream(subject: Subject, index: int) -> Any:
    """A stream besides those of situations, one for each device."""
    kept: dict[int, Any] = subject.__dict__.setdefault("_probe_streams", {})
    if index not in kept:
        kept[index] = subject.backend.new_stream(index)
    return kept[index]


def _streams(subject: Subject) -> Iterator[Probe]:
    backend, host = Watched(subject), torch.device("cpu")

    def using(index: int) -> None:
        current = {i: backend.current_stream(i) for i in subject.indices}
        fresh = [backend.new_stream(index) for _ in range(4)]
        # Drivers hand out streams in turn, so that one of many may be the current one again.
        fresh = [stream for stream in fresh if stream != current[index]]
        assert len(fresh) >= 3, "new streams are the current one"
        assert all(a != b for a, b in itertools.combinations(fresh, 2)), "new streams are equal"
        one, two = fresh[:2]
        with contextlib.suppress(ZeroDivisionError), backend.use_stream(one):
            _assert_current(subject, {**current, index: one}, "inside use_stream")
            with backend.use_stream(two):
                _assert_current(subject, {**current, index: two}, "in a nested use_stream")
                with backend.use_stream(one):
                    _assert_current(subject, {**current, index: one}, "in a third use_stream")
                _assert_current(subject, {**current, index: two}, "after a third use_stream")
            _assert_current(subject, {**current, index: one}, "after a nested use_stream")
            raise ZeroDivisionError
        _assert_current(subject, current, "after use_stream")

    def apart(index: int) -> None:
        main, one, two = (subject.backend.new_stream(index) for _ in range(3))
        with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as theirs:
            before = pool.submit(subject.backend.current_stream, index).result()
            with subject.backend.use_stream(main):
                with subject.backend.use_stream(one):
                    pool.submit(theirs.enter_context, subject.backend.use_stream(two)).result()
                found = subject.backend.current_stream(index)
                assert found == main, f"another thread's use_stream changed this one's to {found}"
                inside = pool.submit(subject.backend.current_stream, index).result()
                assert inside == two, f"a thread's stream ended with another's: it is {inside}"
                pool.submit(theirs.close).result()
            after = pool.submit(subject.backend.current_stream, index).result()
            assert after == before, f"a thread's stream was {before}, and is {after}"

    def ordering(index: int) -> None:
        values = torch.arange(1500.0)
        there = values.to(subject.device(index))
        one, two = _stream(subject, index), backend.new_stream(index)
        _enter(subject, index, one)
        with backend.use_stream(one):
            result = there * 5
        event = backend.record_event(one)
        backend.wait_event(two, event)
        with backend.use_stream(two):
            found = (result + 1).to(host)
        assert torch.equal(found, values * 5 + 1), "work did not wait for the event"

    def events(index: int) -> None:
        values = torch.arange(1500.0)
        there = values.to(subject.device(index))
        one, two = _stream(subject, index), backend.new_stream(index)
        _enter(subject, index, one)
        with backend.use_stream(one):
            copy = (there * 7).to(host, non_blocking=True)
        event = backend.record_event(one)
        later = [backend.record_event(two) for _ in range(200)]  # more than a pool has
        backend.synchronize_event(event)
        assert torch.equal(copy, values * 7), "synchronize_event returned before the work was done"
        del later

    def crossing(index: int) -> None:
        other = next((i for i in subject.indices if i != index), None)
        if other is None:
            return
        values = torch.arange(1500.0)
        there = values.to(subject.device(index))
        one, two = _stream(subject, index), _stream(subject, other)
        _enter(subject, index, one)
        with backend.use_stream(one):
            result = there * 9
        backend.wait_event(two, backend.record_event(one))
        with backend.use_stream(two):
            end = backend.record_event(two)
        backend.synchronize_event(end)
        query = getattr(end, "query", None)
        assert query is None or query(), "synchronize_event returned before the event was done"
        assert torch.equal(result.to(host), values * 9), "work on a side stream is wrong"

    def repeat(index: int) -> None:
        stream = _stream(subject, index)
        with subject.backend.use_stream(stream):
            event = subject.backend.record_event(stream)
        subject.backend.wait_event(subject.backend.current_stream(index), event)
        subject.backend.synchronize_event(event)

    def failing(index: int) -> None:
        with subject.backend.use_stream(_stream(subject, index)):
            raise ZeroDivisionError

    yield Probe("new_stream, current_stream and use_stream", using, failing)
    yield Probe("use_stream in two threads", apart)
    yield Probe("record_event and wait_event", ordering, repeat)
    yield Probe("record_event and synchronize_event", events, subject.backend.new_stream)
    yield Probe("wait_event between devices", crossing)


def _enter(subject: Subject, index: int, stream: Any) -> None:
    """Order a stream after what made the values, whichever stream that was on."""
    subject.backend.wait_event(
        stream, subject.backend.record_event(subject.backend.current_stream(index))
    )


def _assert_current(subject: Subject, wanted: dict[int, Any], when: str) -> None:
    for index, stream in wanted.items():
        found = subject.backend.current_stream(index)
        assert found == stream, f"{when} the current stream of device {index} is {found}"
        own = getattr(subject.module, "current_stream", None)
        if own is not None:
            assert own(index) == stream, (
                f"{when} torch queues work of device {index} on {own(index)}"
            )


# ---------------------------------------------------------------------- numbers and pages


def _random(subject: Subject) -> Iterator[Probe]:
    backend = Watched(subject)
    seeds = (3, 2**33 + 3, 2**63 - 1)
    known = {}
    for seed in seeds:
        backend.manual_seed_all(seed)
        for index in subject.indices:
            known[seed, index] = _drawn(subject, index)

    def seeding(index: int) -> None:
        for seed in seeds:
            backend.manual_seed_all(seed)
            for i in subject.indices:
                assert torch.equal(_drawn(subject, i), known[seed, i]), (
                    f"device {i} drew other numbers after seed {seed}"
                )

    def states(index: int) -> None:
        others = [i for i in subject.indices if i != index]
        state = backend.rng_state(index)
        assert state.dtype is torch.uint8, f"rng_state is {state.dtype}"
        assert state.device.type == "cpu", f"rng_state is on {state.device}"
        before = {i: backend.rng_state(i).clone() for i in others}
        first = _drawn(subject, index)
        backend.set_rng_state(state, index)
        assert torch.equal(_drawn(subject, index), first), "after set_rng_state other numbers come"
        for i in others:
            assert torch.equal(backend.rng_state(i), before[i]), f"device {i}'s state changed, too"

    def repeat(index: int) -> None:
        subject.backend.manual_seed_all(5)
        subject.backend.set_rng_state(subject.backend.rng_state(index), index)

    yield Probe("manual_seed_all", seeding, repeat)
    yield Probe("rng_state and set_rng_state", states)


def _drawn(subject: Subject, index: int) -> torch.Tensor:
    device = subject.device(index)
    parts = [torch.rand(7, device=device), torch.randn(33, device=device)]
    return torch.cat([part.cpu() for part in parts])


def _pinning(subject: Subject) -> Probe:
    backend = Watched(subject)
    numbers = itertools.count()

    def run(index: int) -> None:
        number = next(numbers)
        bits = torch.arange(960).mul(37).add(number).to(torch.uint8)
        dtype = subject.supported(*DTYPES)[number % len(subject.supported(*DTYPES))]
        source = (bits % 2).bool() if dtype is torch.bool else bits.view(dtype)
        source = source[1:] if number % 3 == 1 else source
        if number % 3 == 2:
            source = source.view(2, -1).t() if number % 2 else source.view(1, 2, 2, 3, -1)
        kept = source.clone()
        pinned = backend.pin_memory(source)
        assert pinned.is_pinned(), "the result is not pinned"
        assert pinned.device.type == "cpu", f"the result is on {pinned.device}"
        assert same_bits(pinned, kept), f"pinning changed {source.dtype} {tuple(source.shape)}"
        assert same_bits(source, kept), "pinning changed the original"
        assert pinned.data_ptr() != source.data_ptr(), "the result is the original's memory"
        if number % 5:
            return  # one call: what two of them change may cancel out
        again = backend.pin_memory(source)
        assert again.data_ptr() != pinned.data_ptr(), "two results are one memory"

    return Probe("pin_memory", run, lambda index: subject.backend.pin_memory(torch.ones(30)))
