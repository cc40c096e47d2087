"""In what situation a member is called: current device and stream, thread, gradient mode."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

import torch
from hypothesis import strategies as st

from anydevice.backend import torchs_accelerator
from anydevice_conformance.ambients import AMBIENTS, OF_SITUATIONS
from anydevice_conformance.stream_ways import made_current_by_torch
from anydevice_conformance.subject import Subject
from anydevice_conformance.threads import in_thread

__all__ = [
    "MODES",
    "Situation",
    "State",
    "parts_of_situations",
    "run_in",
    "situations",
    "state",
    "surroundings",
]

T = TypeVar("T")

#: Gradient modes by name.
MODES: Final[dict[str, Callable[[], Any]]] = {
    "enable_grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


@dataclasses.dataclass(frozen=True)
class Situation:
    """Where a member is called.

    Attributes:
        index: the device that it is called for.
        current: the device that is the current one meanwhile.
        side_stream: whether another stream than the default one is current on ``index``.
        thread: whether it is called in a thread of its own.
        mode: the gradient mode, a key of `MODES`.
        ambient: torch's defaults meanwhile, a key of `AMBIENTS`.
        elsewhere: whether a side stream is current on the device that comes after it.
        by_torch: whether torch made those streams current, not the backend's `use_stream`.
    """

    index: int = 0
    current: int = 0
    side_stream: bool = False
    thread: bool = False
    mode: str = "enable_grad"
    ambient: str = ""
    elsewhere: bool = False
    by_torch: bool = False

    def __repr__(self) -> str:
        words = [f"device {self.index}", f"current device {self.current}"]
        if self.side_stream:
            words.append("side stream")
        if self.elsewhere:
            words.append("side stream of the next device")
        if self.by_torch and (self.side_stream or self.elsewhere):
            words.append("by torch's own setter")
        if self.thread:
            words.append("in a thread")
        if self.mode != "enable_grad":
            words.append(self.mode)
        if self.ambient:
            words.append(self.ambient)
        return f"<{', '.join(words)}>"


def parts_of_situations(subject: Subject) -> dict[str, list[Any]]:
    """What each attribute of a situation can be with the backend; the plainest value first."""
    if subject.capabilities.streams:
        for index in subject.indices:  # made now, so that they are no leak of what follows
            side_stream(subject, index)
    settable = hasattr(subject.module, "set_device") and not subject.is_host
    return {
        "index": subject.indices,
        "current": subject.indices if settable else [0],
        "side_stream": [False, True] if subject.capabilities.streams else [False],
        "elsewhere": [False, True][: len(subject.indices) if subject.capabilities.streams else 1],
        "by_torch": [False, True] if subject.capabilities.streams and settable else [False],
        "thread": [False, True],
        "mode": [m for m in MODES if m != "inference_mode" or subject.infers],
        "ambient": OF_SITUATIONS,
    }


def situations(subject: Subject) -> st.SearchStrategy[Situation]:
    """Every situation that the backend can be in; most often the plain ones."""
    parts = parts_of_situations(subject)
    parts["thread"] = [False, False, False, True]
    parts["ambient"] = [""] * 5 + parts["ambient"]
    return st.builds(Situation, **{name: st.sampled_from(found) for name, found in parts.items()})


@contextlib.contextmanager
def surroundings(subject: Subject) -> Iterator[None]:
    """The defaults of the situation that the thread is in, for one call, which must leave them."""
    with AMBIENTS[_here.ambient](subject):
        before = _defaults(subject)
        yield
        after = _defaults(subject)
        assert before == after, f"DEV-012: torch's defaults were {before}, and are {after}"


def _defaults(subject: Subject) -> tuple[Any, ...]:
    return (
        torch.get_default_dtype(),
        torch.get_default_device(),
        _autocasts(subject.type),
        _autocasts("cpu"),
        torch.are_deterministic_algorithms_enabled(),
        torch._C._is_multithreading_enabled(),
    )


class _Here(threading.local):
    ambient = ""


_here: Final = _Here()


def run_in(subject: Subject, situation: Situation, work: Callable[[], T]) -> T:
    """Do ``work`` in a situation, and put everything back."""
    if not situation.thread:
        return _run_here(subject, situation, work)
    return in_thread(lambda: _run_here(subject, situation, work))


def _run_here(subject: Subject, situation: Situation, work: Callable[[], T]) -> T:
    with contextlib.ExitStack() as stack:
        stack.enter_context(_current(subject, situation.current))
        following = (situation.index + 1) % len(subject.indices)
        for index in [situation.index] * situation.side_stream + [following] * situation.elsewhere:
            stream = side_stream(subject, index)
            stack.enter_context(_on_stream(subject, stream, situation))
        stack.enter_context(MODES[situation.mode]())
        stack.callback(setattr, _here, "ambient", _here.ambient)
        _here.ambient = situation.ambient
        return work()


def side_stream(subject: Subject, index: int) -> Any:
    """A stream that is kept for situations; one for each device."""
    kept: dict[int, Any] = subject.__dict__.setdefault("_side_streams", {})
    if index not in kept:
        kept[index] = subject.backend.new_stream(index)
    return kept[index]


@contextlib.contextmanager
def _current(subject: Subject, index: int) -> Iterator[None]:
    """Make a device the current one by the device's own module, and put the old one back."""
    module = subject.module
    set_device = getattr(module, "set_device", None)
    if set_device is None or subject.is_host:
        yield
        return
    before = current_device(subject)
    set_device(index)
    try:
        yield
    finally:
        set_device(before if before is not None else index)


@contextlib.contextmanager
def _on_stream(subject: Subject, stream: Any, situation: Situation) -> Iterator[None]:
    """Make a stream the current one of its device, and leave the current device as it is."""
    set_device = getattr(subject.module, "set_device", None)
    by_torch = situation.by_torch
    with made_current_by_torch(subject, stream) if by_torch else subject.backend.use_stream(stream):
        if set_device is not None:
            set_device(situation.current)
        yield


def current_device(subject: Subject) -> int | None:
    """The calling thread's current device; None where the device does not tell."""
    if subject.is_host:
        return None
    functions = [getattr(subject.module, "current_device", None)]
    if torchs_accelerator() == subject.type:
        functions.append(torch.accelerator.current_device_index)
    for function in functions:
        try:
            return int(function())  # type: ignore[misc]
        except Exception:  # noqa: BLE001 - it does not tell: ask the next
            continue
    return None


@dataclasses.dataclass(frozen=True)
class State:
    """What a call must leave as it was."""

    device: int | None
    streams: tuple[Any, ...]
    grad: bool
    inference: bool
    dtype: torch.dtype
    default_device: torch.device
    threads: int
    generator: bytes
    deterministic: bool
    autocast: tuple[bool, bool]

    def differences(self, other: State) -> str:
        """What is different, in words; empty when nothing is."""
        words = {
            "device": "the current device",
            "streams": "the current streams",
            "grad": "the gradient mode",
            "inference": "inference mode",
            "dtype": "the default dtype",
            "default_device": "the default device",
            "threads": "torch's number of threads",
            "generator": "the state of the host's random generator",
            "deterministic": "the choice of deterministic algorithms",
            "autocast": "autocast",
        }
        found = []
        for name, word in words.items():
            one, two = getattr(self, name), getattr(other, name)
            if one != two:
                shown = "" if name == "generator" else f": {one} became {two}"
                found.append(f"{word} changed{shown}")
        return "; ".join(found)


def state(subject: Subject) -> State:
    """The calling thread's state."""
    streams: tuple[Any, ...] = ()
    if subject.capabilities.streams:
        streams = tuple(_stream_of(subject, index) for index in subject.indices)
    return State(
        current_device(subject),
        streams,
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.get_num_threads(),
        # The host's generator is the host's own device's.
        b"" if subject.is_host else torch.default_generator.get_state().numpy().tobytes(),
        torch.are_deterministic_algorithms_enabled(),
        (_autocasts(subject.type), _autocasts("cpu")),
    )


def _autocasts(device_type: str) -> bool:
    try:
        return torch.is_autocast_enabled(device_type)
    except RuntimeError:  # torch has none for such a device
        return False


def _stream_of(subject: Subject, index: int) -> Any:
    """The current stream by the device's own word, where it has one: the backend's may be wrong."""
    own = getattr(subject.module, "current_stream", None)
    try:
        return own(index) if own is not None else subject.backend.current_stream(index)
    except Exception:  # noqa: BLE001 - ask the backend
        return subject.backend.current_stream(index)


@contextlib.contextmanager
def restored(subject: Subject) -> Iterator[None]:
    """Put back what a broken member may have changed, so that it misleads no other check."""
    before = state(subject)
    try:
        yield
    finally:
        torch.set_default_dtype(before.dtype)
        torch.set_num_threads(before.threads)
        torch.set_grad_enabled(before.grad)
        if torch.get_default_device() != before.default_device:
            torch.set_default_device(None)
        set_device = getattr(subject.module, "set_device", None)
        set_stream = getattr(subject.module, "set_stream", None)
        if set_stream is not None and before.streams:
            for stream in before.streams:
                with contextlib.suppress(Exception):
                    set_stream(stream)
        if set_device is not None and before.device is not None:
            set_device(before.device)
