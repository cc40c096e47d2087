"""The rules: which member is wrong in which way, and when."""

from __future__ import annotations

import functools
import random
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from mutants.gallery import Fault, Mutant

from anydevice.backend import MemoryInfo
from mutation.triggers import MOVE_TRIGGERS, TRIGGERS, Call
from mutation.wrongs import EFFECTS, MOVES, Right

__all__ = ["GROUPS_OF", "made", "member_of"]

Wrong = Callable[[Call, Right], Any]

#: A member to the groups of checks that may find a fault of it.
GROUPS_OF: Final[dict[str, tuple[str, ...]]] = {
    "move": ("MOV", "STR", "PIN", "MEM", "DEV", "OOM"),
    "pin_memory": ("PIN", "DEV", "MEM", "STR"),
    "memory_info": ("MEM", "DEV", "OOM"),
    "memory_allocated": ("MEM", "DEV"),
    "peak_memory_allocated": ("MEM", "DEV"),
    "reset_peak_memory": ("MEM", "DEV"),
    "empty_cache": ("MEM", "DEV"),
    "device_name": ("DEV", "MEM"),
    "device_count": ("DEV", "MEM"),
    "is_available": ("DEV", "MEM"),
    "is_out_of_memory": ("OOM", "DEV", "MEM"),
    "synchronize": ("MOV", "STR", "DEV", "MEM"),
    "new_stream": ("STR", "DEV", "MEM"),
    "current_stream": ("STR", "DEV", "MEM"),
    "use_stream": ("STR", "DEV", "MEM"),
    "record_event": ("STR", "DEV", "MEM"),
    "wait_event": ("STR", "DEV", "MEM"),
    "synchronize_event": ("STR", "DEV", "MEM"),
    "supports_dtype": ("DTY", "DEV", "MEM"),
    "manual_seed_all": ("RNG", "DEV", "MEM"),
    "rng_state": ("RNG", "DEV", "MEM"),
    "set_rng_state": ("RNG", "DEV", "MEM"),
}
_TENSORS: Final = ("move", "pin_memory")
_STREAMS: Final = ("use_stream", "record_event", "wait_event")
#: Effects that would not be wrong in these members.
_HARMLESS: Final[dict[str, tuple[str, ...]]] = {
    "move": ("it raises",),
    "synchronize": ("the devices are waited for",),
    "current_stream": ("pinned memory is left",),
    "use_stream": ("the current stream changes", "the current device changes"),
    "memory_info": ("the devices are waited for",),
    "memory_allocated": ("the devices are waited for",),
    "peak_memory_allocated": ("the devices are waited for",),
    "reset_peak_memory": ("the devices are waited for",),
    "empty_cache": ("the devices are waited for",),
    "device_name": ("the devices are waited for",),
    "device_count": ("the devices are waited for", "pinned memory is left"),
    "is_available": ("the devices are waited for",),
    "is_out_of_memory": ("the devices are waited for",),
    "supports_dtype": ("the devices are waited for",),
    "manual_seed_all": ("the devices are waited for",),
    "rng_state": ("the devices are waited for",),
    "set_rng_state": ("the devices are waited for",),
    "pin_memory": ("the source is kept",),
}


def _index_of(member: str, args: tuple[Any, ...]) -> int | None:
    if member == "move":
        here, there = args[0].device, args[1]
        mine = there if there.type != "cpu" else here
        return mine.index if mine.type != "cpu" else None
    if member in _STREAMS:
        return args[0].device.index or 0
    ints = [a for a in args if type(a) is int]
    return ints[-1] if ints and member != "manual_seed_all" else None


def _fault(member: str, wrong: Wrong, trigger: Callable[[Call], bool]) -> type[Fault]:
    """A class whose member is wrong when the trigger says so."""
    lock = threading.local()

    def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
        right = functools.partial(getattr(super(fault, self), member), *args, **kwargs)
        if getattr(lock, "inside", False):
            return right()
        tensor = args[0] if member in _TENSORS else None
        device = args[1] if member == "move" else None
        key = f"_calls_{member}"
        call = Call(
            self,
            vars(self).get(key, 0),
            _index_of(member, args),
            tensor,
            device,
            bool(kwargs.get("non_blocking")),
        )
        vars(self)[key] = call.count + 1
        lock.inside = True
        try:
            shows = trigger(call)
        finally:
            lock.inside = False
        return wrong(call, right) if shows else right()

    fault: type[Fault] = type("Made", (Fault,), {member: broken, "__doc__": ""})
    return fault


# ---------------------------------------------------------------------- wrong answers by member


def _info(change: Callable[[Any, int, MemoryInfo], MemoryInfo]) -> Wrong:
    return lambda call, right: change(call.backend, call.index or 0, right())


def _nothing(call: Call, right: Right) -> None:
    return None


def _other_index(member: str) -> Wrong:
    def wrong(call: Call, right: Right) -> Any:
        other = (call.index + 1) % call.backend.module.device_count()
        return right.func(other, *right.args[1:], **right.keywords)  # type: ignore[attr-defined]

    return wrong


def _constant(value: Any) -> Wrong:
    return lambda call, right: value


def _stale(call: Call, right: Right) -> Any:
    """What it was at the first call that went wrong."""
    known = vars(call.backend).setdefault("_known", {})
    if call.index not in known:
        known[call.index] = right()
    return known[call.index]


def _waits_for_stream_only(call: Call, right: Right) -> None:
    call.backend.module.current_stream(call.index or 0).synchronize()


def _waits_for_default_only(call: Call, right: Right) -> None:
    call.backend.module.default_stream(call.index or 0).synchronize()


def _event_elsewhere(call: Call, right: Right) -> Any:
    device = torch.device(call.backend.device_type, call.index or 0)
    return torch.Stream(device=device).record_event()


def _event_recycled(size: int) -> Wrong:
    def wrong(call: Call, right: Right) -> Any:
        ring = vars(call.backend).setdefault("_ring", [])
        if len(ring) < size:
            ring.append(torch.Event(device=torch.device(call.backend.device_type, call.index or 0)))
            event = ring[-1]
        else:
            event = ring.pop(0)
            ring.append(event)
        right.args[0].record_event(event)  # type: ignore[attr-defined]
        return event

    return wrong


def _host_waits(call: Call, right: Right) -> Any:
    event = right.args[-1]  # type: ignore[attr-defined]
    event.synchronize()
    return right()


def _stream_waits_too_much(call: Call, right: Right) -> Any:
    found = right()
    call.backend.module.synchronize(call.index or 0)
    return found


def _repeats(size: int) -> Wrong:
    def wrong(call: Call, right: Right) -> Any:
        pool = vars(call.backend).setdefault("_pool", {}).setdefault(call.index, [])
        if len(pool) < size:
            pool.append(right())
            return pool[-1]
        pool.append(pool.pop(0))
        return pool[-1]

    return wrong


def _state_is_cut(call: Call, right: Right) -> Any:
    state = right().clone()
    state[len(state) // 2 :] = 0
    return state


def _tuple(call: Call, right: Right) -> Any:
    found = right()
    return (found.free, found.total)


_ANSWERS: Final[dict[str, dict[str, Wrong]]] = {
    "memory_info": {
        "it is the other device's": _other_index("memory_info"),
        "free is total": _info(lambda b, i, m: MemoryInfo(free=m.total, total=m.total)),
        "free is an eighth too high": _info(
            lambda b, i, m: MemoryInfo(free=min(m.total, m.free + m.total // 8), total=m.total)
        ),
        "free is half": _info(lambda b, i, m: MemoryInfo(free=m.free // 2, total=m.total)),
        "total is less": _info(
            lambda b, i, m: MemoryInfo(free=min(m.free, m.total // 2), total=m.total // 2)
        ),
        "it is what it was": _stale,
        "it is a tuple": _tuple,
        "the cache is not counted": _info(
            lambda b, i, m: MemoryInfo(
                free=max(0, m.free - b._anydevice_cached_bytes(i)), total=m.total
            )
        ),
    },
    "memory_allocated": {
        "it is the other device's": _other_index("memory_allocated"),
        "it is 0": _constant(0),
        "it is what it was": _stale,
        "it is a float": lambda call, right: float(right()),
    },
    "peak_memory_allocated": {
        "it is the other device's": _other_index("peak_memory_allocated"),
        "it is what it was": _stale,
        "it is what is there now": lambda call, right: call.backend.memory_allocated(call.index),
    },
    "reset_peak_memory": {
        "nothing happens": _nothing,
        "the other device's is reset": _other_index("reset_peak_memory"),
    },
    "empty_cache": {
        "nothing happens": _nothing,
        "the other device's is emptied": _other_index("empty_cache"),
    },
    "device_name": {
        "it is the other device's": lambda call, right: None,
        "it is bytes": lambda call, right: right().encode(),
    },
    "device_count": {
        "it is text": lambda call, right: str(right()),
        "it is one less": lambda call, right: right() - 1,
    },
    "is_available": {"it is None": _constant(None), "it is False": _constant(False)},
    "is_out_of_memory": {
        "it is False": _constant(False),
        "it is True": _constant(True),
        "it is None": _constant(None),
        "any RuntimeError is": lambda call, right: (
            right() or isinstance(right.args[0], RuntimeError)
        ),
        "its text decides": lambda call, right: "memory" in str(right.args[0]),
    },
    "synchronize": {
        "nothing happens": _nothing,
        "the current stream is waited for": _waits_for_stream_only,
        "the default stream is waited for": _waits_for_default_only,
        "the other device is waited for": _other_index("synchronize"),
    },
    "new_stream": {
        "it is of the other device": _other_index("new_stream"),
        "there are two": _repeats(2),
        "it is the current one": lambda call, right: call.backend.module.current_stream(call.index),
        "it is the default one": lambda call, right: call.backend.module.default_stream(call.index),
    },
    "current_stream": {
        "it is of the other device": _other_index("current_stream"),
        "it is the default one": lambda call, right: call.backend.module.default_stream(call.index),
    },
    "record_event": {
        "it is of an empty stream": _event_elsewhere,
        "two serve in turn": _event_recycled(2),
        "sixteen serve in turn": _event_recycled(16),
        "the host waits for it": lambda call, right: (right.args[0].synchronize(), right())[1],
        "the device stops": _stream_waits_too_much,
    },
    "wait_event": {
        "nothing happens": _nothing,
        "the host waits": _host_waits,
        "the device stops": _stream_waits_too_much,
    },
    "synchronize_event": {
        "nothing happens": _nothing,
        "the device stops": lambda call, right: call.backend.module.synchronize(),
    },
    "supports_dtype": {
        "it is True": _constant(True),
        "it is False": _constant(False),
        "it is None for some": lambda call, right: right() or None,
    },
    "manual_seed_all": {
        "nothing happens": _nothing,
        "32 bits count": lambda call, right: right.func(right.args[0] & 0xFFFFFFFF),
        "the current device is seeded": lambda call, right: call.backend.module.manual_seed(
            right.args[0]
        ),
    },
    "rng_state": {
        "it is the other device's": _other_index("rng_state"),
        "it is cut": _state_is_cut,
    },
    "set_rng_state": {"nothing happens": _nothing},
}
#: The triggers that are worth a try for members that take no tensor.
_PLAIN: Final = (
    "always",
    "on device 1",
    "while another device is current",
    "while device 1 is current",
    "in a thread",
    "in every 40th call",
    "after 150 calls",
    "under inference mode",
)


def _combinations() -> Iterator[tuple[str, str, Wrong, str, Callable[[Call], bool]]]:
    for member in GROUPS_OF:
        triggers = dict(TRIGGERS)
        wrongs = dict(EFFECTS) if member != "move" else {**MOVES, **EFFECTS}
        if member in _TENSORS:
            triggers.update(MOVE_TRIGGERS)
        if member == "pin_memory":
            kinds = (
                "the last element is lost",
                "digits are lost",
                "the source changes",
                "one result serves two calls",
                "the result is kept",
                "a bit flips",
            )
            wrongs.update({k: MOVES[k] for k in kinds})
        wrongs.update(_ANSWERS.get(member, {}))
        for name in _HARMLESS.get(member, ()):
            wrongs.pop(name, None)
        for way, wrong in wrongs.items():
            for when, trigger in triggers.items():
                if (
                    member in _TENSORS
                    or when in _PLAIN
                    or (when == "on a side stream" and way in ("it raises", "nothing happens"))
                ):
                    yield member, way, wrong, when, trigger


_GRADIENTS: Final = ("the graph is lost", "a gradient is asked for")
_WITHOUT_GRADIENTS: Final = ("int16", "uint8", "bool", "float8", "integers", "inference", "no_grad")


def _can_be(member: str, way: str, when: str) -> bool:
    """Whether there is such a fault: not, where the condition can never hold."""
    index_free = member in (
        "is_available",
        "device_count",
        "is_out_of_memory",
        "supports_dtype",
        "manual_seed_all",
        "synchronize_event",
    )
    if index_free and when in (
        "on device 1",
        "while another device is current",
        "on a side stream",
    ):
        return False
    if way in _GRADIENTS and any(word in when for word in _WITHOUT_GRADIENTS):
        return False  # there is no gradient to lose or to ask for
    return not (
        member == "pin_memory"
        and (
            "devices" in when
            or "host" in when
            or "device 1" in when
            or "another" in when
            or "pinned" in when
        )
    )


@functools.cache
def made(share: float = 1.0, seed: int = 0) -> dict[str, Mutant]:
    """All mutants that the rules make, by name."""
    found: dict[str, Mutant] = {}
    for member, way, wrong, when, trigger in _combinations():
        if not _can_be(member, way, when):
            continue
        name = re.sub(r"[^a-z0-9]+", "-", f"{member}: {way} {when}".lower()).strip("-")
        fault = _fault(member, wrong, trigger)
        fault.__doc__ = f"`{member}`: {way}, {when}."
        fault.__name__ = name
        found[name] = Mutant(name, "", fault)
    return found


def chosen(count: int, seed: int = 0) -> list[str]:
    """A sample of ``count`` mutants, each member in proportion to its ways and places."""
    by_member: dict[str, list[str]] = {}
    for name in made():
        by_member.setdefault(member_of(name), []).append(name)
    dice = random.Random(seed)
    weights = {"move": 0.38, "pin_memory": 0.06}
    rest = (1 - sum(weights.values())) / (len(by_member) - len(weights))
    found: list[str] = []
    for member, names in by_member.items():
        share = max(1, round(count * weights.get(member, rest)))
        found += dice.sample(names, min(share, len(names)))
    return found


def member_of(name: str) -> str:
    """The member that a mutant breaks."""
    return made()[name].story.split("`")[1]
