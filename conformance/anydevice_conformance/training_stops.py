"""How a training is interrupted: saved and loaded, or copied."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch

from anydevice_conformance.trainings import ELSEWHERE

__all__ = ["interrupt"]


def interrupt(run: Any, stop: str) -> None:
    """Go on with what was saved or copied, and spoil what there was.

    Args:
        run: a `training_runs.Run`, on a device.
        stop: how it is interrupted.
    """
    old = [p.detach() for p in run.all()]
    old += [mean for means in run.means for mean in means]
    for optimizer in run.optimizers:
        old += [v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
    if stop == "copied":
        run.parameters, run.optimizers, run.means = copy.deepcopy(
            (run.parameters, run.optimizers, run.means)
        )
    else:
        _load(run, stop)
    for tensor in old:
        tensor.fill_(7.0)


def _load(run: Any, stop: str) -> None:
    subject = run.subject
    saved = [[p.detach() for p in group] for group in run.parameters]
    states: dict[str, Any] = {"optimizers": [o.state_dict() for o in run.optimizers]}
    if run.scaler is not None:
        states["scaler"] = run.scaler.state_dict()
    file, target = io.BytesIO(), None
    torch.save({"parameters": saved, "means": run.means, **states}, file)
    file.seek(0)
    if stop == "saved to the host":
        target = torch.device("cpu")
    elif stop == ELSEWHERE:
        here = subject.indices.index(run.places[0].index or 0)
        target = subject.device(subject.indices[here - 1])
        run.places = [target] * 2
    loaded = torch.load(file, map_location=None if target is None else str(target))
    for group in loaded["parameters"]:
        for number, tensor in enumerate(group):
            place = run.places[number % 2] if target is None else target
            assert tensor.device == place, f"torch.load to {place} gave a tensor on {tensor.device}"
    run.parameters = [
        [torch.nn.Parameter(tensor) for tensor in _placed(run, group)]
        for group in loaded["parameters"]
    ]
    run.means = [_placed(run, group) for group in loaded["means"]]
    run.optimizers = run.new_optimizers()
    for optimizer, state in zip(run.optimizers, loaded["optimizers"], strict=True):
        optimizer.load_state_dict(state)
    if run.scaler is not None:
        run.scaler = run.new_scaler()
        run.scaler.load_state_dict(loaded["scaler"])


def _placed(run: Any, group: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.to(run.places[number % 2]) for number, tensor in enumerate(group)]
