"""TRN: what steps leave in parameters, optimizers and scalers, against the host."""
# ruff: noqa: N802 - a check's name carries its paragraph's id

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import torch

from anydevice_conformance.laws import hold_each
from anydevice_conformance.outcomes import not_claimed
from anydevice_conformance.situations import Situation
from anydevice_conformance.subject import Subject
from anydevice_conformance.training_models import NETS
from anydevice_conformance.training_programs import Program, check_program, programs
from anydevice_conformance.training_runs import check_training, refuses
from anydevice_conformance.trainings import Training, trainings, without


def test_TRN_008_steps(subject: Subject) -> None:
    """Steps of torch's optimizers leave what the host's leave, in each form, scaled and resumed.

    Found: after the named step a parameter, the optimizer's state, the gradients' norm or the
    scale is another than on the host.
    Fix: see the kernels of the form that is named (``_foreach_...``, ``_fused_...``,
    ``_amp_...``): each takes all tensors of a list, and all elements of each.
    """
    if not _steps(subject):
        not_claimed("no optimizer takes a step on the device")

    def law(training: Training) -> None:
        try:
            check_training(subject, training)
        except (NotImplementedError, RuntimeError) as error:
            refused = [part for part in training.parts if refuses(subject, part)]
            if not refused and not isinstance(error, NotImplementedError):
                raise
        else:
            return
        with contextlib.suppress(NotImplementedError):  # it lacks an operator, and says so
            check_training(subject, without(training, refused))

    count = 3 * subject.examples(35) // 5
    hold_each(subject, trainings(subject, count), law, lambda training: ())


def test_TRN_009_models(subject: Subject) -> None:
    """A model learns what it learns on the host, in whichever way forward and backward are taken.

    Found: in the named training a loss, a gradient, a parameter or a buffer is another one than on
    the host, or an error came.
    Fix: see gradients of the named way: what is computed again, hooked, kept or cast by autocast
    comes in order and from the values that the forward pass had.
    """
    lacks = {net for net in NETS if _lacks(subject, Program(net, torch.float32, (), Situation()))}
    if len(lacks) == len(NETS):
        not_claimed("no model can be trained")

    def law(program: Program) -> None:
        if program.net not in lacks:
            _lacks(subject, program)

    hold_each(subject, programs(subject, subject.examples(70)), law, _plainer)


def _plainer(program: Program) -> Iterator[Program]:
    plain = dataclasses.replace(program, situation=Situation(program.situation.index))
    for way in program.ways:
        yield dataclasses.replace(plain, ways=(way,))


def _lacks(subject: Subject, program: Program) -> bool:
    """Whether the device says that it lacks what a program needs; other errors are raised."""
    try:
        check_program(subject, program)
    except NotImplementedError:
        return True
    except RuntimeError as error:
        if not program.ways or "not implemented" in str(error) or "not support" in str(error):
            return True
        plain = Situation(program.situation.index)
        if not _lacks(subject, dataclasses.replace(program, ways=(), situation=plain)):
            raise
        return True
    return False


def _steps(subject: Subject) -> bool:
    """Whether the simplest step can be taken."""
    try:
        parameter = torch.nn.Parameter(torch.ones(3, device=subject.device(subject.indices[0])))
        parameter.grad = torch.ones_like(parameter)
        torch.optim.SGD([parameter], lr=0.5, foreach=False).step()
    except (NotImplementedError, RuntimeError):
        return False
    return True
