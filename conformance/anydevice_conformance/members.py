"""Small questions to single members, whose right answers are known: asked in every situation."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from anydevice_conformance.data import DTYPES, same_bits
from anydevice_conformance.members_memory import memory_probes
from anydevice_conformance.members_streams import stream_probes, waiting_probe
from anydevice_conformance.members_told import told_probes
from anydevice_conformance.probe import Probe
from anydevice_conformance.process_state import differences_in_process, process_state
from anydevice_conformance.situations import restored
from anydevice_conformance.subject import Subject
from anydevice_conformance.watching import Watched

__all__ = ["probes", "still_probes"]


def probes(subject: Subject) -> list[Probe]:
    """The questions that the backend's claims allow; the right answers are noted beforehand."""
    cached: list[Probe] | None = subject.__dict__.get("_probes")
    if cached is None:
        process = process_state()
        with restored(subject):
            cached = list(_made(subject))
        changed = differences_in_process(process)
        assert not changed, f"DEV-012: asking the members changed {', '.join(changed)}"
        subject.__dict__["_probes"] = cached
    return cached


def still_probes(subject: Subject) -> list[Probe]:
    """Those of the questions that take no memory of a device."""
    return [probe for probe in probes(subject) if probe.still]


def _made(subject: Subject) -> Iterator[Probe]:
    claims = subject.capabilities
    yield from told_probes(subject)
    yield from memory_probes(subject)
    yield _errors(subject)
    yield waiting_probe(subject)
    yield Probe(
        "move",
        lambda index: _assert_round_trip(subject, index),
        lambda index: subject.fetch(subject.put(torch.ones(30), index)),
    )
    if claims.streams:
        yield from stream_probes(subject)
    if claims.device_rng:
        yield from _random(subject)
    if claims.pinned_memory:
        yield _pinning(subject)


# ---------------------------------------------------------------------- errors


def _errors(subject: Subject) -> Probe:
    backend = Watched(subject)
    real = {} if subject.is_host else {i: _provoked(subject.device(i)) for i in subject.indices}
    others = [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)"),
        ValueError("no such layer"),
        IndexError("index out of range in self"),
        KeyboardInterrupt(),
    ]
    lack = _provoked(torch.device("cpu"))
    if lack is not None and not subject.is_host:
        others.append(lack)

    def run(index: int) -> None:
        for place, error in real.items():
            found: Any = None if error is None else backend.is_out_of_memory(error)
            assert found in (True, None), (
                f"is_out_of_memory is {found!r} for device {place}'s {error!s:.120}"
            )
        for error in others:
            found = backend.is_out_of_memory(error)
            assert found is False, f"is_out_of_memory is {found!r} for {error!r:.200}"

    def repeat(index: int) -> None:
        subject.backend.is_out_of_memory(RuntimeError("no"))
        error = real.get(index)
        if error is not None:
            subject.backend.is_out_of_memory(error)

    return Probe("is_out_of_memory", run, repeat, still=True)


def _provoked(device: torch.device) -> BaseException | None:
    """A device's error, or the host's, when far too much memory is asked for."""
    try:
        torch.empty(1 << 50, dtype=torch.uint8, device=device)
    except Exception as error:  # noqa: BLE001 - whichever the device raises
        return error.with_traceback(None)
    return None


# ---------------------------------------------------------------------- work


def _assert_round_trip(subject: Subject, index: int) -> None:
    values = torch.arange(30.0)
    there = subject.put(values, index)
    assert subject.is_on(there, index), f"asked for device {index}, is on {there.device}"
    assert torch.equal(subject.fetch(there + 1), values + 1), "a round trip changed values"


# ---------------------------------------------------------------------- numbers and pages


def _random(subject: Subject) -> Iterator[Probe]:
    backend = Watched(subject)
    seeds = (3, 2**33 + 3, 2**63 - 1)
    known = {}
    for seed in seeds:
        backend.manual_seed_all(seed)
        for index in subject.indices:
            known[seed, index] = _drawn(subject, index)

    def seeding(index: int) -> None:
        for seed in seeds:
            backend.manual_seed_all(seed)
            for i in subject.indices:
                assert torch.equal(_drawn(subject, i), known[seed, i]), (
                    f"device {i} drew other numbers after seed {seed}"
                )

    def states(index: int) -> None:
        others = [i for i in subject.indices if i != index]
        state = backend.rng_state(index)
        assert state.dtype is torch.uint8, f"rng_state is {state.dtype}"
        assert state.device.type == "cpu", f"rng_state is on {state.device}"
        before = {i: backend.rng_state(i).clone() for i in others}
        first = _drawn(subject, index)
        backend.set_rng_state(state, index)
        assert torch.equal(_drawn(subject, index), first), "after set_rng_state other numbers come"
        for i in others:
            assert torch.equal(backend.rng_state(i), before[i]), f"device {i}'s state changed, too"

    def repeat(index: int) -> None:
        subject.backend.manual_seed_all(5)
        subject.backend.set_rng_state(subject.backend.rng_state(index), index)

    yield Probe("manual_seed_all", seeding, repeat)
    yield Probe("rng_state and set_rng_state", states)


def _drawn(subject: Subject, index: int) -> torch.Tensor:
    device = subject.device(index)
    parts = [torch.rand(7, device=device), torch.randn(33, device=device)]
    return torch.cat([part.cpu() for part in parts])


def _pinning(subject: Subject) -> Probe:
    backend = Watched(subject)
    numbers = itertools.count()

    def run(index: int) -> None:
        number = next(numbers)
        bits = torch.arange(960).mul(37).add(number).to(torch.uint8)
        dtype = subject.supported(*DTYPES)[number % len(subject.supported(*DTYPES))]
        source = (bits % 2).bool() if dtype is torch.bool else bits.view(dtype)
        source = source[1:] if number % 3 == 1 else source
        if number % 3 == 2:
            source = source.view(2, -1).t() if number % 2 else source.view(1, 2, 2, 3, -1)
        kept = source.clone()
        pinned = backend.pin_memory(source)
        assert pinned.is_pinned(), "the result is not pinned"
        assert pinned.device.type == "cpu", f"the result is on {pinned.device}"
        assert same_bits(pinned, kept), f"pinning changed {source.dtype} {tuple(source.shape)}"
        assert same_bits(source, kept), "pinning changed the original"
        assert pinned.data_ptr() != source.data_ptr(), "the result is the original's memory"
        if number % 5:
            return  # one call: what two of them change may cancel out
        again = backend.pin_memory(source)
        assert again.data_ptr() != pinned.data_ptr(), "two results are one memory"
        others = source.clone(memory_format=torch.contiguous_format).view(torch.uint8)
        other = backend.pin_memory(others.bitwise_not_())
        for one in (pinned, other):  # what is pinned already comes back with its own values
            kept = one.clone()
            twice = [backend.pin_memory(t) for t in (one, other, pinned)]
            assert same_bits(twice[0], kept), "pinning what is pinned changed its values"
            assert same_bits(one, kept), "pinning what is pinned changed it"

    return Probe("pin_memory", run, lambda index: subject.backend.pin_memory(torch.ones(30)))
