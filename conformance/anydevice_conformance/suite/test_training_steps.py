"""TRN: what steps leave in parameters, optimizers and scalers, against the host."""
# ruff: noqa: N802 - a check's name carries its paragraph's id

from __future__ import annotations

import contextlib

import torch

from anydevice_conformance.laws import hold_each
from anydevice_conformance.outcomes import not_claimed
from anydevice_conformance.subject import Subject
from anydevice_conformance.training_runs import check_training
from anydevice_conformance.trainings import Training, trainings


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
        with contextlib.suppress(NotImplementedError):  # it lacks an operator, and says so
            try:
                check_training(subject, training)
            except RuntimeError as error:
                if training.form != "fused" or "fused" not in str(error):
                    raise

    hold_each(subject, trainings(subject, subject.examples(35)), law, lambda training: ())


def _steps(subject: Subject) -> bool:
    """Whether the simplest step can be taken."""
    try:
        parameter = torch.nn.Parameter(torch.ones(3, device=subject.device(subject.indices[0])))
        parameter.grad = torch.ones_like(parameter)
        torch.optim.SGD([parameter], lr=0.5, foreach=False).step()
    except (NotImplementedError, RuntimeError):
        return False
    return True
