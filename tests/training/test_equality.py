"""Every engine trains as a plain loop does: losses and weights after 20 steps.

Two processes go through each engine, precision and accumulation; four, and the simulator, through
some. `python scripts/try_grid` goes through all.
"""

from __future__ import annotations

import pytest
from launching import run_ranks
from training import equality_ranks
from training.equality_ranks import ACCUMULATED, CHOICES, MIXED, cells

# With the other tests whose ranks train: what these import is imported once, not in each worker.
pytestmark = pytest.mark.xdist_group("training")

GRIDS = {
    "2-cpu": (2, "cpu", [*cells(), *CHOICES]),
    "4-cpu": (
        4,
        "cpu",
        [("fsdp2", "no", 1), ("pp", "no", 1), *cells(MIXED, ["fp16"], [ACCUMULATED])],
    ),
    "2-sim": (
        2,
        "sim",
        [("ddp", "fp16", 1), ("fsdp2", "no", ACCUMULATED), *cells(["tp", "pp"], ["fp16"])],
    ),
}


@pytest.mark.parametrize(("size", "device", "chosen"), GRIDS.values(), ids=GRIDS)
def test_engines_equal_the_plain_loop(size, device, chosen):
    for failed in run_ranks(
        equality_ranks.equal, size, device, device == "cpu", chosen, timeout=250
    ):
        assert not failed, "\n".join(f"{cell}: {text}" for cell, text in failed.items())
