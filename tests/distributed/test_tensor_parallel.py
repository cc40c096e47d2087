"""A model whose layers are divided over processes answers as one process does."""

from __future__ import annotations

import pytest
import torch
from distributed import models, pipeline_ranks
from launching import run_ranks

# One worker imports the models once.
pytestmark = pytest.mark.xdist_group("distributed")


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_the_answers_are_those_of_one_process(saved, device):
    names = ("gemma3",) if device == "cpu" else ("tied",)
    folders = {name: str(saved[name][0]) for name in names}
    found = run_ranks(pipeline_ranks.divided, 2, device, folders, imports=models.MODULES)
    for of_rank in found:
        for name, (answers, nbytes) in of_rank.items():
            assert nbytes < 0.6 * sum(
                file.stat().st_size for file in saved[name][0].glob("*.safetensors")
            )
            want = saved[name][1]
            torch.testing.assert_close(answers.pop("logits"), want["logits"], atol=1e-5, rtol=1e-4)
            for kind, tensor in answers.items():
                assert torch.equal(tensor, want[kind]), (name, kind)
