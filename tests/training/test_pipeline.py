"""A transformers model with tied weights trains in a pipeline, and its checkpoint goes anywhere."""

from __future__ import annotations

import functools

import pytest
from launching import run_ranks as launch
from training import pipeline_ranks

# With the other tests whose ranks train: what these import is imported once, not in each worker.
pytestmark = pytest.mark.xdist_group("training")

run_ranks = functools.partial(launch, imports=["transformers.models.llama.modeling_llama"])


@pytest.mark.parametrize(("size", "device"), [(2, "sim"), (4, "cpu")])
def test_it_equals_one_process_and_its_checkpoint_goes_on(size, device, tmp_path):
    run_ranks(pipeline_ranks.save_whole, 1, "cpu", str(tmp_path))
    rest = run_ranks(
        pipeline_ranks.a_tied_model, size, device, str(tmp_path), device == "cpu", timeout=150
    )
    assert all(losses == pytest.approx(rest[0]) for losses in rest)
    if device == "cpu":
        for losses in run_ranks(pipeline_ranks.goes_on_alone, 2, "cpu", str(tmp_path), timeout=100):
            assert losses == pytest.approx(rest[0], rel=1e-3)
