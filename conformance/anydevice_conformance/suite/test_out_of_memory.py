"""OOM: raised, recognised, survived."""
# ruff: noqa: N802 - a check's name carries its paragraph's id

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Final

import psutil
import pytest
import torch

from anydevice_conformance.fullness import QUICKLY, check_neighbour
from anydevice_conformance.marks import two_devices
from anydevice_conformance.measuring import filled, looks_like_host_memory
from anydevice_conformance.outcomes import left_out, not_claimed
from anydevice_conformance.subject import Subject

#: More than any machine has, and what an address can still name.
_ABSURD: Final = 1 << 46
_CHUNKS: Final = 12


def test_OOM_001_too_much_raises(subject: Subject, index: int) -> None:
    """Asking for more memory than the device has raises.

    Found: no exception came, or none that a program can catch.
    Fix: let the allocator check against the device's capacity.
    """
    error = _provoke(subject, index)
    assert isinstance(error, Exception), f"{type(error).__name__} is no ordinary exception"
    assert str(error).strip(), f"{type(error).__name__} has no message"


def test_OOM_002_recognised(subject: Subject, index: int) -> None:
    """`is_out_of_memory` is True for it.

    Found: the device's own error is not recognised.
    Fix: the allocator should raise ``torch.OutOfMemoryError``; where it raises something else,
    override `is_out_of_memory` and look for the driver's words.
    """
    for _ in range(2):
        error = _provoke(subject, index)
        answer = subject.backend.is_out_of_memory(error)
        assert answer is True, f"{answer!r} for {type(error).__name__}: {error!s:.200}"


def test_OOM_003_others_are_not(subject: Subject, index: int) -> None:
    """No other error is taken for it.

    Found: an ordinary error is recognised as out of memory.
    Fix: look for the exception's type, or for the whole phrase of the driver, not for "memory".
    """
    tensor = subject.put(torch.ones(2, 3), index)
    real: dict[str, Callable[[], object]] = {
        "shapes": lambda: tensor @ tensor,
        "memory format": lambda: tensor.contiguous(memory_format=torch.channels_last),
        "view": lambda: tensor.view(7),
        "size": lambda: tensor.reshape(-1, -1),
        "index": lambda: tensor.select(0, 9),
        "attribute": lambda: tensor.no_such_attribute,  # type: ignore[attr-defined]
    }
    for name, provoke in real.items():
        try:
            provoke()
        except Exception as raised:  # noqa: BLE001 - whichever the device raises; it need not
            _assert_other(subject, raised, name)
    kind = subject.type
    for error in (
        RuntimeError(f"{kind} error: an illegal memory access was encountered"),
        RuntimeError(f"{kind} error: device-side assert triggered"),
        RuntimeError(f"{kind} error: device lost"),
        RuntimeError("index 5 is out of bounds for dimension 0 with size 3"),
        RuntimeError("unable to open shared memory object </torch_1> in read-write mode"),
        RuntimeError("view size is not compatible: memory layout"),
        RuntimeError("Expected all tensors to be on the same device"),
        ValueError("out of range"),
        KeyError("memory"),
        NotImplementedError("memory_info"),
        TimeoutError("out of time"),
        KeyboardInterrupt(),
        SystemExit(1),
    ):
        _assert_other(subject, error, "")
    later = ValueError("no such layer")  # raised while the device's own error was handled
    later.__context__ = _provoke(subject, index)
    _assert_other(subject, later, "one that came after a lack of memory")
    if not subject.is_host:
        host = RuntimeError(
            "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate "
            "memory: you tried to allocate 70368744177664 bytes. Error code 12"
        )
        for lack in (host, MemoryError("the host has no more")):
            _assert_other(subject, lack, "the host's lack of memory")


def test_OOM_004_device_works_on(subject: Subject, index: int) -> None:
    """After the error small work is right, and the memory can be allocated again.

    Found: the device fails after an out-of-memory error, or memory is lost.
    Fix: leave no half-made block in the allocator; free its cache before giving up.
    """
    before = _free(subject, index)
    for _ in range(3):
        _provoke(subject, index)
        gc.collect()
        tensor = subject.put(torch.arange(1000.0), index)
        found = subject.fetch(tensor * 2)
        assert torch.equal(found, torch.arange(1000.0) * 2), "wrong results after the error"
        del tensor
    if before is not None and not subject.is_host:
        size = min(before // 2, 64 << 20)
        again = filled(subject, index, size)
        assert again[-1].item() == 1, "memory that was free before the error is no longer"


def test_OOM_005_filling_up(subject: Subject) -> None:
    """Filling the memory in steps raises before the total is exceeded; deleting makes room again.

    Found: more was given than there is, the error is not recognised, or room does not come back.
    Fix: count what is allocated against the capacity, also in small pieces.
    """
    index = min(subject.indices, key=lambda i: subject.memory(i).total)
    if looks_like_host_memory(subject, index):
        left_out("the device's memory looks like the host's: filling it could harm the machine")
    total = subject.memory(index).total
    for turn in range(2):
        given, error = _fill(subject, index, total, max(4096, total // _CHUNKS))
        if error is None:
            not_claimed("the device takes its memory from the host, and has no limit of its own")
        assert given <= total, f"turn {turn}: {given} bytes were given of {total}"
        assert subject.backend.is_out_of_memory(error), (
            f"turn {turn}: not recognised: {type(error).__name__}: {error!s:.200}"
        )
        assert given >= total // 2, f"turn {turn}: full after {given} bytes of {total}"
        del error
        gc.collect()


def _fill(subject: Subject, index: int, total: int, size: int) -> tuple[int, BaseException | None]:
    """Make tensors until an error comes; returns the bytes that were given, and the error.

    No error up to twice the total (of a large device, a quarter more than it) means no limit, where
    the host loses what the device takes (a device of software does so). Anywhere else it means that
    the device reports memory that it does not have.
    """
    held: list[torch.Tensor] = []
    process = psutil.Process()
    before, own = psutil.virtual_memory().available, process.memory_info().rss
    roomy = before > 4 * total
    beyond = max(size, total if total < 1 << 30 else total // 4) if roomy else size
    most = total + beyond
    while len(held) * size <= most:
        try:
            held.append(filled(subject, index, size))
        except Exception as caught:  # noqa: BLE001 - the device's own
            given = len(held) * size
            held.clear()
            return given, caught.with_traceback(None)
    given = len(held) * size
    # By this process's own share, too: what others give back meanwhile hides what the host lost.
    lost = max(before - psutil.virtual_memory().available, process.memory_info().rss - own)
    assert roomy, f"{given} bytes were given of {total}"
    assert lost > given // 2, f"{given} bytes were given of {total}, and not from the host's memory"
    return given, None


def test_OOM_007_answers_for_anything(subject: Subject) -> None:
    """`is_out_of_memory` returns a bool for every exception, and never raises.

    Found: it raised, or returned something else.
    Fix: work on ``str(error)`` and ``isinstance``; do not index ``error.args``.
    """

    class OddError(Exception):
        args = ()

        def __str__(self) -> str:
            return ""

    class MuteError(RuntimeError):
        def __str__(self) -> str:
            raise TypeError("it has no words")

        __repr__ = object.__repr__

    chained = RuntimeError("outer")
    chained.__cause__ = ValueError("inner")
    group: list[BaseException] = [
        OddError(),
        MuteError(),
        Exception(),
        RuntimeError(),
        RuntimeError(7),
        chained,
    ]
    group += [
        KeyboardInterrupt(),
        GeneratorExit(),
        OSError(12, "no"),
        UnicodeError(),
        StopIteration(),
    ]
    for error in group:
        try:
            answer = subject.backend.is_out_of_memory(error)
        except Exception as raised:  # noqa: BLE001 - the finding itself
            pytest.fail(f"raised {type(raised).__name__} for {error!r}: {raised}")
        assert type(answer) is bool, f"returned {answer!r} for {error!r}"


@two_devices
def test_OOM_008_neighbour_untouched(subject: Subject) -> None:
    """When one device is full, the other allocates and computes.

    Found: one device's limit is the other's, or work there takes memory here.
    Fix: keep an allocator for each device, and workspaces, staging and events where the work is.
    """
    for full, free in subject.both_ways():
        if looks_like_host_memory(subject, full):
            left_out("the device's memory looks like the host's: filling it could harm the machine")
        if subject.quick and subject.memory(full).total > QUICKLY:
            left_out("filling a large device takes long: without --quick")
        check_neighbour(subject, full, free)


def _provoke(subject: Subject, index: int) -> BaseException:
    """Ask for too much; returns the error that came."""
    sizes = [_ABSURD] if subject.is_host else [_total(subject, index) * 2, _ABSURD]
    for size in sizes:
        try:
            tensor = torch.empty(size, dtype=torch.uint8, device=subject.device(index))
        except Exception as error:  # noqa: BLE001 - whichever the device raises
            gc.collect()
            return error.with_traceback(None)
        got = tensor.nbytes
        del tensor
        if subject.told(index) is None or not looks_like_host_memory(subject, index):
            break
    raise AssertionError(f"device {index} gave {got} bytes, and has {_total(subject, index)}")


def _total(subject: Subject, index: int) -> int:
    try:
        return max(subject.backend.memory_info(index).total, 1 << 20)
    except NotImplementedError:
        return _ABSURD // 2


def _free(subject: Subject, index: int) -> int | None:
    try:
        return subject.backend.memory_info(index).free
    except NotImplementedError:
        return None


def _assert_other(subject: Subject, error: BaseException, name: str) -> None:
    assert not subject.backend.is_out_of_memory(error), (
        f"taken for out of memory: {name} {type(error).__name__}: {error!s:.200}"
    )
