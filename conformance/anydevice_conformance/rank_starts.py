"""The processes of the checks of collectives and of training, seen from the process that checks."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Final

from anydevice_conformance import children
from anydevice_conformance.jobs import import_transformers
from anydevice_conformance.outcomes import no_hardware
from anydevice_conformance.rank_kinds import KINDS
from anydevice_conformance.subject import Subject

__all__ = ["WORLD", "rank_step", "start_ranks"]

#: How many processes there are.
WORLD: Final = 2
#: So many generated collectives: quickly, each kind is tried with many elements and with few.
_EXAMPLES: Final = 4 * len(KINDS)
#: So many turns of generated programs, each of one to four collectives.
_TURNS: Final = 630


def rank_step(subject: Subject, name: str, part: str = "steps") -> list[Any]:
    """What each rank says of a step; the processes of a part run once a subject."""
    part = "all" if subject.quick else part
    cached = subject.__dict__.setdefault("_ranks", {})
    if part not in cached:
        try:
            cached[part] = _run(subject, part)
        except AssertionError as error:  # one that died or hung would do so again
            cached[part] = str(error)
    answers = cached[part]
    assert not isinstance(answers, str), answers
    for rank, answer in enumerate(answers):
        said = answer.get(name, answer.get("start"))
        assert not isinstance(said, str), f"rank {rank}: {said}"
    return [answer[name] for answer in answers]


def _run(subject: Subject, part: str) -> list[dict[str, Any]]:
    count = len(subject.indices)
    if count < WORLD and not subject.is_host:
        no_hardware(f"needs {WORLD} devices of type {subject.type!r}, one for each process")
    options: dict[str, Any] = {"part": part}
    if part in ("laws", "all"):
        room = min(subject.room(index) for index in subject.indices)
        options.update(examples=subject.examples(_EXAMPLES), seed=subject.seed, room=room)
        options.update(turns=subject.examples(_TURNS), infers=subject.infers)
    with tempfile.TemporaryDirectory() as folder:
        processes = start_ranks(subject, "collective", str(Path(folder) / "store"), **options)
        try:
            if subject.quick:  # while the ranks wait for each other, for a check that comes later
                import_transformers()
            return [children.answer_of(process) for process in processes]
        finally:
            for process in processes:
                children.end(process)


def start_ranks(subject: Subject, task: str, store: str, **options: Any) -> list[Any]:
    """Start the processes, each with its rank, and with a device in turn."""
    count = len(subject.indices)
    return [
        children.start(
            task,
            subject.type,
            rank=rank,
            world=WORLD,
            store=store,
            index=rank % count,
            **options,
        )
        for rank in range(WORLD)
    ]
