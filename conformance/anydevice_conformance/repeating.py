"""Calls to do many times, and then to look at what they have left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from anydevice_conformance.data import DTYPES, short_name
from anydevice_conformance.layouts import LAYOUTS
from anydevice_conformance.moves import KINDS, Move, dtypes_of, make_source
from anydevice_conformance.situations import Situation
from anydevice_conformance.subject import Subject
from anydevice_conformance.work import long_work

__all__ = ["assert_ordered", "calls_with_each_source", "kinds_of_moves"]

#: A shape that each layout has.
_SHAPES: Final = {"channels-last": (2, 3, 4, 5), "permuted": (2, 3, 4), "overlapping": (6, 8)}


def kinds_of_moves(subject: Subject) -> dict[str, Callable[[int], object]]:
    """Moves of many kinds, also ones that fail: for many times."""
    backend = subject.backend
    plain = torch.arange(64.0)
    turned = plain.view(8, 8).t()
    wide = torch.ones(1, dtype=torch.uint8).expand(1 << 46)
    there = {index: plain.to(subject.device(index)) for index in subject.indices}
    leaf = torch.nn.Parameter(plain.clone())

    def waited(index: int, moved: torch.Tensor) -> None:
        del moved
        backend.synchronize(index)

    found: dict[str, Callable[[int], object]] = {
        "a non-blocking move to the device": lambda i: waited(
            i, subject.put(plain, i, non_blocking=True)
        ),
        "a move of a transposed tensor": lambda i: subject.put(turned, i),
        "a move of a Parameter": lambda i: subject.put(leaf, i),
        "a move to the host": lambda i: subject.fetch(there[i]),
        "a non-blocking move to the host": lambda i: waited(
            i, subject.fetch(there[i], non_blocking=True)
        ),
        "a move of what is there": lambda i: subject.put(there[i], i),
    }
    if not subject.is_host:
        found["a move that has no room"] = lambda i: subject.put(wide, i)
    if subject.capabilities.pinned_memory:
        pinned = backend.pin_memory(plain)
        found["a non-blocking move from pinned memory"] = lambda i: waited(
            i, subject.put(pinned, i, non_blocking=True)
        )
        found["pinning a transposed tensor"] = lambda i: backend.pin_memory(turned)
        found["pinning what no host has room for"] = lambda i: backend.pin_memory(wide)
        found["pinning a tensor of the device"] = lambda i: backend.pin_memory(there[i])
    if len(subject.indices) > 1:
        others = {i: subject.indices[n - 1] for n, i in enumerate(subject.indices)}
        found["a move between devices"] = lambda i: subject.put(there[i], others[i])
        found["a non-blocking move between devices"] = lambda i: waited(
            i, subject.put(there[i].view(8, 8).t(), others[i], non_blocking=True)
        )
    if subject.infers:
        found["a move in inference mode"] = torch.inference_mode()(lambda i: subject.put(plain, i))
    return found


def assert_ordered(subject: Subject, index: int) -> None:
    """Copies and events keep their order after hundreds of them.

    Raises:
        AssertionError: a result was read before it was there.
    """
    backend, work = subject.backend, long_work(subject, index)
    small = torch.arange(20.0)
    there, side = subject.put(small, index), backend.new_stream(index)
    other = subject.indices[subject.indices.index(index) - 1]
    for _ in range(350):
        subject.fetch(there, non_blocking=True)
        subject.put(small, index, non_blocking=True)
        subject.put(there, other, non_blocking=True)
        backend.wait_event(side, backend.record_event(backend.current_stream(index)))
    subject.synchronize_all()
    for stream, next_ in (
        (backend.current_stream(index), side),
        (side, backend.current_stream(index)),
    ):
        with backend.use_stream(stream):
            result = work.run()
            copy = subject.fetch(result, non_blocking=True)
            crossed = subject.put(result, other, non_blocking=True)
        event = backend.record_event(stream)
        backend.wait_event(next_, event)
        with backend.use_stream(next_):
            after = result + 1
        backend.synchronize_event(event)
        assert torch.equal(copy, work.pattern), "after hundreds of moves a copy is not ordered"
        assert torch.equal(subject.fetch(crossed), work.pattern), "nor is one between devices"
        with backend.use_stream(next_):
            found = subject.fetch(after)
        assert torch.equal(found, work.pattern + 1), (
            "after hundreds of events one is not waited for"
        )


def calls_with_each_source(subject: Subject) -> dict[str, Callable[[int], object]]:
    """For each kind of source all moves of it, and pinning it: what one kind leaves shows."""
    return {f"moving {what}": _moving(subject, move) for what, move in _sources(subject)}


def _sources(subject: Subject) -> Iterator[tuple[str, Move]]:
    def source(dtype: torch.dtype, shape: tuple[int, ...], **other: Any) -> Move:
        values: dict[str, Any] = {"layout": "contiguous", "offset": 0, "kind": "plain", **other}
        return Move(
            dtype,
            shape,
            source=None,
            target=None,
            non_blocking=False,
            pinned=False,
            situation=Situation(),
            seed=1,
            **values,
        )

    for layout in LAYOUTS:
        yield (
            f"a {layout} tensor",
            source(torch.float32, _SHAPES.get(layout, (6, 8)), layout=layout),
        )
    yield "five dimensions", source(torch.float32, (2, 3, 2, 4, 5), layout="channels-last")
    yield "six dimensions", source(torch.float32, (1, 2, 1, 3, 1, 2))
    yield "one element", source(torch.float32, (1,))
    yield "an odd number of elements, offset", source(torch.float32, (77,), offset=3)
    yield "4096 elements", source(torch.float32, (4096,))
    yield "a mebibyte", source(torch.uint8, ((1 << 20) + 1,))
    for dtype in subject.supported(*DTYPES):
        yield short_name(dtype), source(dtype, (5, 7))
    for kind in [k for k in KINDS if k != "subclass"]:  # whose class makes objects of its own
        for dtype in dtypes_of(subject, kind)[:1]:
            yield f"a tensor that is {kind}", source(dtype, (4, 6), kind=kind)


def _moving(subject: Subject, move: Move) -> Callable[[int], object]:
    backend = subject.backend
    host = make_source(subject, move).tensor
    there = {index: backend.move(host, subject.device(index)) for index in subject.indices}
    others = {i: subject.indices[n - 1] for n, i in enumerate(subject.indices)}

    def call(index: int) -> None:
        subject.put(host, index)
        subject.fetch(there[index])
        subject.put(there[index], index)
        if len(others) > 1:
            subject.put(there[index], others[index], non_blocking=True)
        if subject.capabilities.pinned_memory:
            backend.pin_memory(host)
        for one in {index, others[index]}:
            backend.synchronize(one)

    return call
