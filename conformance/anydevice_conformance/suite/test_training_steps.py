"""TRN: what steps leave in parameters, optimizers and scalers, against the host."""
# ruff: noqa: N802 - a check's name carries its paragraph's id

from __future__ import annotations

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
    done = 0

    def law(training: Training) -> None:
        nonlocal done
        try:
            check_training(subject, training)
        except NotImplementedError:  # the device lacks an operator, and says so
            return
        except RuntimeError as error:
            if training.form != "fused" or "fused" not in str(error):
                raise
            return
        done += 1

    hold_each(subject, trainings(subject, subject.examples(49)), law, lambda training: ())
    if not done:
        not_claimed("no optimizer takes a step on the device")
