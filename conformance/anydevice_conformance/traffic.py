"""Several threads that move, pin, cross and wait at once, each with its own values and streams."""

from __future__ import annotations

import contextlib
import random

import torch

from anydevice_conformance.data import DTYPES, all_bits, same_bits, short_name
from anydevice_conformance.layouts import LAYOUTS
from anydevice_conformance.moving import read
from anydevice_conformance.subject import Subject
from anydevice_conformance.sweep_cases import small_cases
from anydevice_conformance.threads import at_once

__all__ = ["check_traffic"]

_THREADS = 8
#: Elements that are moved now and then.
_LARGE = (20_000, 70_001, 300_001)


def check_traffic(subject: Subject, turns: int) -> None:
    """Each thread does ``turns`` round trips of tensors of every dtype and layout.

    Raises:
        AssertionError: one got other values than its own; the message says of what.
    """
    dtypes = subject.supported(*DTYPES)

    def work(number: int) -> None:
        dice = random.Random(subject.seed * _THREADS + number)
        for turn in range(turns):
            dtype = dice.choice(dtypes)
            shape, layout, offset = dice.choice(small_cases(dice.randrange(99), subject.seed))
            made = LAYOUTS[layout](shape)
            assert made is not None
            count, view = made
            storage = all_bits(dtype, count + offset, seed=dice.randrange(1 << 30))
            words = f"thread {number}: {short_name(dtype)} {shape}, {layout}"
            _round_trip(subject, dice, view(storage[offset : offset + count]), words)
            if turn % 4 == 3:  # and what drivers copy in pieces, or by a buffer of theirs
                large = torch.full((dice.choice(_LARGE),), float(dice.randrange(1 << 20)))
                _round_trip(subject, dice, large, f"thread {number}: {large.numel()} float32")

    at_once(work, _THREADS, subject.backend)


def _round_trip(subject: Subject, dice: random.Random, values: torch.Tensor, words: str) -> None:
    backend, index, late = subject.backend, dice.choice(subject.indices), dice.random() < 0.5
    source = values
    if subject.capabilities.pinned_memory and dice.random() < 0.4:
        source = backend.pin_memory(values)
        assert same_bits(source, values), f"{words}: pinning gave another's values"
    with contextlib.ExitStack() as stack:
        if subject.capabilities.streams and dice.random() < 0.5:
            stream = stack.enter_context(backend.use_stream(backend.new_stream(index)))
            assert backend.current_stream(index) == stream, f"{words}: another's stream is current"
        there = subject.put(source, index, non_blocking=late)
        assert subject.is_on(there, index), f"{words}: asked for {index}, is on {there.device}"
        back = subject.fetch(there, non_blocking=late)
        if late and subject.capabilities.streams:
            backend.synchronize_event(backend.record_event(backend.current_stream(index)))
        elif late:
            backend.synchronize(index)
        assert same_bits(read(back), values), f"{words}: got another's values"
        other = dice.choice(subject.indices)
        crossed = subject.put(there, other, non_blocking=late)
        assert same_bits(read(crossed), values), f"{words}: from {index} to {other}: other values"
