"""STR: random programs over streams, and a host that nothing stops."""
# ruff: noqa: N802 - a check's name carries its paragraph's id

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from anydevice_conformance.beside import check_beside, examples_beside
from anydevice_conformance.laws import hold_each
from anydevice_conformance.marks import needs, slow
from anydevice_conformance.operator_calls import leaves, mapped
from anydevice_conformance.program_steps import programs, shorter
from anydevice_conformance.programs import run_program
from anydevice_conformance.subject import Subject
from anydevice_conformance.usual_operators import USUAL

pytestmark = needs("streams")


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


def test_STR_018_nothing_waits_for_others(subject: Subject) -> None:
    """What is done on one stream never waits for another's work, in any situation.

    Found: a move, an event, a stream or pinned memory, on one stream, came only after the work of
    another, or stopped the host until that was done.
    Fix: wait for the stream or event in question, never for the device; make no call that the
    driver orders with everything; join no streams where a context ends.
    """
    hold_each(
        subject,
        examples_beside(subject),
        lambda example: check_beside(subject, example),
        lambda example: (),
    )
