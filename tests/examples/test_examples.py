"""The examples run as they stand, alone and in two processes."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from examples import example_ranks
from launching import run_ranks as launch

# With the other tests whose ranks train: what these import is imported once, not in each worker.
pytestmark = pytest.mark.xdist_group("training")

run_ranks = functools.partial(
    launch, imports=["transformers.models.llama.modeling_llama", "sklearn.datasets"]
)


@pytest.mark.parametrize(
    ("size", "arguments"),
    [(1, []), (2, ["--mixed-precision", "bf16", "--gradient-accumulation-steps", "2"])],
)
def test_digits(size, arguments):
    found = run_ranks(
        example_ranks.run, size, "cpu", "digits", "--cpu", "--epochs", "2", *arguments, timeout=120
    )
    assert len(set(found)) == 1  # every process has the same figure of the whole set
    assert found[0] > 0.7


def test_text_is_generated_over_processes():
    alone = run_ranks(example_ranks.run, 1, "cpu", "generate_over_processes", "--cpu")[0]
    assert len(alone) == len("Once upon a time") + 20
    for more in ([], ["--tensor-parallel"]):
        found = run_ranks(example_ranks.run, 2, "cpu", "generate_over_processes", "--cpu", *more)
        assert found == [alone, alone]


def test_the_language_model_goes_on_in_the_middle_of_an_epoch(tmp_path):
    def train(size, folder, *arguments):
        options = ("--cpu", "--epochs", "1", "--folder", str(tmp_path / folder), *arguments)
        return run_ranks(example_ranks.run, size, "cpu", "language_model", *options, timeout=120)[0]

    whole = train(2, "whole")
    assert whole[-1] < whole[0]
    stop = len(whole) // 2
    first = train(2, "parts", "--stop-after", str(stop))
    assert first == pytest.approx(whole[:stop], rel=1e-4)
    rest = train(2, "parts", "--resume")
    assert rest == pytest.approx(whole[stop:], rel=1e-3)
    assert Path(tmp_path / "parts" / "model" / "model.safetensors").exists()
    assert len(
        (tmp_path / "whole" / "language_model" / "log.jsonl").read_text().splitlines()
    ) == len(whole)
