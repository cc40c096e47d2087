"""Ways in which a stream becomes the current one, and ceases to be it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

import torch

from anydevice_conformance.subject import Subject
from anydevice_conformance.threads import in_thread

__all__ = ["WAYS", "made_current_by_torch", "work_on"]

T = TypeVar("T")


class _Left(Exception):  # noqa: N818 - no fault
    """Leaves a context early."""


def _used(subject: Subject, stream: Any, work: Callable[[], T]) -> T:
    with subject.backend.use_stream(stream):
        return work()


def _left_by_error(subject: Subject, stream: Any, work: Callable[[], T]) -> T:
    found: list[T] = []
    with contextlib.suppress(_Left), subject.backend.use_stream(stream):
        found.append(work())
        raise _Left
    return found[0]


def _nested(subject: Subject, stream: Any, work: Callable[[], T]) -> T:
    with subject.backend.use_stream(stream), subject.backend.use_stream(stream):
        return work()


def _in_thread(subject: Subject, stream: Any, work: Callable[[], T]) -> T:
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def there() -> T:
        with torch.inference_mode(modes[1]), torch.set_grad_enabled(modes[0]):
            return _used(subject, stream, work)

    return in_thread(there)


def _by_torch(subject: Subject, stream: Any, work: Callable[[], T]) -> T:
    with made_current_by_torch(subject, stream):
        return work()


@contextlib.contextmanager
def made_current_by_torch(subject: Subject, stream: Any) -> Iterator[None]:
    """Make a stream the current one as a user of torch alone does, where the device has that.

    The device of the stream is the current one meanwhile.
    """
    module = subject.module
    setter = getattr(module, "set_stream", None)
    current, get_device, set_device = (
        getattr(module, name, None) for name in ("current_stream", "current_device", "set_device")
    )
    if None in (setter, current, get_device, set_device):
        with subject.backend.use_stream(stream):
            yield
        return
    device, before = get_device(), current(stream.device.index)  # type: ignore[misc]
    setter(stream)  # type: ignore[misc]
    set_device(stream.device.index)  # type: ignore[misc]
    try:
        yield
    finally:
        setter(before)  # type: ignore[misc]
        set_device(device)  # type: ignore[misc]


#: Each does some work while a stream is the current one.
WAYS: Final[dict[str, Callable[[Subject, Any, Callable[[], Any]], Any]]] = {
    "use_stream": _used,
    "use_stream that an error leaves": _left_by_error,
    "torch's own setter": _by_torch,
    "use_stream in a thread": _in_thread,
    "use_stream in use_stream": _nested,
}


def work_on(subject: Subject, stream: Any, way: str, work: Callable[[], T]) -> T:
    """Do ``work`` while the stream is the current one; ``way`` is a key of `WAYS`."""
    found: T = WAYS[way](subject, stream, work)
    return found
