"""One rank's side of the generated programs of collectives: it does each turn, and judges it."""

from __future__ import annotations

import contextlib
import datetime
import gc
import itertools
import random
import time
import warnings
from typing import Any, Final

import torch
import torch.distributed as dist

from anydevice_conformance.rank_call import Accepted, Begun
from anydevice_conformance.rank_form import Members
from anydevice_conformance.rank_programs import Turn, programs
from anydevice_conformance.threads import in_thread

__all__ = ["try_programs"]

#: Bytes that may be left over when all is done: what a group keeps for itself.
_LEFT: Final = 1 << 12
_PATIENCE: Final = 5.0
#: Groups that stay.
_KEPT: Final = ("default", "all", "alone")


#: With what groups are made.
_OPTIONS: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"timeout": datetime.timedelta(seconds=90)},
    {"group_desc": "some"},
    {"timeout": datetime.timedelta(seconds=90), "group_desc": "others"},
)


class _Ranks:
    """The side of one rank: its streams and groups."""

    def __init__(self, backend: Any, device: torch.device, rank: int, world: int) -> None:
        self.backend, self.device, self.rank, self.world = backend, device, rank, world
        streams = device.type != "cpu" and backend.capabilities.streams
        self.streams = [backend.new_stream(device.index) for _ in range(2)] if streams else []
        self.kept = {name: self._new(name, 0) for name in _KEPT}
        self.accepted = {1: Accepted(), world: Accepted()}

    def _new(self, team: str, seed: int) -> Members:
        everyone = tuple(range(self.world))
        if team == "default":
            return Members(None, everyone, self.rank)
        options = _OPTIONS[seed % len(_OPTIONS)]
        if "alone" not in team:  # a group's ranks are in order, however they are listed
            listed = everyone[::-1] if seed % 2 else everyone
            return Members(dist.new_group(list(listed), **options), everyone, self.rank)
        groups = [dist.new_group([rank], **options) for rank in everyone]  # all ranks make all
        return Members(groups[self.rank], (self.rank,), 0)

    def on(self, number: int) -> contextlib.AbstractContextManager[Any]:
        """A stream as the current one, where there are any."""
        if not number or not self.streams:
            return contextlib.nullcontext()
        on: contextlib.AbstractContextManager[Any] = self.backend.use_stream(
            self.streams[number - 1]
        )
        return on

    def take(self, turn: Turn) -> str:
        """Do a turn; returns what is wrong, or nothing."""
        if not turn.thread:
            return self._take(turn)

        def work() -> str:
            if self.device.index is not None:
                self.backend.set_device(self.device.index)
            return self._take(turn)

        return in_thread(work)

    def _take(self, turn: Turn) -> str:
        before = self._around()
        members = self.kept.get(turn.team) or self._new(turn.team, turn.seed)
        if turn.slow == self.rank:
            time.sleep(0.02)
        mode = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
        with mode.get(turn.mode, torch.enable_grad)():
            found = self._do(turn, members)
        if turn.team not in self.kept:
            dist.destroy_process_group(members.group)
        if self._around() != before:
            found = found or f"the thread's device, streams, modes or defaults changed, in {turn!r}"
        return found

    def _do(self, turn: Turn, members: Members) -> str:
        under_way = []
        accepted = self.accepted[members.size]
        with self.on(turn.begun):
            there = self._around()
            for call in itertools.chain.from_iterable(map(accepted.with_trials, turn.calls)):
                begun = Begun(self.device, call, members, accepted)
                if call.refused:
                    begun.refuse()
                if begun.begin():
                    under_way.append(begun)
                    if not begun.waits:
                        begun.take_out()
            begun_in = self._around()
        order = random.Random(turn.seed + self.rank).sample(under_way, len(under_way))
        with self.on(turn.waited):
            for begun in order:
                if not begun.waits:
                    continue
                if begun.wait():
                    begun.take_out()
                else:
                    under_way.remove(begun)
        wrong = [begun.wrong() for begun in under_way]
        if begun_in != there:
            wrong.append(f"the thread's device, streams, modes or defaults changed, in {turn!r}")
        return next(filter(None, wrong), "")

    def _around(self) -> tuple[Any, ...]:
        """What collectives leave as it is, of the calling thread and of the process."""
        index, host = self.device.index, self.device.type == "cpu"
        return (
            None if host else self.backend.current_device(),
            self.backend.current_stream(index) if self.streams else None,
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_default_dtype(),
            torch.get_default_device(),
            torch.get_num_threads(),
            torch.default_generator.get_state().numpy().tobytes(),
        )


def try_programs(
    backend: Any, device: torch.device, rank: int, world: int, count: int, seed: int, infers: bool
) -> dict[str, str]:
    """Do them all; returns by paragraph what went wrong first, or nothing.

    The ranks stay in step unless one raises, which ends it.
    """
    ranks = _Ranks(backend, device, rank, world)
    found: dict[str, str] = {}
    before = _held(backend, device)
    for turn in programs(backend, count, seed, world, infers):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's, of names that it has newer ones for
                wrong = ranks.take(turn)
        except Exception as error:  # noqa: BLE001 - reported
            found["COL-013"] = f"{type(error).__name__}: {error!s:.300}\ncounterexample: {turn!r}"
            return found
        if wrong:
            found.setdefault("COL-013", f"{wrong}\ncounterexample: {turn!r}")
    found.update(_left_over(backend, device, before))
    return found


def _held(backend: Any, device: torch.device) -> int | None:
    """Bytes of tensors on the device; None where it does not say."""
    gc.collect()
    index = device.index or 0
    try:
        backend.synchronize(index)
        return int(backend.memory_allocated(index))
    except Exception:  # noqa: BLE001 - the checks of memory say what is wrong with it
        return None


def _left_over(backend: Any, device: torch.device, before: int | None) -> dict[str, str]:
    end = time.monotonic() + _PATIENCE
    while before is not None and device.type != "cpu":
        after = _held(backend, device)
        if after is None or after <= before + _LEFT:
            break
        if time.monotonic() > end:
            text = f"{after - before} bytes of tensors are left over by collectives that are done"
            return {"COL-014": text}
        time.sleep(0.05)
    return {}
