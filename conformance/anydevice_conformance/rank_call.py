"""A collective that one rank has begun: its tensors, its handles, and what it must give."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any, Final

import torch

from anydevice_conformance.data import same_bits
from anydevice_conformance.rank_form import Form, Members, Place
from anydevice_conformance.rank_forms_rarer import ALL_FORMS
from anydevice_conformance.rank_operations import OPERATIONS
from anydevice_conformance.rank_programs import Call
from anydevice_conformance.rank_values import alike, difference, says_unsupported, values

__all__ = ["Accepted", "Begun"]

_PATIENCE: Final = 5.0


class Accepted:
    """Which layouts the device takes; the same on all ranks.

    A layout is given by all ranks at first, so that all are told where it is refused: a rank that
    were refused alone would be missed by the others.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, str, str, int], bool] = {}
        self._tried: tuple[str, str, str, int] | None = None

    def with_trials(self, call: Call) -> Iterator[Call]:
        """The call, after a trial of each of its layouts that is new; without what is refused."""
        plain = ("plain",) * len(call.layouts)
        for side in ("layouts", "layouts_out"):
            for layout in sorted({*getattr(call, side)} - {"plain"}):
                key = (call.form, side, layout, len(call.shape))
                if key not in self._known:
                    self._tried, uniform = key, (layout,) * len(plain)
                    both: dict[str, Any] = {"layouts": plain, "layouts_out": plain, side: uniform}
                    yield dataclasses.replace(call, wait=None, refused=False, reused=False, **both)
                if not self._known[key]:
                    without: dict[str, Any] = {side: plain}
                    call = dataclasses.replace(call, **without)
                    break
        self._tried = None
        yield call

    def learn(self, accepted: bool) -> None:
        """What became of a call."""
        if self._tried is not None:
            self._known[self._tried] = accepted

    @property
    def trying(self) -> bool:
        """Whether a layout may be refused."""
        return self._tried is not None


class Begun:
    """A call that one rank makes.

    Args:
        device: of its tensors.
        call: what is called.
        members: of the group.
        accepted: the layouts that are, in groups of that size.
    """

    def __init__(
        self, device: torch.device, call: Call, members: Members, accepted: Accepted
    ) -> None:
        self.device, self.call, self.form = device, call, ALL_FORMS[call.form]
        self.accepted, self.rank = accepted, members.rank
        self.place = Place(
            members,
            call.root,
            call.by_group,
            call.wait is not None,
            device,
            call.seed,
            call.layouts[self.rank],
            call.layouts_out[self.rank],
            OPERATIONS[call.operation],
            call.offset,
        )
        self.inputs = [_inputs(call, self.form, r, members.size) for r in members.ranks]
        self.mine = [self._put(one) for one in self.inputs[self.rank]]
        self.works: list[Any] = []
        self.outputs: list[torch.Tensor] = []
        self.doubled: list[torch.Tensor] = []
        self.found: list[torch.Tensor] = []
        self.kept: list[torch.Tensor] = []
        self.unchanged = self.untouched = True

    def _put(self, values_: torch.Tensor) -> torch.Tensor:
        """On the device, within a storage of its own, by queued copies."""
        there = values_.to(self.device, copy=True)
        part = self.place.room(there, self.place.layout)
        part.copy_(there)
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
            if not self._may_refuse(error):
                raise
            self.accepted.learn(False)
            return False
        self.accepted.learn(True)
        if self.call.reused:
            self._reuse()
        return True

    def _may_refuse(self, error: Exception) -> bool:
        """Whether the device need not have it, and says so."""
        form, call = self.form, self.call
        rare = call.dtype in form.rare
        if form.operations:
            rare = call.dtype not in OPERATIONS[call.operation].needed
        if rare and isinstance(error, NotImplementedError | RuntimeError | TypeError | ValueError):
            return True
        return (not form.needed or self.accepted.trying) and says_unsupported(error)

    @property
    def waits(self) -> bool:
        """Whether there is a handle to wait for: some forms have none."""
        return self.call.wait is not None and bool(self.works)

    def _given(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What was given and is no result, with what it must hold."""
        own = zip(self.mine, self.inputs[self.rank], strict=False)
        separate = [pair for pair in own if not any(pair[0] is one for one in self.outputs)]
        return [*separate, *self.place.given]

    def _reuse(self) -> None:
        """Use the memory of what was given for other values.

        With a handle the tensors are let go of, and others are made that may lie there; without one
        the current stream waits for the collective, and what is queued on it then comes later.
        """
        given = self._given()
        if not self.waits:
            self._look_at_given()
            for one, _ in given:
                one.fill_(1)
        elif len(given) == len(self.mine) + len(self.place.given):
            mine = [room for room in self.place.rooms if any(room.tensor is x for x, _ in given)]
            sizes = [room.size for room in mine]
            self.place.rooms[:] = [room for room in self.place.rooms if room not in mine]
            mine.clear()
            given.clear()
            self._forget()
            self.kept = [torch.ones(n, dtype=self.call.dtype, device=self.device) for n in sizes]

    def _forget(self) -> None:
        self.mine = []
        self.place.given.clear()

    def _look_at_given(self) -> None:
        for one, wanted in self._given():
            self.unchanged = self.unchanged and same_bits(one.cpu(), wanted.cpu())
        self._forget()

    def wait(self) -> bool:
        """Wait as the call says; whether it is done, and not refused by then."""
        try:
            self._wait()
        except Exception as error:
            if not self._may_refuse(error):
                raise
            return False
        return True

    def _wait(self) -> None:
        for work in self.works:
            # Torch itself carries complex numbers as pairs, and these are what a future holds.
            whole = not self.call.dtype.is_complex
            if self.call.wait in ("future", "then") and self.form.future and whole:
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
        around = [one.reshape(-1) for room in self.place.rooms for one in room.around]
        edges = torch.cat(around) if around else None
        self.found = [one.cpu() for one in found]
        self.untouched = edges is None or not bool(edges.cpu().view(torch.uint8).any())
        self._look_at_given()

    def wrong(self) -> str:
        """What is wrong with the result, or nothing."""
        call, found, rank = self.call, self.found, self.place.members.ranks[self.rank]
        if not self.unchanged:
            return f"rank {rank}: what was given has changed, in {call!r}"
        wanted = self.form.gives(self.place, self.inputs)
        if wanted is None:
            return ""
        if len(found) not in (len(wanted), len(wanted) + len(self.doubled)):
            return f"rank {rank} has {len(found)} results, not {len(wanted)}, of {call!r}"
        for number, one in enumerate(found):
            right = wanted[number % len(wanted)]
            one = alike(one, right)
            if not same_bits(one, right):
                place = "the future of " if number >= len(wanted) else ""
                return f"rank {rank} has {difference(one, right)}, in {place}{call!r}"
        if not self.untouched:
            return f"rank {rank}: memory next to the tensors was written to, of {call!r}"
        return ""


def _is_completed(work: Any) -> bool:
    """What a handle says; one of several collectives does not."""
    return not hasattr(work, "is_completed") or bool(work.is_completed())


def _flat(value: Any) -> list[torch.Tensor]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _inputs(call: Call, form: Form, rank: int, size: int) -> list[torch.Tensor]:
    count, high = torch.Size(call.shape).numel(), OPERATIONS[call.operation].high
    return [
        values(
            call.dtype,
            count,
            bool(form.operations),
            call.seed + 31 * rank + number,
            high if form.operations else None,
            call.unusual,
        ).view(call.shape)
        for number in range(form.tensors(size))
    ]
