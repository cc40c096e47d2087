"""A pipeline over processes answers as one process does, and each rank reads its own bytes."""

from __future__ import annotations

import functools
import json
import os

import pytest
import torch
from distributed import models, pipeline_ranks
from launching import Failed, warm_python
from launching import run_ranks as launch
from warm import run_python

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


@pytest.mark.parametrize(("size", "budget"), [(2, "45KB"), (4, "26KB")])
def test_on_simulated_devices_with_offloaded_stages(saved, size, budget):
    found = run_ranks(
        pipeline_ranks.offloaded, size, "sim", str(saved["llama"][0]), budget, timeout=240
    )
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


@pytest.fixture
def quantized(saved, tmp_path):
    """The folder of a checkpoint that says that it is quantized."""
    config = json.loads((saved["llama"][0] / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


#: A script as a user writes it: it takes a folder, and another to write its answer to.
SCRIPT = """
import json, pathlib, sys
import torch
from anydevice import PartialState
from anydevice.distributed import load_pipeline

state = PartialState()
model = load_pipeline(sys.argv[1])
ids = torch.tensor([[5, 6, 7, 8, 9]], device=state.device)
tokens = model.generate(ids, max_new_tokens=4, do_sample=False)
answer = [str(state.device), tokens.tolist(), len(model.anydevice_stage.stages)]
pathlib.Path(sys.argv[2], f"{state.process_index}.json").write_text(json.dumps(answer))
state.destroy_process_group()
"""


@pytest.mark.parametrize("starter", ["torchrun", "anydevice launch"])
def test_a_script_that_is_started_as_users_start_it(saved, tmp_path, starter):
    """On the host by torchrun, on accelerators by `anydevice launch`; here all are forks.

    (New interpreters: `test_torchrun` of `tests/processes/test_state.py`.)
    """
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    environment.pop("ANYDEVICE_SIMULATOR", None)
    environment["PYTHON_EXEC"] = warm_python(tmp_path, models.MODULES)
    if starter == "torchrun":
        kind, words = "cpu", ["torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
        environment["ANYDEVICE_BACKENDS"] = "cpu"
    else:
        kind, words = "sim", ["anydevice", "launch", "--num_processes", "2"]
        environment |= {"ANYDEVICE_SIMULATOR": "devices=2", "HF_HOME": str(tmp_path)}
    words += [str(script), str(saved["llama"][0]), str(tmp_path)]
    done = run_python("-m", *words, env=environment, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        device, tokens, stages = json.loads((tmp_path / f"{rank}.json").read_text())
        assert device == {"cpu": "cpu", "sim": f"sim:{rank}"}[kind]
        assert (tokens, stages) == (saved["llama"][1]["alone"].tolist(), 2)


def test_faults_are_named(saved, quantized):
    import transformers as tf

    others = str(saved["mixtral"][0]), str(quantized)
    found = run_ranks(pipeline_ranks.faults, 2, "cpu", str(saved["llama"][0]), *others)
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
            "both": ("UnknownArgumentError", "tp_size"),
            "both as well": ("UnknownArgumentError", "pp_size"),
            "misspelled": ("UnknownArgumentError", "'local_files_only'"),
            "unknown": ("UnknownArgumentError", "headroom"),
            "quantizing": ("UnknownArgumentError", "from_pretrained"),
            "divided": ("ModelError", "0.weight"),
            "mixture": ("ModelError", "mlp.experts"),
            "quantized": ("ModelError", "fp8"),
            "quantized too": ("ModelError", "fp8"),
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
    assert first[0] in ("ProcessGroupError", "MissingRankError"), first
    assert "rank 1" in first[1]


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_a_stage_that_raises_is_named_on_every_rank_and_the_next_call_works(saved, device):
    folder, wanted = str(saved["llama"][0]), saved["llama"][1]["logits"]
    for rank, found in enumerate(run_ranks(pipeline_ranks.raising, 2, device, folder)):
        for (victim, way), (kind, message) in found["said"].items():
            assert kind == ("ArithmeticError" if rank == victim else "ModelError"), (victim, way)
            assert "too large" in message
            assert rank == victim or f"rank {victim} failed" in message
        torch.testing.assert_close(found["logits"], wanted)
