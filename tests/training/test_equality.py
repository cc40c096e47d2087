"""Every engine trains as a plain loop does: losses and weights after 20 steps, or 6."""

from __future__ import annotations

import functools

import pytest
from launching import run_ranks as launch
from training import equality_ranks
from training.loops import HEAVY

# With the other tests whose ranks train: what these import is imported once, not in each worker.
pytestmark = pytest.mark.xdist_group("training")

run_ranks = functools.partial(launch, imports=HEAVY)


@pytest.mark.parametrize(("size", "device"), [(2, "cpu"), (4, "cpu"), (2, "sim")])
def test_all_engines(size, device):
    for failed in run_ranks(equality_ranks.all_engines, size, device, device == "cpu", timeout=200):
        assert not failed, "\n".join(f"{case}: {text}" for case, text in failed.items())
