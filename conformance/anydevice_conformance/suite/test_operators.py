"""DTY: whatever operator of torch's the device has, against the host."""
# ruff: noqa: N802 - a check's name carries its paragraph's id

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from anydevice_conformance.laws import hold_each
from anydevice_conformance.marks import slow
from anydevice_conformance.operator_checks import Operators
from anydevice_conformance.operator_trials import Trial, trials, usual_trials
from anydevice_conformance.outcomes import left_out
from anydevice_conformance.subject import Subject
from anydevice_conformance.torch_operators import outside_tests

#: What models call most.
_OFTEN: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "linear with bias": lambda x: F.linear(x / 8, x, x[0] * 9),
    "matmul": lambda x: x @ x,
    "bmm": lambda x: torch.bmm(x[None], x[None]),
    "baddbmm": lambda x: torch.baddbmm(x[None] * 9, x[None] / 8, x[None]),
    "softmax": lambda x: x.softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, (24,), x[0], x[1]),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "gelu and sum": lambda x: F.gelu(x) * x + x[0],
    "rows by index": lambda x: x[[3, 0, 9, 3]],
    "transposed copy": lambda x: x.t().contiguous(),
}
#: So many calls of each operator in each dtype.
_ROUNDS: Final = 3
#: After so many seconds a slow device has been tried enough.
_SECONDS: Final = 180.0
_QUICKLY: Final = 40.0
#: Quickly, also after so many of the processor: a device of software is slow by them.
_PROCESSOR: Final = 10.0


def test_DTY_019_usual_operators(subject: Subject) -> None:
    """The usual operators are right in each dtype that they take, and in each way to call them.

    Found: an operator gives another value, shape or dtype than the host, in one dtype, layout, way
    or situation; or it writes beside its result, or into an argument.
    Fix: see the counterexample: strides and offsets of what is read and of ``out=``, the dtype.
    """
    rounds = max(1, subject.count // 40) if subject.count else 1 if subject.quick else 6

    _hold_in_time(subject, usual_trials(subject, rounds))


def test_DTY_019_again(subject: Subject, index: int) -> None:
    """The operators that models call most give the same again, as often as they are called.

    Found: one of many calls gives something else.
    Fix: look for a race, or for what is counted or kept from call to call.
    """
    times = 70 if subject.quick else 400
    device = subject.device(index)
    for dtype in subject.supported(torch.float32, torch.bfloat16, torch.float16):
        values = torch.linspace(-2, 2, 24 * 24).reshape(24, 24).to(dtype).to(device)
        for name, operator in _OFTEN.items():
            first, once_more = operator(values), [operator(values) for _ in range(times)]
            same = torch.stack([(one == first).all() for one in once_more]).cpu()
            # A sum may come in another order; it is far from a wrong one.
            wrong = [once_more[n].cpu().double() for n in (~same).nonzero().flatten().tolist()]
            for one in wrong:
                error = float((one - first.cpu().double()).abs().max() / first.cpu().abs().max())
                assert error < 0.02, (
                    f"{name} of {dtype} on device {index}: one of {times} calls gave another result"
                )


@slow
def test_DTY_019_operators(subject: Subject) -> None:
    """Every operator of torch's that the device has is right, in each dtype and way to call it.

    Found: an operator gives another value, shape or dtype than the host, or changes an argument.
    Fix: mend the kernel, or have it raise ``NotImplementedError``: what is not there harms nobody.
    """
    rounds = max(1, subject.count // 20) if subject.count else _ROUNDS
    try:
        tried = list(itertools.islice(trials(subject, rounds), 1))
    except ImportError as error:
        left_out(f"torch's descriptions of its operators cannot be imported: {error}")
    assert tried, "torch describes no operator"

    with outside_tests():
        _hold_in_time(subject, trials(subject, rounds))


def _hold_in_time(subject: Subject, tried: Iterator[Trial]) -> None:
    seconds = _QUICKLY if subject.quick else _SECONDS
    end = time.monotonic() + seconds
    used = time.process_time() + (_PROCESSOR if subject.quick else math.inf)
    count, operators = itertools.count(), Operators(subject)

    def is_over() -> bool:
        return time.monotonic() >= end or time.process_time() >= used

    def law(trial: Trial) -> None:
        operators.check(trial)
        next(count)

    hold_each(
        subject,
        itertools.takewhile(lambda trial: not is_over(), tried),
        law,
        lambda trial: (),
    )
    if is_over():
        left_out(f"{next(count)} calls are right; then the time was over: a slow device")
