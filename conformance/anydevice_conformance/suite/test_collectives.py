"""COL: `torch.distributed`, in two real processes."""
# ruff: noqa: N802 - a check's name carries its paragraph's id

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

from anydevice_conformance import children
from anydevice_conformance.marks import needs, since, slow
from anydevice_conformance.outcomes import no_hardware
from anydevice_conformance.rank_starts import WORLD, rank_step, start_ranks
from anydevice_conformance.subject import Subject

pytestmark = needs("collectives")
#: How many seconds rank 0 has: to start, for the group's timeout of 6, and half a minute.
_MISSED = 60


def test_COL_001_starts(subject: Subject) -> None:
    """The named backend starts in two processes and serves the device.

    Found: `init_process_group` or the first collective failed.
    Fix: register the backend with ``torch.distributed.Backend.register_backend`` for your device
    type, and set `collective_backend` to its name.
    """
    for answer in rank_step(subject, "start"):
        name, world, total = answer
        named = subject.backend.collective_backend or name
        assert name == named, f"the group uses {name!r}, not {named!r}"
        assert (world, total) == (WORLD, float(WORLD)), f"world {world}, sum of ones {total}"


def test_COL_001_members(subject: Subject) -> None:
    """In a process of a group, members answer and leave the state as they do without one.

    Found: a declaration that the group changed, a wrong answer, or a state that a call changed.
    Fix: see DEV-002 and DEV-012; look at what is decided by whether `torch.distributed` is started.
    """
    parts = ("all",) if subject.quick else ("steps", "laws")
    for part in parts:
        for answer in rank_step(subject, "members", part=part):
            assert not answer, f"DEV-012: {'; '.join(answer)}"


def test_COL_002_all_reduce(subject: Subject) -> None:
    """`all_reduce` gives each process the sum.

    Found: a wrong sum, or a dtype that failed.
    Fix: reduce in the tensor's dtype; see that the output is written back.
    """
    expected = (torch.arange(100) % 11).double() * WORLD + sum(range(WORLD))
    for answer in rank_step(subject, "all_reduce"):
        for dtype, values in answer.items():
            assert values == expected.tolist(), f"the sum in {dtype} is wrong"


def test_COL_003_broadcast(subject: Subject) -> None:
    """`broadcast` gives each process rank 0's bits.

    Found: other values, or bits that changed.
    Fix: copy bytes.
    """
    expected = torch.tensor([1.5, -0.0, float("inf"), 3e38]).view(torch.int32).tolist()
    for values, kind in rank_step(subject, "broadcast"):
        assert values == expected, f"got the bits {values} for {expected}"
        assert kind == subject.type, f"the result is on {kind}"


def test_COL_004_all_gather(subject: Subject) -> None:
    """`all_gather` gives the pieces in order of rank.

    Found: pieces are missing or in another order.
    Fix: place each piece by its sender's rank.
    """
    for answer in rank_step(subject, "all_gather"):
        assert answer == [[rank + 1.0] * 3 for rank in range(WORLD)], f"got {answer}"


def test_COL_005_barrier(subject: Subject) -> None:
    """No process leaves a barrier before all have entered, again and again.

    Found: a process left early.
    Fix: wait for all ranks, and for the device; of a barrier with ``async_op``, in ``wait``.
    """
    _assert_after_the_last(subject, "barrier", "left barrier")


def _assert_after_the_last(subject: Subject, step: str, what: str) -> None:
    """No rank ends what it does for the nth time before all have begun it."""
    for number, times in enumerate(zip(*rank_step(subject, step), strict=True), 1):
        last = max(entered for entered, _ in times)
        for rank, (_, left) in enumerate(times):
            assert left >= last, (
                f"rank {rank} {what} {number} {last - left:.3f} s before the last one entered"
            )


def test_COL_006_ordered(subject: Subject) -> None:
    """A collective comes after the work queued before it, and before the work queued after.

    Found: a collective read its input too early, or its output was read too early.
    Fix: have it wait for the current stream, and the current stream for it.
    """
    expected = [2.0 * sum(range(1, WORLD + 1))] * 6
    for answer in rank_step(subject, "ordered"):
        assert answer == expected, f"got {answer}, not {expected[0]} throughout"


def test_COL_012_handles(subject: Subject) -> None:
    """Collectives with `async_op` are matched as they were begun, in whatever order waited for.

    Found: two that were under way at once changed places.
    Fix: begin a collective when it is called, not when it is waited for.
    """
    since(subject, "COL-012")
    expected = [[float(10**n * sum(range(1, WORLD + 1)))] * 5 for n in range(4)]
    for rank, answer in enumerate(rank_step(subject, "handles")):
        assert answer == expected, f"rank {rank} has {answer}, not {expected}"


def test_COL_007_reduce_scatter(subject: Subject) -> None:
    """`reduce_scatter_tensor` gives each rank its part of the sum.

    Found: another rank's part, or a wrong sum.
    Fix: give rank r the r-th part along the first dimension.
    """
    since(subject, "COL-007")
    for rank, answer in enumerate(rank_step(subject, "reduce_scatter")):
        ranks = sum(range(WORLD))
        expected = [float(WORLD * (3 * rank + i) + ranks) for i in range(3)]
        assert answer == expected, f"rank {rank} got {answer}, not {expected}"


def test_COL_008_gather_into_one(subject: Subject) -> None:
    """`all_gather_into_tensor` puts the pieces in order of rank.

    Found: pieces in another order, or a dtype that failed.
    Fix: place each piece by its sender's rank; carry bytes where a dtype is not known.
    """
    since(subject, "COL-008")
    expected = [float(i == rank) for rank in range(WORLD) for i in range(3)]
    for answer in rank_step(subject, "gather_into"):
        for dtype, values in answer.items():
            assert values == expected, f"in {dtype}: {values}"


def test_COL_009_send(subject: Subject) -> None:
    """What `send` sends `recv` receives.

    Found: other values, or bits that changed.
    Fix: copy bytes.
    """
    since(subject, "COL-009")
    expected = torch.tensor([1.5, -0.0, float("-inf")]).view(torch.int32).tolist()
    answer = rank_step(subject, "send")[-1]
    assert answer == expected, f"got the bits {answer} for {expected}"


def test_COL_010_host_in_the_group(subject: Subject) -> None:
    """Host tensors and objects travel in the same group.

    Found: a group of the device's collectives and ``cpu:gloo`` does not serve the host.
    Fix: register the backend for your device type only, so that torch can have gloo next to it.
    """
    since(subject, "COL-010")
    expected = [
        [float(sum(range(WORLD + 1)))] * 2,
        [{"rank": rank} for rank in range(WORLD)],
        ["told", 7, 320_000],
    ]
    for answer in rank_step(subject, "host"):
        assert answer == expected, f"got {answer}"


@slow
def test_COL_011_missing_rank(subject: Subject) -> None:
    """A collective that one rank does not make ends in time on the others.

    Found: it went on without the rank, or hung.
    Fix: give up after the group's timeout, by an error where the host next waits.
    """
    since(subject, "COL-011")
    count = len(subject.indices)
    if count < WORLD and not subject.is_host:
        no_hardware(f"needs {WORLD} devices of type {subject.type!r}, one for each process")
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        processes = start_ranks(subject, "miss_collective", store)
        try:
            processes[0].wait(_MISSED)
        except subprocess.TimeoutExpired:
            pytest.fail(f"rank 0 waits for rank 1 since {_MISSED} s; the timeout is 6 s")
        finally:
            for process in processes[1:]:
                children.end(process)
        answer = children.read_answer(processes[0].communicate()[0])
        if answer is not None:  # a process that went on may still end with the error, later
            assert answer["error"], "rank 0 went on as if rank 1 had come"
        else:  # it ended with the error
            assert processes[0].returncode != 0, "rank 0 ended without a message"


@pytest.mark.parametrize(
    "paragraph", ["COL-002", "COL-003", "COL-004", "COL-007", "COL-008", "COL-009", "COL-012"]
)
def test_COL_012_every_collective(subject: Subject, paragraph: str) -> None:
    """Collectives are right for every dtype and size, on side streams, twice, with a late rank.

    Found: one combination goes wrong; the counterexample is the smallest one found.
    Fix: see the paragraph that the message names; look at remainders of chunks, at tensors that
    begin within their storage, and at what the operation and the source are.
    """
    if paragraph > "COL-006":
        since(subject, paragraph)
    for answer in rank_step(subject, "laws", part="laws"):
        assert not answer.get(paragraph), f"{paragraph}: {answer[paragraph]}"


def test_COL_013_programs(subject: Subject) -> None:
    """Programs of collectives in all forms, groups and handles give what each one gives.

    Found: one collective of a program went wrong; the message names it and what was around it.
    Fix: see the named form, of a group's size and ranks, and what its handle waits for.
    """
    since(subject, "COL-013")
    for answer in rank_step(subject, "programs", part="laws"):
        assert not answer.get("COL-013"), answer["COL-013"]


def test_COL_013_completed(subject: Subject) -> None:
    """A handle is not completed before all ranks have come.

    Found: ``is_completed()`` of an `all_reduce` or a barrier was true while another rank slept.
    Fix: ask the device's queue, and the other ranks, not whether the call has returned.
    """
    since(subject, "COL-013")
    _assert_after_the_last(subject, "completed", "was told to have completed collective")


def test_COL_014_nothing_left(subject: Subject) -> None:
    """Collectives that are done, and groups that are destroyed, leave no memory behind.

    Found: tensors' memory stays when the tensors are gone.
    Fix: let inputs and outputs go when the collective is done.
    """
    since(subject, "COL-014")
    for answer in rank_step(subject, "programs", part="laws"):
        assert not answer.get("COL-014"), answer["COL-014"]
