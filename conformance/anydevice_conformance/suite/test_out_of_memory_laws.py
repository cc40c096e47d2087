"""OOM: however memory is asked for, and wherever."""
# ruff: noqa: N802 - a check's name carries its paragraph's id

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Final

import torch

from anydevice_conformance.covering import covering_situations, simpler
from anydevice_conformance.laws import hold_each
from anydevice_conformance.measuring import looks_like_host_memory
from anydevice_conformance.members_memory import memory_of
from anydevice_conformance.situations import Situation, restored, run_in, state, surroundings
from anydevice_conformance.subject import Subject
from anydevice_conformance.threads import in_thread

#: More than any machine has, and what an address can still name.
_ABSURD: Final = 1 << 46

Example = tuple[str, Situation]


def test_OOM_004_in_every_situation(subject: Subject) -> None:
    """However too much is asked for, and wherever: it is recognised, and all else is as it was.

    Found: on some device, by some way to ask, in a thread, on a side stream or under some mode, the
    error is not recognised, numbers of memory or the caller's state changed, or work was lost.
    Fix: let the allocator's exception through; put back in a ``finally`` what was set for the call.
    """
    ways = _ways(subject)
    names = list(ways)

    def law(example: Example) -> None:
        name, situation = example
        before = _numbers(subject)
        with restored(subject):
            run_in(subject, situation, lambda: _ask(subject, ways[name], situation))
        _assert_numbers(subject, before)

    every = covering_situations(subject)
    count = 2 if subject.quick else len(names)
    examples = [(names[(n + k) % len(names)], s) for n, s in enumerate(every) for k in range(count)]
    hold_each(subject, examples, law, lambda one: ((one[0], s) for s in simpler(subject, one[1])))
    for index in subject.indices:
        _assert_forgotten(subject, lambda index=index: ways["torch.empty"](index))  # type: ignore[misc]


def _assert_forgotten(subject: Subject, lack: Callable[[], object]) -> None:
    """Whoever keeps an error keeps all that its frames hold."""
    alive = []

    def work() -> None:
        tensor = torch.ones(3)
        alive.append(weakref.ref(tensor))
        lack()

    try:
        work()
    except Exception as error:  # noqa: BLE001 - whichever the device raises
        subject.backend.is_out_of_memory(error)
    gc.collect()
    assert alive[0]() is None, (
        "OOM-004: is_out_of_memory keeps the error, and by its frames the tensors of who caught it"
    )


def _ways(subject: Subject) -> dict[str, Callable[[int], object]]:
    """Ways to ask a device for too much."""
    told = {index: subject.told(index) for index in subject.indices}
    hostly = {i: told[i] is None or looks_like_host_memory(subject, i) for i in subject.indices}
    sizes = {i: _ABSURD if hostly[i] else max(t.total * 2, 1 << 30) for i, t in told.items() if t}
    size = max(sizes.values(), default=_ABSURD)
    wide = torch.ones(1, dtype=torch.uint8).expand(size)
    found: dict[str, Callable[[int], object]] = {
        "torch.empty": lambda i: torch.empty(size, dtype=torch.uint8, device=subject.device(i)),
    }
    if subject.is_host:
        return found
    found["a move"] = lambda i: subject.put(wide, i)
    found["a non-blocking move"] = lambda i: subject.put(wide, i, non_blocking=True)
    if not subject.strided:
        return found
    there = {
        i: torch.ones(1, dtype=torch.uint8).to(subject.device(i)).expand(size)
        for i in subject.indices
    }
    found["an operation"] = lambda i: there[i].clone(memory_format=torch.contiguous_format)
    if len(subject.indices) > 1:
        other = {i: subject.indices[n - 1] for n, i in enumerate(subject.indices)}
        found["a move between devices"] = lambda i: subject.put(there[other[i]], i)
        found["a non-blocking move between devices"] = lambda i: subject.put(
            there[other[i]], i, non_blocking=True
        )
    return found


def _ask(subject: Subject, way: Callable[[int], object], situation: Situation) -> None:
    backend, index = subject.backend, situation.index
    values = torch.arange(1200.0)
    queued = values.to(subject.device(index)) * 3
    before, error = state(subject), None
    try:
        with surroundings(subject):
            way(index)
    except Exception as raised:  # noqa: BLE001 - whichever the device raises
        error = raised.with_traceback(None)
    changed = before.differences(state(subject))
    assert not changed, f"DEV-012: a lack of memory: {changed}"
    assert error is not None, "OOM-001: too much was asked for, and nothing was raised"
    assert str(error).strip(), f"OOM-001: {type(error).__name__} has no message"
    for answer in (backend.is_out_of_memory(error), in_thread(lambda: _known(subject, error))):
        assert answer is True, (
            f"OOM-002: {answer!r} for {type(error).__name__}: {error!s:.200}, of device {index}"
        )
    assert torch.equal(subject.fetch(queued), values * 3), "OOM-004: queued work was lost"
    for one in subject.indices:
        found = subject.fetch(subject.put(values, one) + 1)
        assert torch.equal(found, values + 1), f"OOM-004: after the error device {one} is wrong"


def _known(subject: Subject, error: BaseException) -> bool:
    return subject.backend.is_out_of_memory(error)


def _numbers(subject: Subject) -> dict[str, int | None]:
    memory = memory_of(subject)
    if not memory.size:
        return {}
    subject.synchronize_all()
    found = {}
    for index in subject.indices:
        for member, field in (
            ("memory_allocated", ""),
            ("peak_memory_allocated", ""),
            ("memory_info", "free"),
            ("memory_info", "total"),
        ):
            found[f"{member} {field} of device {index}"] = memory.read(member, index, field)
    return found


def _assert_numbers(subject: Subject, before: dict[str, int | None]) -> None:
    slack = memory_of(subject).size // 4
    for name, found in _numbers(subject).items():
        was = before[name]
        if was is not None and found is not None:
            assert abs(found - was) <= slack, f"OOM-004: {name} was {was}, and is {found}"
