"""COL: `torch.distributed`, in two real processes."""
# ruff: noqa: N802 - a check's name carries its paragraph's id

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from anydevice_conformance import children
from anydevice_conformance.marks import needs
from anydevice_conformance.outcomes import no_hardware
from anydevice_conformance.subject import Subject

pytestmark = needs("collectives")
_WORLD = 2


def test_COL_001_starts(subject: Subject) -> None:
    """The named backend starts in two processes and serves the device.

    Found: `init_process_group` or the first collective failed.
    Fix: register the backend with ``torch.distributed.Backend.register_backend`` for your device
    type, and set `collective_backend` to its name.
    """
    for answer in _step(subject, "start"):
        name, world, total = answer
        assert name == subject.backend.collective_backend, f"the group uses {name!r}"
        assert (world, total) == (_WORLD, float(_WORLD)), f"world {world}, sum of ones {total}"


def test_COL_002_all_reduce(subject: Subject) -> None:
    """`all_reduce` gives each process the sum.

    Found: a wrong sum, or a dtype that failed.
    Fix: reduce in the tensor's dtype; see that the output is written back.
    """
    expected = (torch.arange(100) % 11).double() * _WORLD + sum(range(_WORLD))
    for answer in _step(subject, "all_reduce"):
        for dtype, values in answer.items():
            assert values == expected.tolist(), f"the sum in {dtype} is wrong"


def test_COL_003_broadcast(subject: Subject) -> None:
    """`broadcast` gives each process rank 0's bits.

    Found: other values, or bits that changed.
    Fix: copy bytes.
    """
    expected = torch.tensor([1.5, -0.0, float("inf"), 3e38]).view(torch.int32).tolist()
    for values, kind in _step(subject, "broadcast"):
        assert values == expected, f"got the bits {values} for {expected}"
        assert kind == subject.type, f"the result is on {kind}"


def test_COL_004_all_gather(subject: Subject) -> None:
    """`all_gather` gives the pieces in order of rank.

    Found: pieces are missing or in another order.
    Fix: place each piece by its sender's rank.
    """
    for answer in _step(subject, "all_gather"):
        assert answer == [[rank + 1.0] * 3 for rank in range(_WORLD)], f"got {answer}"


def test_COL_005_barrier(subject: Subject) -> None:
    """No process leaves a barrier before all have entered.

    Found: a process left early.
    Fix: wait for all ranks, and for the device.
    """
    times = _step(subject, "barrier")
    last = max(entered for entered, _ in times)
    for rank, (_, left) in enumerate(times):
        assert left >= last, f"rank {rank} left {last - left:.3f} s before the last one entered"


def test_COL_006_ordered(subject: Subject) -> None:
    """A collective comes after the work queued before it, and before the work queued after.

    Found: a collective read its input too early, or its output was read too early.
    Fix: have it wait for the current stream, and the current stream for it.
    """
    expected = [2.0 * sum(range(1, _WORLD + 1))] * 6
    for answer in _step(subject, "ordered"):
        assert answer == expected, f"got {answer}, not {expected[0]} throughout"


def _step(subject: Subject, name: str) -> list[Any]:
    """What each rank says of a step; the processes run once a subject."""
    cached = subject.__dict__.setdefault("_ranks", {})
    if not cached:
        cached["answers"] = _run(subject)
    answers = cached["answers"]
    for rank, answer in enumerate(answers):
        said = answer.get(name, answer.get("start"))
        assert not isinstance(said, str), f"rank {rank}: {said}"
    return [answer[name] for answer in answers]


def _run(subject: Subject) -> list[dict[str, Any]]:
    count = len(subject.indices)
    if count < _WORLD and not subject.is_host:
        no_hardware(f"needs {_WORLD} devices of type {subject.type!r}, one for each process")
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        processes = [
            children.start(
                "collective", subject.type, rank=rank, world=_WORLD, store=store, index=rank % count
            )
            for rank in range(_WORLD)
        ]
        try:
            return [children.answer_of(process) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
