"""What is queued on a busy stream, and what is done meanwhile on others."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch

from anydevice_conformance.situations import side_stream
from anydevice_conformance.subject import Subject
from anydevice_conformance.threads import in_thread

__all__ = ["DONE", "QUEUED", "Place", "Scene"]

#: What lies on each place: small, and more than drivers copy in one piece.
_SMALL, _LARGE = torch.arange(600.0), torch.arange(300_001.0)
#: Tensors on the device and what they must be.
Found = list[tuple[torch.Tensor, torch.Tensor]]


class Place(NamedTuple):
    """A stream, and what lies on its device, made long before."""

    stream: Any
    device: int
    small: torch.Tensor
    large: torch.Tensor
    event: Any


class Scene:
    """A busy stream, and others, each with what lies on its device."""

    def __init__(self, subject: Subject, device: int, default: bool) -> None:
        self.subject, self.backend = subject, subject.backend
        #: How many of a kind are queued at once.
        self.count = 1
        self.pins = subject.capabilities.pinned_memory
        kept = _kept(subject)
        self.small, self.large = kept["sources"]
        streams: dict[int, tuple[Any, ...]] = kept["streams"]
        self.busy = self._place(device, streams[device][0 if default else 1])
        #: Of each device one that waits for the busy one: of a copy between the two.
        self.joined = {index: streams[index][2] for index in subject.indices}
        self.places = [
            self._place(index, stream)
            for index in subject.indices
            for stream in (streams[index][0], side_stream(subject, index))
            if stream != self.busy.stream
        ]
        subject.synchronize_all()

    def _place(self, index: int, stream: Any) -> Place:
        there = self.subject.device(index)
        event = self.backend.record_event(stream)
        return Place(stream, index, _SMALL.to(there), _LARGE.to(there), event)

    def other_device(self, index: int) -> int:
        """The one that comes after it."""
        indices = self.subject.indices
        return indices[(indices.index(index) + 1) % len(indices)]


def _kept(subject: Subject) -> dict[str, Any]:
    """Streams that are none of the situations', and sources: once a subject."""
    kept: dict[str, Any] = subject.__dict__.setdefault("_beside", {})
    if not kept:
        backend = subject.backend
        pin = backend.pin_memory if subject.capabilities.pinned_memory else torch.clone
        kept["sources"] = (pin(_SMALL), pin(_LARGE))
        streams = {}
        for index in subject.indices:
            usual = [backend.current_stream(index), side_stream(subject, index)]
            for _ in range(100):  # drivers hand out streams in turn
                stream = backend.new_stream(index)
                if stream not in usual:
                    usual.append(stream)
                if len(usual) == 4:
                    break
            assert len(usual) == 4, "STR-001: new_stream gives the same streams again and again"
            streams[index] = (usual[0], *usual[2:])
        kept["streams"] = streams
    return kept


# ---------------------------------------------------------------------- on the busy stream


def _kernels(scene: Scene, kept: list[Any]) -> None:
    for _ in range(scene.count):
        kept.append(scene.busy.small + 1)
    scene.busy.large[::2].add_(0)


def _part(tensor: torch.Tensor, number: int) -> torch.Tensor:
    return tensor[: number % 9 + 1] if number % 2 else tensor[number % 9 :]


def _uploads(scene: Scene, kept: list[Any]) -> None:
    put, index = scene.subject.put, scene.busy.device
    for first in range(scene.count if scene.pins else 0):
        kept.append(put(_part(scene.small, first), index, non_blocking=True))
    if scene.pins:
        kept.append(put(scene.large, index, non_blocking=True))


def _fetches(scene: Scene, kept: list[Any]) -> None:
    for first in range(scene.count if scene.pins else 0):
        kept.append(scene.subject.fetch(_part(scene.busy.small, first), non_blocking=True))
    if scene.pins:
        kept.append(scene.subject.fetch(scene.busy.large, non_blocking=True))


def _events(scene: Scene, kept: list[Any]) -> None:
    backend, stream = scene.backend, scene.busy.stream
    kept += [backend.record_event(stream) for _ in range(scene.count)]
    for event in kept[-1 : -scene.count - 1 : -10]:
        backend.wait_event(scene.joined[scene.busy.device], event)
        backend.wait_event(stream, event)
    del kept[-scene.count // 2 :]  # and some are gone while they are pending


def _waits(scene: Scene, kept: list[Any]) -> None:
    backend = scene.backend
    for place in scene.places:
        for _ in range(scene.count // 10 + 1):
            backend.wait_event(scene.busy.stream, backend.record_event(place.stream))
        backend.wait_event(scene.joined[place.device], backend.record_event(scene.busy.stream))


def _waits_in_thread(scene: Scene, kept: list[Any]) -> None:
    backend, joined = scene.backend, scene.joined[scene.busy.device]
    in_thread(lambda: backend.wait_event(joined, backend.record_event(scene.busy.stream)))


def _crossings(scene: Scene, kept: list[Any]) -> None:
    """Copies between devices are ordered with the current streams of both."""
    here, other = scene.busy.device, scene.other_device(scene.busy.device)
    if here == other:
        return
    resting = next(place.small for place in scene.places if place.device == other)
    with scene.backend.use_stream(scene.joined[other]), scene.backend.use_stream(scene.busy.stream):
        for first in range(scene.count // 4 + 1):
            kept.append(scene.subject.put(scene.busy.small[first % 9 :], other, non_blocking=True))
            kept.append(scene.subject.put(resting, here, non_blocking=True))
        kept.append(scene.subject.put(scene.busy.large, other))


def _passing(scene: Scene, kept: list[Any]) -> None:
    """Memory that comes and goes while its work is pending."""
    there = scene.subject.device(scene.busy.device)
    for _ in range(scene.count // 4 + 1):
        passing = torch.zeros(900, device=there) + 1
        del passing
    scene.backend.current_stream(scene.busy.device)


#: What is queued on the busy stream, by name: none of it stops the host.
QUEUED: Final[dict[str, Callable[[Scene, list[Any]], None]]] = {
    "kernels": _kernels,
    "non-blocking moves to the device": _uploads,
    "non-blocking moves to the host": _fetches,
    "events, and waits for them": _events,
    "waits for idle streams, and by others": _waits,
    "a wait in a thread": _waits_in_thread,
    "moves between devices": _crossings,
    "tensors that come and go": _passing,
}

# ---------------------------------------------------------------------- on the others


def _kernel(scene: Scene, place: Place) -> Found:
    place.large.mul_(1)
    return [(place.small * 2 + 1, _SMALL * 2 + 1), (place.small.sum()[None], _SMALL.sum()[None])]


def _put_late(scene: Scene, place: Place) -> Found:
    put = scene.subject.put
    parts = [scene.small, scene.small[7:], scene.large]
    return [(put(part, place.device, non_blocking=True), part) for part in parts]


def _put(scene: Scene, place: Place) -> Found:
    tall = _SMALL.reshape(20, 30)
    parts = [_SMALL, _LARGE, tall.t(), tall[:, 3:7], tall[::2], _SMALL[:1].expand(9), scene.small]
    late = [(part, bool(number % 2)) for number, part in enumerate(parts)]
    return [(scene.subject.put(p, place.device, non_blocking=late), p) for p, late in late]


def _fetch(scene: Scene, place: Place) -> Found:
    tall = place.small.reshape(20, 30)
    parts = [place.small, place.large, tall.t(), tall[:, 3:7], place.small[7:]]
    expected = _SMALL.reshape(20, 30)
    wanted = [_SMALL, _LARGE, expected.t(), expected[:, 3:7], _SMALL[7:]]
    return [(scene.subject.fetch(p), w) for p, w in zip(parts, wanted, strict=True)]


def _fetch_late(scene: Scene, place: Place) -> Found:
    fetch = scene.subject.fetch
    parts = [(place.small, _SMALL), (place.large, _LARGE), (place.small[7:], _SMALL[7:])]
    return [(fetch(part, non_blocking=True), wanted) for part, wanted in parts]


def _cross(scene: Scene, place: Place) -> Found:
    """To the next device, where an idle stream is current, and back."""
    other = scene.other_device(place.device)
    to = [p for p in scene.places if p.device == other and p.stream != place.stream]
    if other == place.device or not to:
        return []
    with scene.backend.use_stream(to[-1].stream), scene.backend.use_stream(place.stream):
        there = [
            scene.subject.put(part, other, non_blocking=late)
            for part, late in itertools.product((place.small, place.large[1:]), (False, True))
        ]
        back = scene.subject.put(there[1], place.device, non_blocking=True)
    return [(back, _SMALL)]


def _pin(scene: Scene, place: Place) -> Found:
    if not scene.pins:
        return []
    found = [(scene.backend.pin_memory(part), part) for part in (_SMALL, _LARGE, _SMALL[::2])]
    moved = [
        (scene.subject.put(pinned, place.device, non_blocking=True), part) for pinned, part in found
    ]
    return [*found, *moved]


def _streams(scene: Scene, place: Place) -> Found:
    """Work on new streams, but for those that drivers hand out again."""
    backend, found = scene.backend, []
    taken = [scene.busy.stream, *scene.joined.values()]
    for stream in [backend.new_stream(place.device) for _ in range(3)]:
        if stream in taken:
            continue
        backend.synchronize_event(backend.record_event(stream))
        with backend.use_stream(stream):
            assert backend.current_stream(place.device) == stream, "STR-002: it is not current"
            value = scene.subject.put(_SMALL, place.device) + 5
        end = backend.record_event(stream)
        backend.wait_event(place.stream, end)
        backend.synchronize_event(end)
        found.append((value, _SMALL + 5))
    return found


def _marks(scene: Scene, place: Place) -> Found:
    """Events of before and of now, and waits for them on the other streams."""
    backend = scene.backend
    backend.synchronize_event(place.event)
    for _ in range(2):  # it passed long ago
        backend.wait_event(place.stream, scene.busy.event)
    for other in scene.places:
        backend.wait_event(other.stream, backend.record_event(place.stream))
        backend.wait_event(place.stream, other.event)
    backend.synchronize_event(backend.record_event(place.stream))
    return []


def _questions(scene: Scene, place: Place) -> Found:
    backend = scene.backend
    assert backend.current_stream(place.device) == place.stream, "STR-002: it is not current"
    for _ in range(2):
        with backend.use_stream(scene.busy.stream):
            backend.current_stream(scene.busy.device)
    return []


#: What is done on the other streams, by name; it gives values of that stream, or of the host.
DONE: Final[dict[str, Callable[[Scene, Place], Found]]] = {
    "kernels": _kernel,
    "non-blocking moves to the device": _put_late,
    "moves to the device": _put,
    "moves to the host": _fetch,
    "non-blocking moves to the host": _fetch_late,
    "moves between devices": _cross,
    "pinning": _pin,
    "new streams": _streams,
    "events": _marks,
    "questions, and use_stream of the busy stream": _questions,
}
