"""One rank's side of the generated programs of collectives: it does each turn, and judges it."""

from __future__ import annotations

import contextlib
import gc
import random
import time
import warnings
from typing import Any, Final

import torch
import torch.distributed as dist

from anydevice_conformance.data import same_bits
from anydevice_conformance.rank_form import MARGIN, Form, Members, Place
from anydevice_conformance.rank_forms_rarer import ALL_FORMS
from anydevice_conformance.rank_programs import TEAMS, Call, Turn, programs
from anydevice_conformance.rank_values import difference, is_refusal, values
from anydevice_conformance.threads import in_thread

__all__ = ["try_programs"]

#: Bytes that may be left over when all is done: what a group keeps for itself.
_LEFT: Final = 1 << 12
_PATIENCE: Final = 5.0


class _Ranks:
    """The side of one rank: its streams and groups."""

    def __init__(self, backend: Any, device: torch.device, rank: int, world: int) -> None:
        self.backend, self.device, self.rank, self.world = backend, device, rank, world
        streams = device.type != "cpu" and backend.capabilities.streams
        self.streams = [backend.new_stream(device.index) for _ in range(2)] if streams else []
        self.kept = {name: self._new(name) for name in TEAMS[:3]}

    def _new(self, team: str) -> Members:
        everyone = tuple(range(self.world))
        if team == "default":
            return Members(None, everyone, self.rank)
        if "alone" not in team:
            return Members(dist.new_group(everyone), everyone, self.rank)
        groups = [dist.new_group([rank]) for rank in everyone]  # all ranks make all groups
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
        members = self.kept.get(turn.team) or self._new(turn.team)
        if turn.slow == self.rank:
            time.sleep(0.02)
        mode = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
        with mode.get(turn.mode, torch.enable_grad)():
            found = self._do(turn, members)
        if turn.team not in self.kept:
            dist.destroy_process_group(members.group)
        return found

    def _do(self, turn: Turn, members: Members) -> str:
        under_way = []
        with self.on(turn.begun):
            for call in turn.calls:
                begun = _Begun(self, call, members)
                if call.refused:
                    begun.refuse()
                if begun.begin():
                    under_way.append(begun)
                if call.wait is None:
                    begun.take_out()
        order = random.Random(turn.seed + self.rank).sample(under_way, len(under_way))
        with self.on(turn.waited):
            for begun in order:
                if begun.call.wait is not None:
                    begun.wait()
                    begun.take_out()
        return next(filter(None, [begun.wrong() for begun in under_way]), "")


class _Begun:
    """A call that one rank has made."""

    def __init__(self, ranks: _Ranks, call: Call, members: Members) -> None:
        self.ranks, self.call, self.form = ranks, call, ALL_FORMS[call.form]
        handle = call.wait is not None
        self.place = Place(members, call.root, call.by_group, handle, ranks.device, call.transposed)
        self.inputs = [_inputs(call, self.form, r, members.size) for r in members.ranks]
        self.mine = [self.place.lay(self._put(one)) for one in self.inputs[members.rank]]
        self.works: list[Any] = []
        self.outputs: list[torch.Tensor] = []
        self.doubled: list[torch.Tensor] = []
        self.found: list[torch.Tensor] = []
        self.spoilt = False

    def _put(self, values_: torch.Tensor) -> torch.Tensor:
        """On the device, within a storage of its own, by queued copies."""
        count, offset = values_.numel(), MARGIN + self.call.offset
        storage = torch.zeros(
            count + offset + MARGIN, dtype=values_.dtype, device=self.ranks.device
        )
        part = storage[offset : offset + count].view(values_.shape)
        part.copy_(values_.to(self.ranks.device, copy=True))
        return part

    def refuse(self) -> None:
        """Make a wrong call of the form, which is refused before anything is sent."""
        if self.form.wrong is None:
            return
        try:
            self.form.wrong(self.place, self.mine[0].reshape(-1))
        except Exception:  # noqa: BLE001 - as it must be
            return
        raise AssertionError(f"a wrong call of {self.call.form} was not refused")

    def begin(self) -> bool:
        """Whether it has begun; else the device does not have it."""
        try:
            self.works, self.outputs = self.form.call(self.place, self.mine)
        except Exception as error:
            needed = self.form.needed and not self.call.transposed
            if needed or not is_refusal(error):
                raise
            return False
        return True

    def wait(self) -> None:
        """Wait as the call says."""
        for work in self.works:
            if self.call.wait in ("future", "then") and self.form.future:
                self._wait_by_future(work)
            elif self.call.wait == "completed" and self.form.future:
                end = time.monotonic() + _PATIENCE
                while not _is_completed(work) and time.monotonic() < end:
                    time.sleep(0.001)
            work.wait()

    def _wait_by_future(self, work: Any) -> None:
        try:
            future = work.get_future()
        except (NotImplementedError, RuntimeError):  # this device has none
            return
        if self.call.wait == "then":
            future = future.then(lambda done: [one.clone() for one in _flat(done.value())])
        self.doubled = _flat(future.wait())

    def take_out(self) -> None:
        """Use the result, and what is next to it, by work that is queued next."""
        found = [one.clone() for one in [*self.outputs, *self.doubled]]
        edges = [part.clone() for s in self.place.storages for part in (s[:MARGIN], s[-MARGIN:])]
        self.found = [one.cpu() for one in found]
        self.spoilt = any(bool(edge.cpu().any()) for edge in edges)

    def wrong(self) -> str:
        """What is wrong with the result, or nothing."""
        call, rank = self.call, self.ranks.rank
        wanted = self.form.gives(self.place, self.inputs)
        if wanted is None:
            return ""
        found = self.found
        if len(found) not in (len(wanted), len(wanted) + len(self.doubled)):
            return f"rank {rank} has {len(found)} results, not {len(wanted)}, of {call!r}"
        for number, one in enumerate(found):
            right = wanted[number % len(wanted)]
            if not same_bits(one, right):
                place = "the future of " if number >= len(wanted) else ""
                return f"rank {rank} has {difference(one, right)}, in {place}{call!r}"
        if self.spoilt:
            return f"rank {rank}: memory next to the result was written to, of {call!r}"
        return ""


def _is_completed(work: Any) -> bool:
    """What a handle says; one of several collectives does not."""
    return not hasattr(work, "is_completed") or bool(work.is_completed())


def _flat(value: Any) -> list[torch.Tensor]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _inputs(call: Call, form: Form, rank: int, size: int) -> list[torch.Tensor]:
    count = torch.Size(call.shape).numel()
    return [
        values(call.dtype, count, form.summed, call.seed + 31 * rank + number).view(call.shape)
        for number in range(form.tensors(size))
    ]


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
