"""STR: random programs over streams, and a host that nothing stops."""
# ruff: noqa: N802 - a check's name carries its paragraph's id

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from anydevice_conformance.covering import covering_situations
from anydevice_conformance.laws import hold_each
from anydevice_conformance.marks import needs, slow
from anydevice_conformance.operator_calls import leaves, mapped
from anydevice_conformance.program_steps import programs, shorter
from anydevice_conformance.programs import run_program
from anydevice_conformance.situations import (
    Situation,
    restored,
    run_in,
    side_stream,
)
from anydevice_conformance.subject import Subject
from anydevice_conformance.usual_operators import USUAL
from anydevice_conformance.work import still_running

pytestmark = needs("streams")

#: More streams and events than a driver has at hand.
_MANY = 20


def test_STR_017_programs(subject: Subject) -> None:
    """A program of copies, kernels, events and waits gives what the promised order makes of it.

    Found: with more streams, devices, threads or events than two, a wait is lost or an event stands
    for other work than it was recorded after.
    Fix: give each event an object of its own; wait for the event that is given, on the stream that
    is given, of whichever device.
    """
    hold_each(
        subject,
        programs(subject.examples(160), subject.seed),
        lambda program: run_program(subject, program),
        shorter,
    )


@slow
def test_STR_017_operators(subject: Subject, index: int) -> None:
    """Each usual operator is queued on the current stream, after what makes its arguments.

    Found: on a side stream an operator gives another result than on the default one.
    Fix: launch each of its kernels, and free its workspace, on the current stream.
    """
    backend, host = subject.backend, torch.device("cpu")
    stream = backend.new_stream(index)
    for number, operator in enumerate(USUAL):
        dtype = next(iter(subject.supported(*operator.dtypes)), None)
        if dtype is None:
            continue
        sample = operator.sample(dtype, subject.seed + number)
        there = _mapped(lambda t: t.to(subject.device(index)), [sample.input, *sample.args])
        try:
            expected = _mapped(lambda t: t.cpu(), operator(*_mapped(torch.clone, there)))
        except Exception:  # noqa: BLE001 - the device has none, and other checks say so
            continue
        _wait_for_current(subject, index, stream)
        with backend.use_stream(stream):
            result = operator(*_mapped(torch.clone, there))
            found = _mapped(lambda t: t.to(host), result)
        for one, other in zip(_tensors(found), _tensors(expected), strict=True):
            assert one.dtype is other.dtype, f"{operator.name} of {dtype} gives {one.dtype}"
            torch.testing.assert_close(
                one,
                other,
                rtol=0.02,
                atol=0.02,
                equal_nan=True,
                msg=f"{operator.name} of {dtype} gives another result on a side stream",
            )
    backend.synchronize(index)


def _mapped(function: Callable[[torch.Tensor], Any], values: Any) -> Any:
    return mapped(lambda v: function(v) if isinstance(v, torch.Tensor) else v, values)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in leaves(values) if isinstance(value, torch.Tensor)]


def _wait_for_current(subject: Subject, index: int, stream: Any) -> None:
    event = subject.backend.record_event(subject.backend.current_stream(index))
    subject.backend.wait_event(stream, event)


@dataclasses.dataclass(frozen=True)
class _Busy:
    """A stream that is busy while something is done elsewhere."""

    actions: tuple[str, ...]
    busy_device: int
    situation: Situation

    def __repr__(self) -> str:
        where = f"device {self.busy_device} is busy on another stream"
        return f"<{', '.join(self.actions)} while {where}; {str(self.situation)[1:-1]}>"


def test_STR_018_nothing_waits_for_others(subject: Subject) -> None:
    """What is done on one stream never waits for another's work, in any situation.

    Found: a move, an event, a stream or pinned memory stopped the host until other work was done.
    Fix: wait for the stream or event in question, never for the device; make no call that the
    driver orders with everything.
    """
    actions = _actions(subject)

    def law(example: _Busy) -> None:
        busy = _busy_stream(subject, example.busy_device)
        prepared = [actions[name](example.situation.index) for name in example.actions]

        def act() -> None:
            run_in(subject, example.situation, lambda: [do() for do in prepared])

        with restored(subject):
            running = still_running(subject, example.busy_device, busy, act)
        if not running and len(example.actions) > 1:  # which one? And together they take long
            for name in example.actions:
                law(dataclasses.replace(example, actions=(name,)))
            return
        assert running, f"{example.actions[0]} waited for work that it does not depend on"

    found = covering_situations(subject)
    found = found[:: 2 if subject.quick else 1]
    others = [found[n - 1].index if n % 3 == 2 else one.index for n, one in enumerate(found)]
    examples = [_Busy(tuple(actions), *one) for one in zip(others, found, strict=True)]
    hold_each(subject, examples, law, lambda example: ())


def _busy_stream(subject: Subject, index: int) -> Any:
    return _kept_stream(subject, "_busy_streams", index)


def _kept_stream(subject: Subject, name: str, index: int) -> Any:
    """A stream that is made once and is none of those that situations have."""
    kept: dict[int, Any] = subject.__dict__.setdefault(name, {})
    others = [streams.get(index) for streams in _all_kept(subject)]
    while index not in kept:
        stream = subject.backend.new_stream(index)
        # Drivers hand out streams in turn: not one that a situation has.
        usual = (side_stream(subject, index), subject.backend.current_stream(index))
        if stream not in (*usual, *others):
            kept[index] = stream
    return kept[index]


def _all_kept(subject: Subject) -> list[dict[int, Any]]:
    return [subject.__dict__.get(name, {}) for name in ("_busy_streams", "_waiting_streams")]


def _actions(subject: Subject) -> dict[str, Callable[[int], Callable[[], object]]]:
    """Name to a function of the index, which prepares the action."""
    backend, host = subject.backend, torch.device("cpu")
    values, large = torch.arange(500.0), torch.arange(1_100_001.0)

    def resting(index: int, values: torch.Tensor = values) -> torch.Tensor:
        there = values.to(subject.device(index))
        there.cpu()
        return there

    def fetch(index: int) -> Callable[[], object]:
        there = resting(index)
        return lambda: backend.move(there, host)

    def cross(index: int) -> Callable[[], object]:
        there = resting(index)
        other = subject.indices[(subject.indices.index(index) + 1) % len(subject.indices)]
        return lambda: subject.put(there, other, non_blocking=True)

    def put(index: int) -> Callable[[], object]:
        source = backend.pin_memory(values) if subject.capabilities.pinned_memory else values
        return lambda: subject.put(source, index, non_blocking=True)

    def fetch_large(index: int) -> Callable[[], object]:
        there = resting(index, large)
        return lambda: backend.move(there, host)

    def strided(index: int) -> Callable[[], object]:
        tall, wide = torch.arange(600.0).reshape(20, 30), torch.arange(31.0)
        views = [tall.t(), tall[::2], tall[:, 3:7], wide[:1].expand(9), wide[1:], tall.half().t()]
        there = [resting(index, tall)[:, 3:7], resting(index, tall).t(), resting(index)[1:]]

        def act() -> None:
            for late in (False, True):
                for view in views:
                    subject.put(view, index, non_blocking=late)
            for view in there:
                backend.move(view, host)

        return act

    def events(index: int) -> Callable[[], object]:
        one, two = side_stream(subject, index), backend.new_stream(index)

        def act() -> None:
            event = backend.record_event(one)
            backend.wait_event(two, event)
            backend.synchronize_event(event)

        return act

    def waits(index: int) -> Callable[[], object]:
        busy = [_busy_stream(subject, one) for one in subject.indices]
        waiting = [_kept_stream(subject, "_waiting_streams", one) for one in subject.indices]

        def act() -> None:  # the streams wait for busy ones, of each device; the host does not
            for stream in busy:
                event = backend.record_event(stream)
                for other in waiting:
                    backend.wait_event(other, event)

        return act

    def streams(index: int) -> Callable[[], object]:
        stream = side_stream(subject, index)

        def act() -> None:
            for _ in range(_MANY):
                backend.new_stream(index)
                backend.record_event(stream)
            backend.current_stream(index)
            with backend.use_stream(stream):
                pass

        return act

    found: dict[str, Callable[[int], Callable[[], object]]] = {
        "a move to the host": fetch,
        "a non-blocking move to the device": put,
        "a large move to the host": fetch_large,
        "a large move to the device": lambda index: lambda: subject.put(large, index),
        "a blocking move to the device": lambda index: lambda: subject.put(values, index),
        "moves of parts and transposed views": strided,
        "an event on an idle stream": events,
        "an event of a busy stream, and a wait for it": waits,
        "many new streams and events": streams,
    }
    if len(subject.indices) > 1:
        found["a non-blocking move between devices"] = cross
    if subject.capabilities.pinned_memory:
        found["pinning"] = lambda index: lambda: backend.pin_memory(values)
        found["pinning much"] = lambda index: lambda: backend.pin_memory(large)
    return found
