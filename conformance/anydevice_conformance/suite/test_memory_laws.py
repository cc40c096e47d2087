"""MEM: whatever comes and goes, on whichever device."""
# ruff: noqa: N802 - a check's name carries its paragraph's id

from __future__ import annotations

from anydevice_conformance.laws import hold
from anydevice_conformance.ledger import entries, run_ledger
from anydevice_conformance.measuring import looks_like_host_memory
from anydevice_conformance.members_memory import memory_of
from anydevice_conformance.outcomes import not_claimed
from anydevice_conformance.subject import Subject


def test_MEM_007_ledger(subject: Subject) -> None:
    """Each device's numbers follow what comes and goes there, in whatever order, and nothing else.

    Found: after some tensors came and went, were moved, were too large, or after a reset or
    `empty_cache`, a device's allocated, peak, free or total bytes are not what they must be.
    Fix: ask the driver or the allocator at each call, with the index; remember nothing.
    """
    memory = memory_of(subject)
    if not memory.size or any(looks_like_host_memory(subject, i) for i in subject.indices):
        not_claimed("no number of the device follows a tensor, or its memory is the host's")
    hold(subject, entries(), lambda program: run_ledger(subject, memory, program), examples=40)
