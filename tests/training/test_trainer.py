"""transformers' Trainer runs on anydevice as it does on the peer, with the import changed."""

from __future__ import annotations

import functools

import pytest
from launching import run_ranks as launch
from training import trainer_ranks

# With the other tests whose ranks train: what these import is imported once, not in each worker.
pytestmark = pytest.mark.xdist_group("training")

run_ranks = functools.partial(launch, imports=["training.in_its_place"])


@pytest.mark.parametrize(("size", "sharded"), [(1, False), (2, False), (2, True)])
def test_it_trains_evaluates_and_resumes(size, sharded, tmp_path):
    for losses, resumed, evaluated, count in run_ranks(
        trainer_ranks.train, size, "cpu", str(tmp_path), sharded, timeout=120
    ):
        assert count == size
        assert len(losses) == 4
        assert losses[-1] < losses[0]
        assert resumed == pytest.approx(losses[-1], rel=0.02)
        assert evaluated < losses[0]
