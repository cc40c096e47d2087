"""Operators that find no room for their result: each must raise what is recognised.

An operator is tried with room first; one that the device lacks, or refuses, is left out. So an
error on a full device is the lack of memory and nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from anydevice_conformance.covering import covering_situations
from anydevice_conformance.situations import Situation, restored, run_in, state
from anydevice_conformance.subject import Subject

__all__ = ["Lacking"]

#: Bytes of a result, at least and at most; of a large device about a thousandth.
_LEAST: Final = 1 << 20
_MOST: Final = 64 << 20
#: An operator by name, and how it is called.
_Calls = dict[str, Callable[[], object]]


class Lacking:
    """What takes memory of one device: prepared with room, and tried again without.

    Attributes:
        calls: by name; each has worked.
    """

    def __init__(self, subject: Subject, index: int) -> None:
        self.subject, self.index = subject, index
        size = min(_MOST, max(_LEAST, subject.memory(index).total >> 10))
        self.calls: _Calls = {}
        made = dict(_made(subject, index, int((size // 4) ** 0.5)))
        for number, (name, call) in enumerate(made.items()):
            try:
                _tried(subject, self._situation(number), call)
            except Exception:  # noqa: BLE001 - the device lacks it, or refuses it
                continue
            self.calls[name] = call

    def _situation(self, number: int) -> Situation:
        every = covering_situations(self.subject)
        return dataclasses.replace(every[number % len(every)], index=self.index)

    def assert_recognised(self) -> None:
        """On a full device: what each raises is recognised, and nothing else has changed.

        Raises:
            AssertionError: it is not, or has; the message says what was called.
        """
        backend = self.subject.backend
        for number, (name, call) in enumerate(self.calls.items()):
            before, found = self._allocated(), None
            words = f"device {self.index} is full, {name}"
            with restored(self.subject):
                try:
                    _tried(self.subject, self._situation(number), call)
                except AssertionError as fault:
                    raise AssertionError(f"{words}: {fault}") from fault
                except Exception as error:  # noqa: BLE001 - whichever the device raises
                    found = error.with_traceback(None)
            if found is None:
                continue  # it found room all the same
            answer = backend.is_out_of_memory(found)
            assert answer is True, (
                f"OOM-002: {words} raised {type(found).__name__}: {found!s:.200}, "
                f"and is_out_of_memory is {answer!r}"
            )
            del found
            now = self._allocated()
            assert now == before, f"OOM-004: {words}: allocated bytes were {before}, and are {now}"

    def assert_works(self, words: str) -> None:
        """With room each works as before; ``words`` say when.

        Raises:
            AssertionError: one does not.
        """
        for number, (name, call) in enumerate(self.calls.items()):
            if " from device " in name:  # that one may be full
                continue
            try:
                _tried(self.subject, self._situation(number), call)
            except Exception as error:
                raise AssertionError(
                    f"{words}, and on device {self.index} {name} raised "
                    f"{type(error).__name__}: {error!s:.200}"
                ) from error

    def _allocated(self) -> int | None:
        try:
            return self.subject.backend.memory_allocated(self.index)
        except NotImplementedError:
            return None


def _tried(subject: Subject, situation: Situation, call: Callable[[], object]) -> None:
    """Call it in a situation, and wait for it; the caller's state stays."""

    def work() -> None:
        before = state(subject)
        try:
            call()
        finally:
            changed = before.differences(state(subject))
            assert not changed, f"DEV-012: {changed}"
        subject.backend.synchronize(situation.index)

    with restored(subject):
        run_in(subject, situation, work)


def _made(subject: Subject, index: int, side: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """What gives ``side`` times ``side`` numbers of little."""
    there = subject.device(index)
    column, row = (torch.ones(shape, device=there) for shape in ((side, 1), (1, side)))
    table, numbers = torch.ones(4, side, device=there), torch.zeros(side, device=there).long()
    weight, picture = torch.ones(1, 1, 1, 1, device=there), row.view(1, 1, 1, side)
    yield from (
        ("torch.empty", lambda: torch.empty(side, side, device=there)),
        ("torch.zeros", lambda: torch.zeros(side, side, device=there)),
        ("torch.full", lambda: torch.full((side, side), 2.0, device=there)),
        ("torch.arange", lambda: torch.arange(side * side, device=there)),
        ("a matrix product", lambda: column @ row),
        ("addmm", lambda: torch.addmm(row, column, row)),
        ("a batched product", lambda: torch.bmm(column[None], row[None])),
        ("linear", lambda: F.linear(column, column, row.view(-1))),
        ("an addition", lambda: column + row),
        (
            "a comparison",
            lambda: torch.eq(column.view(-1, 1, 1), row.view(1, -1, 1).expand(1, -1, 4)),
        ),
        ("an embedding", lambda: F.embedding(numbers, table)),
        ("index_select", lambda: table.index_select(0, numbers)),
        ("repeat", lambda: row.repeat(side, 1)),
        ("cat", lambda: torch.cat([row] * side)),
        ("clone", lambda: row.expand(side, side).clone(memory_format=torch.contiguous_format)),
        ("a cast", lambda: row.expand(side, side).to(torch.bfloat16).float()),
        ("softmax", lambda: row.expand(side, side).softmax(-1)),
        ("cumsum", lambda: row.expand(side, side).cumsum(0)),
        ("exp", lambda: row.expand(side, side).exp()),
        ("pad", lambda: F.pad(row, (0, 0, 0, side))),
        ("interpolate", lambda: F.interpolate(picture, size=(side, side))),
        ("a convolution", lambda: F.conv2d(picture.expand(1, 1, side, side), weight)),
        ("torch.tensor", lambda: torch.ones(1).expand(side, side).to(there)),
    )
    if subject.capabilities.device_rng:
        yield "torch.rand", lambda: torch.rand(side, side, device=there)
    leaf = torch.ones(1, side, device=there, requires_grad=True)

    def backward() -> None:
        with torch.inference_mode(False), torch.enable_grad():
            result = _Wide.apply(leaf).sum()  # type: ignore[no-untyped-call]
            torch.autograd.grad(result, leaf)

    yield "a backward", backward
    wide = torch.ones(1).expand(side, side)
    for late in (False, True):
        words = "a non-blocking move" if late else "a move"
        yield words, partial(subject.put, wide, index, non_blocking=late)
        for other in [i for i in subject.indices if i != index][-1:]:
            far = torch.ones(1, device=subject.device(other)).expand(side, side)
            yield (
                f"{words} from device {other}",
                partial(subject.put, far, index, non_blocking=late),
            )


class _Wide(torch.autograd.Function):
    """Takes no memory forward, and backward what the rows of a square take."""

    @staticmethod
    def forward(context: Any, row: torch.Tensor) -> torch.Tensor:
        """The row."""
        return row.view_as(row)

    @staticmethod
    def backward(context: Any, given: torch.Tensor) -> torch.Tensor:
        """The sum of as many rows as there are columns."""
        return (given.t() + given).sum(0, keepdim=True)
