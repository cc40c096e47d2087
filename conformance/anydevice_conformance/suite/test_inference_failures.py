"""INF: a failed forward, and models that are gone, leave nothing behind."""
# ruff: noqa: N802 - a check's name carries its paragraph's id

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import nn

from anydevice import (
    cpu_offload,
    load_checkpoint_and_dispatch,
    undispatch,
)
from anydevice_conformance.jobs import (
    assert_close,
    caps,
    checkpoint,
    exact_toy,
    ids,
)
from anydevice_conformance.marks import slow
from anydevice_conformance.outcomes import left_out
from anydevice_conformance.subject import Subject


class _Hungry(nn.Module):
    """Asks the device for as much as the input's first number says."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, size: int = 0) -> torch.Tensor:
        result: torch.Tensor = self.layer(x)
        if size:
            # Written to and read, so that a device that allocates late allocates.
            torch.ones(size, dtype=torch.uint8, device=result.device)[-1:].cpu()
        return result


def test_INF_011_out_of_memory(subject: Subject, index: int) -> None:
    """After a forward that ran out of memory the next one gives the host's answer.

    Found: the model or the device is unusable after an out-of-memory error.
    Fix: see OOM-002 and OOM-004; else report it to anydevice.
    """
    torch.manual_seed(3)
    model, plain = _Hungry(), _Hungry()
    plain.load_state_dict(model.state_dict())
    cpu_offload(model, execution_device=subject.device(index))
    x = torch.randn(2, 4)
    with subject.inference():
        for _ in range(2):
            with pytest.raises(Exception) as caught:  # noqa: PT011 - whichever the device raises
                model(x, 1 << 46)
            assert subject.backend.is_out_of_memory(caught.value), (
                f"not recognised: {type(caught.value).__name__}: {caught.value!s:.200}"
            )
            assert_close(subject, model(x), plain(x), "the forward after the error")


@slow
def test_INF_012_nothing_left(subject: Subject, tmp_path: Path) -> None:
    """A deleted model leaves no device memory; `undispatch` gives an ordinary model.

    Found: memory stayed taken, or the model is not what it was.
    Fix: see MEM-006 and MEM-014; else report it to anydevice.
    """
    if subject.is_host:
        left_out("the device is the host: nothing is dispatched")

    def run(seed: int) -> None:
        model, plain = exact_toy(seed=seed)
        file = checkpoint(plain, tmp_path)
        budgets = caps(subject, plain)
        load_checkpoint_and_dispatch(model, file, device_map="auto", max_memory=budgets)
        with subject.inference():
            assert_close(subject, model(ids()), plain(ids()), "dispatched")
            undispatch(model)
            assert {p.device.type for p in model.parameters()} == {"cpu"}, "not all came back"
            assert torch.equal(model(ids()), plain(ids())), "undispatched, it computes otherwise"

    def clean() -> list[int]:
        gc.collect()
        subject.synchronize_all()
        return [subject.allocated(index) for index in subject.indices]

    run(0)
    before = clean()
    for seed in range(1, 4):
        run(seed)
    for index, (one, other) in enumerate(zip(before, clean(), strict=True)):
        assert other - one < 16_384, f"device {index} holds {other - one} bytes more than before"
