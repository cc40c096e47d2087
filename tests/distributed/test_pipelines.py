"""A pipeline over processes answers as one process does, and each rank reads its own bytes."""

from __future__ import annotations

import pytest
import torch
from distributed import models, pipeline_ranks
from launching import run_ranks

# One worker imports the models once.
pytestmark = pytest.mark.xdist_group("distributed")

NAMES = ("llama", "tied", "gpt2", "opt", "mixtral", "gemma3")


def check(found, saved, tolerance=0.0):
    """Every rank has the answers of one process."""
    for rank, of_rank in enumerate(found):
        for name, (answers, _) in of_rank.items():
            want = saved[name][1]
            for kind, tensor in answers.items():
                if kind == "logits":
                    torch.testing.assert_close(tensor, want[kind], atol=tolerance, rtol=0)
                else:
                    assert torch.equal(tensor, want[kind]), (rank, name, kind)


@pytest.mark.parametrize(("size", "names"), [(2, NAMES), (4, ("tied", "gemma3"))])
def test_the_answers_are_those_of_one_process(saved, size, names):
    folders = {name: str(saved[name][0]) for name in names}
    found = run_ranks(pipeline_ranks.answers, size, "cpu", folders, imports=models.MODULES)
    check(found, saved)
