"""Work on some streams while another one is busy, with much pending on it: none waits for it.

An example makes one stream busy, queues a crowd of each kind of work behind that, and then does
each kind of work on each other stream and waits for it there. Of the busy stream nothing needs to
be done by then: where it is, the host or a stream has waited for what it does not depend on.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any, Final

from anydevice_conformance.beside_work import DONE, QUEUED, Place, Scene
from anydevice_conformance.covering import covering_situations
from anydevice_conformance.data import same_bits
from anydevice_conformance.moving import read
from anydevice_conformance.situations import Situation, restored, run_in
from anydevice_conformance.stream_ways import WAYS, work_on
from anydevice_conformance.subject import Subject
from anydevice_conformance.threads import in_thread
from anydevice_conformance.work import still_running

__all__ = ["Beside", "check_beside", "examples_beside"]

#: So many of one kind are pending at once: more than pools and rings of drivers have.
_MANY: Final = 140
_FEW: Final = 3
_NOTHING: Final = "nothing"


def _by_event(scene: Scene, place: Place) -> None:
    scene.backend.synchronize_event(scene.backend.record_event(place.stream))


def _by_event_in_thread(scene: Scene, place: Place) -> None:
    in_thread(lambda: _by_event(scene, place))


def _by_copy(scene: Scene, place: Place) -> None:
    with scene.backend.use_stream(place.stream):
        scene.subject.fetch(place.small[:1])


#: How the host waits for a stream, by name.
ENDS: Final[dict[str, Callable[[Scene, Place], None]]] = {
    "an event": _by_event,
    "a blocking copy": _by_copy,
    "an event, in a thread": _by_event_in_thread,
}


@dataclasses.dataclass(frozen=True)
class Beside:
    """A busy stream, what is queued on it, and what is done on the others.

    Attributes:
        device: the busy stream's.
        default: whether it is the device's default stream.
        ways: how the busy stream, and how the others are made current.
        many: the kind of which very many are pending on it.
        end: how the host waits for the others.
        situation: where all of it is done.
        queued: the kind on the busy stream; None for all.
        done: the kind on the others; None for all.
    """

    device: int
    default: bool
    ways: tuple[str, str]
    many: str
    end: str
    situation: Situation
    queued: str | None = None
    done: str | None = None

    def __repr__(self) -> str:
        stream = "the default stream" if self.default else "a stream"
        one, other = self.queued or "each kind", self.done or "each kind"
        return (
            f"<{stream} of device {self.device} is busy; behind it, by {self.ways[0]}, {one} and "
            f"{_MANY} {self.many}; on the others, by {self.ways[1]}, {other}, until {self.end} is "
            f"done; {str(self.situation)[1:-1]}>"
        )


def examples_beside(subject: Subject) -> list[Beside]:
    """Examples in which each part comes with many others; of a seed they are the same ones."""
    dice, ways, kinds = random.Random(subject.seed), list(WAYS), list(QUEUED)
    dice.shuffle(ways)
    dice.shuffle(kinds)
    devices = sorted({*subject.indices[:2], *subject.indices[-1:]})
    return [
        Beside(
            device=devices[number // 2 % len(devices)],
            default=bool(number % 2),
            ways=(ways[number % len(ways)], ways[(2 * number + 1) % len(ways)]),
            many=kinds[number % len(kinds)],
            end=list(ENDS)[number % len(ENDS)],
            situation=situation,
        )
        for number, situation in enumerate(
            covering_situations(subject)[:: 2 if subject.quick else 1]
        )
    ]


def check_beside(subject: Subject, example: Beside) -> None:
    """Try an example; where it fails, name the kinds of work that do.

    Raises:
        AssertionError: something waited for the busy stream, or a value is wrong.
    """
    if _holds(subject, example, tries=2):
        return
    words = "something waited for work that it does not depend on"
    for part in _parts(example):
        assert _holds(subject, part), f"{words}: {part!r}"
    assert _holds(subject, example), words


def _parts(example: Beside) -> Iterator[Beside]:
    """The same with one kind of work on the busy stream alone, then with one on the others."""
    for kind in (example.many, *QUEUED):
        yield dataclasses.replace(example, queued=kind, done=_NOTHING)
    for kind in DONE:
        yield dataclasses.replace(example, done=kind)


def _holds(subject: Subject, example: Beside, **tries: int) -> bool:
    scene = Scene(subject, example.device, example.default)

    def act() -> None:
        kept: list[Any] = []
        for name, queue in QUEUED.items():
            scene.count = _MANY if name == example.many else _FEW
            if example.queued in (None, name):
                work_on(subject, scene.busy.stream, example.ways[0], lambda: queue(scene, kept))  # noqa: B023
        for place in scene.places:
            _beside(subject, scene, place, example)

    with restored(subject):
        return still_running(
            subject,
            example.device,
            scene.busy.stream,
            lambda: run_in(subject, example.situation, act),
            **tries,
        )


def _beside(subject: Subject, scene: Scene, place: Place, example: Beside) -> None:
    """Do the work on one of the other streams, and wait for it."""
    names = [name for name in DONE if example.done in (None, name)]

    def work() -> list[Any]:
        return [(name, *pair) for name in names for pair in DONE[name](scene, place)]

    found = work_on(subject, place.stream, example.ways[1], work)
    ENDS[example.end](scene, place)
    with subject.backend.use_stream(place.stream):
        for name, value, expected in found:
            assert same_bits(read(value), expected), f"{name} gave wrong values: {example!r}"
