"""A pipeline over processes answers as one process does, and each rank reads its own bytes."""

from __future__ import annotations

import functools

import pytest
import torch
from distributed import models, pipeline_ranks
from launching import Failed
from launching import run_ranks as launch

# One worker imports the models once.
pytestmark = pytest.mark.xdist_group("distributed")

run_ranks = functools.partial(launch, imports=models.MODULES)
NAMES = ("tied", "gpt2", "opt", "mixtral", "gemma3")


def same(answers, want, tolerance=0.0):
    for kind, tensor in answers.items():
        if kind == "logits":
            torch.testing.assert_close(tensor, want[kind], atol=tolerance, rtol=0)
        else:
            assert torch.equal(tensor, want[kind]), kind


@pytest.mark.parametrize(("size", "names"), [(2, NAMES), (4, ("tied",))])
def test_the_answers_are_those_of_one_process(saved, size, names):
    folders = {name: str(saved[name][0]) for name in names}
    found = run_ranks(pipeline_ranks.answers, size, "cpu", folders)
    for name in names:
        for of_rank in found:
            same(of_rank[name][0], saved[name][1])
        stages = [of_rank[name][1] for of_rank in found]
        assert [block for stage in stages for block in stage.blocks] == sorted(
            {block for stage in stages for block in stage.blocks}
        )
        # Together the ranks read the model once; a tied embedding, which two need, twice.
        files = sum(file.stat().st_size for file in saved[name][0].glob("*.safetensors"))
        taken = [stage.mapped_bytes + stage.read_bytes for stage in stages]
        assert all(0 < bytes_taken < 0.8 * files for bytes_taken in taken)
        assert sum(taken) < 1.35 * files


def test_on_simulated_devices_with_offloaded_stages(saved):
    found = run_ranks(pipeline_ranks.offloaded, 2, "sim", str(saved["llama"][0]))
    for answers, placed, device in found:
        same(answers, saved["llama"][1], tolerance=1e-6)
        assert len(placed) == 2
        assert "cpu" in placed
        assert any(device in (kind, f"sim:{kind}") for kind in placed)


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_a_plain_model_in_microbatches(device):
    for of_rank in run_ranks(pipeline_ranks.plain_models, 2, device):
        want = of_rank.pop("alone")
        torch.testing.assert_close(of_rank.pop("another batch"), want[:2])
        torch.testing.assert_close(of_rank.pop("in parts"), of_rank.pop("alone in parts"))
        for output in of_rank.values():
            torch.testing.assert_close(output, want)


def test_faults_are_named(saved):
    import transformers as tf

    found = run_ranks(pipeline_ranks.faults, 2, "cpu", str(saved["llama"][0]))
    for rank, of_rank in enumerate(found):
        for name in ("microbatches", "inputs", "shapes"):
            kind, message = of_rank[name]
            assert kind == "CollectiveMismatchError", (name, message)
            assert "rank 0" in message
            assert "rank 1" in message
        expected = {
            "mean": ("ModelError", "microbatches=1"),
            "states": ("OptionError", "output_hidden_states"),
            "small": ("DoesNotFitError", "rank 1"),
            "bias": ("ModelError", "hidden states"),
            "empty": ("ModelError", "checkpoint="),
            "dtype": ("OptionError", "dtype="),
            "example": ("OptionError", "example_inputs"),
            "plan": ("ModelError", "tp_plan"),
        }
        for name, (kind, words) in expected.items():
            assert of_rank[name][0] == kind, (rank, name, of_rank[name])
            assert words in of_rank[name][1]
    inputs = {**models.batch(), "labels": models.batch()["input_ids"]}
    want = tf.AutoModelForCausalLM.from_pretrained(saved["llama"][0])(**inputs).loss
    torch.testing.assert_close(found[0]["loss"], want.detach())
    # Ranks with different seeds draw what rank 0 draws.
    assert torch.equal(found[0]["drawn"], found[1]["drawn"])
    # The error of the last stage is raised there, and told to the others.
    assert found[1]["labels"][0] == "ValueError"
    assert found[0]["labels"][0] == "ModelError"
    assert found[1]["labels"][1] in found[0]["labels"][1]


def test_a_rank_that_is_missing_or_dies_is_named(saved):
    folder = str(saved["llama"][0])
    kind, message = run_ranks(pipeline_ranks.missing, 2, "cpu", folder)[0]
    assert kind == "MissingRankError"
    assert "rank 1" in message
    first, second = run_ranks(pipeline_ranks.dying, 2, "cpu", folder, check=False)
    assert isinstance(second, Failed)
    assert first[0] == "ProcessGroupError", first
    assert "rank 1" in first[1]
