"""The configuration file: written, asked for, read in each version of Accelerate's."""

import io
import json
import os
import pty
import select
import subprocess
import sys
import time

import pytest
import yaml

from anydevice import cli
from anydevice.errors import OptionError
from anydevice.launch.config_file import read_config, write_config
from anydevice.launch.questions import ask
from anydevice.launch.resolve import resolve
from anydevice.launch.table import BY_NAME
from anydevice.utils import write_basic_config


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("ANYDEVICE_CONFIG_FILE", raising=False)
    return tmp_path


def config(path):
    return yaml.safe_load(path.read_text())


#: Files as the versions of Accelerate wrote them, the values, and what is left aside.
VERSIONS = {
    "0.3": (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nfp16: true\n"
        "machine_rank: 0\nmain_process_ip: null\nmain_process_port: null\n"
        "main_training_function: main\nnum_machines: 1\nnum_processes: 2\n",
        {"multi_gpu": True, "mixed_precision": "fp16", "num_processes": 2},
        [],
    ),
    "0.10": (
        "compute_environment: LOCAL_MACHINE\ndeepspeed_config: {}\ndistributed_type: FSDP\n"
        "fsdp_config:\n  min_num_params: 2000\n  offload_params: false\n  sharding_strategy: 1\n"
        "machine_rank: 0\nmain_process_ip: null\nmain_process_port: null\n"
        "main_training_function: main\nmixed_precision: bf16\nnum_machines: 1\nnum_processes: 2\n"
        "use_cpu: false\n",
        {
            "use_fsdp": True,
            "mixed_precision": "bf16",
            "fsdp_min_num_params": 2000,
            "fsdp_offload_params": False,
            "fsdp_sharding_strategy": "1",
        },
        [],
    ),
    "0.15": (
        "command_file: null\ncommands: null\ncompute_environment: LOCAL_MACHINE\n"
        "deepspeed_config: {}\ndistributed_type: 'NO'\ndowncast_bf16: 'no'\n"
        "dynamo_backend: INDUCTOR\n"
        "fsdp_config: {}\ngpu_ids: all\nmachine_rank: 0\nmain_training_function: main\n"
        "megatron_lm_config: {}\nmixed_precision: no\nnum_machines: 1\nnum_processes: 1\n"
        "rdzv_backend: static\nsame_network: true\ntpu_name: pod1\ntpu_zone: null\n"
        "use_cpu: false\n",
        {"dynamo_backend": "INDUCTOR", "mixed_precision": "no", "num_processes": 1},
        ["tpu_name"],
    ),
    "0.20": (
        "compute_environment: LOCAL_MACHINE\ndeepspeed_config:\n  gradient_accumulation_steps: 4\n"
        "  gradient_clipping: 1.0\n  offload_optimizer_device: cpu\n  zero3_init_flag: true\n"
        "  zero_stage: 3\ndistributed_type: DEEPSPEED\ndowncast_bf16: 'no'\n"
        "machine_rank: 1\nmain_process_ip: 10.0.0.1\nmain_process_port: 29501\n"
        "mixed_precision: fp16\nnum_machines: 2\nnum_processes: 8\nrdzv_backend: c10d\n"
        "same_network: false\ntpu_env: []\ntpu_use_cluster: false\ntpu_use_sudo: false\n",
        {
            "use_deepspeed": True,
            "gradient_accumulation_steps": 4,
            "zero_stage": 3,
            "zero3_init_flag": True,
            "machine_rank": 1,
            "main_process_ip": "10.0.0.1",
            "main_process_port": 29501,
            "rdzv_backend": "c10d",
        },
        [],
    ),
    "1.15": (
        "compute_environment: LOCAL_MACHINE\ndebug: false\ndistributed_type: FSDP\n"
        "downcast_bf16: 'no'\nenable_cpu_affinity: true\nfp8_config:\n  backend: TE\nfsdp_config:\n"
        "  fsdp_activation_checkpointing: true\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
        "  fsdp_reshard_after_forward: false\n  fsdp_state_dict_type: SHARDED_STATE_DICT\n"
        "  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer\n  fsdp_version: 2\n"
        "dynamo_config:\n  dynamo_backend: INDUCTOR\n  dynamo_mode: max-autotune\n"
        "machine_rank: 0\nmixed_precision: bf16\nnum_machines: 1\nnum_processes: 4\n"
        "parallelism_config:\n  parallelism_config_tp_size: 2\nuse_cpu: false\n",
        {
            "use_fsdp": True,
            "fsdp_version": "2",
            "fsdp_reshard_after_forward": "false",
            "fsdp_activation_checkpointing": True,
            "dynamo_mode": "max-autotune",
            "enable_cpu_affinity": True,
            "parallelism_config_tp_size": 2,
        },
        ["fp8_config.backend"],
    ),
}


@pytest.mark.parametrize("version", VERSIONS)
def test_each_version_of_the_file_is_read_and_updated(tmp_path, version, capsys):
    text, values, left = VERSIONS[version]
    path = tmp_path / "old.yaml"
    path.write_text(text)
    found = read_config(path)
    assert {k: found.values.get(k) for k in values} == values
    assert found.left_aside == left
    assert cli.main(["config", "update", "--config_file", str(path)]) == 0
    out = capsys.readouterr().out
    assert all(key in out for key in left)
    again = read_config(path)
    assert again.values.items() >= found.values.items()
    assert again.left_aside == []


def test_a_json_file_and_the_paths(home, capsys):
    theirs = home / "accelerate" / "default_config.json"
    theirs.parent.mkdir()
    theirs.write_text(json.dumps({"mixed_precision": "bf16", "distributed_type": "NO"}))
    assert cli.main(["config", "show", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["file"] == str(theirs)
    assert said["values"]["mixed_precision"]["value"] == "bf16"
    assert cli.main(["config", "update"]) == 0
    ours = home / "anydevice" / "default_config.yaml"
    assert config(ours)["mixed_precision"] == "bf16"
    assert json.loads(theirs.read_text())["mixed_precision"] == "bf16"
    assert cli.main(["config", "show"]) == 0
    assert str(ours) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "has no keys"),
        ("a: [", "cannot be read"),
        ("compute_environment: AMAZON_SAGEMAKER", "only LOCAL_MACHINE"),
        ("distributed_type: TPU_POD", "TPU_POD is not supported"),
        ("mixed_precision: fp61", "mixed_precision: 'fp61' is not one of"),
        ("num_processes: none", "num_processes: 'none' is not a whole number"),
        ("fsdp_config: {fsdp_offload_params: 3}", "fsdp_config.fsdp_offload_params: 3 is neither"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_its_key(tmp_path, text, message):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(OptionError) as caught:
        read_config(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


class _Terminal(io.StringIO):
    """Input of a person, who would be asked."""

    def isatty(self):
        return True

    def readline(self, *_):
        raise AssertionError("a question was asked")


@pytest.mark.parametrize("words", [["--default"], ["default"]])
def test_default_asks_nothing_on_a_terminal_either(home, capsys, monkeypatch, words):
    monkeypatch.setattr("sys.stdin", _Terminal())
    assert cli.main(["config", *words, "--mixed_precision", "bf16"]) == 0
    path = home / "anydevice" / "default_config.yaml"
    assert capsys.readouterr().out == f"written: {path}\n"
    assert config(path) == {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "NO",
        "machine_rank": 0,
        "mixed_precision": "bf16",
        "num_machines": 1,
        "num_processes": 1,
        "use_cpu": True,
    }


def test_without_a_terminal_the_file_is_written_at_once(home, capsys, monkeypatch, sim):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert cli.main(["config"]) == 0
    path = home / "anydevice" / "default_config.yaml"
    assert str(path) in capsys.readouterr().out
    assert config(path) == {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU",
        "machine_rank": 0,
        "mixed_precision": "no",
        "num_machines": 1,
        "num_processes": 2,
    }


def test_the_reference_reads_what_is_written(tmp_path):
    from accelerate.commands.config.config_args import load_config_from_file

    path = write_config(
        {"cpu": True, "num_processes": 2, "mixed_precision": "bf16"}, tmp_path / "c.yaml"
    )
    theirs = load_config_from_file(str(path))
    assert (theirs.num_processes, theirs.mixed_precision, theirs.use_cpu) == (2, "bf16", True)


def test_write_basic_config(home):
    path = write_basic_config("bf16", str(home / "basic.json"))
    assert json.loads(path.read_text())["mixed_precision"] == "bf16"
    assert write_basic_config() == home / "anydevice" / "default_config.yaml"
    assert write_basic_config("fp16") is False  # never over a file that is there
    with pytest.raises(OptionError, match="fp61"):
        write_basic_config("fp61", str(home / "other.yaml"))


def test_the_questions_are_asked_again_after_a_wrong_answer():
    answers = iter(["2", "1", "10.0.0.1", "", "many", "8", "bf61", "bf16", "4", "y", ""])
    said, asked = [], []

    def read(prompt):
        asked.append(prompt)
        return next(answers)

    values = ask(read, said.append, {"cpu": True, "num_processes": 1})
    assert values == {
        "cpu": True,
        "num_machines": 2,
        "machine_rank": 1,
        "main_process_ip": "10.0.0.1",
        "main_process_port": 29500,
        "num_processes": 8,
        "mixed_precision": "bf16",
        "gradient_accumulation_steps": 4,
        "use_fsdp": True,
        "fsdp_version": "2",
        "fsdp_offload_params": False,
    }
    assert ["not a whole number" in said[0], "not one of no, fp16, bf16" in said[1]] == [True, True]
    assert "[29500]" in asked[3]


#: Answers by a part of the question (others are as offered), and the settings that follow.
ENGINES = {
    "zero 3 from the disk": (
        {
            "DeepSpeed?": "y",
            "Stage": "3",
            "does the optimizer rest": "cpu",
            "do the weights rest": "nvme",
            "folder": "/fast",
            "norm": "0.5",
            "16-bit": "y",
        },
        {
            "use_deepspeed": True,
            "zero_stage": 3,
            "offload_optimizer_device": "cpu",
            "offload_param_device": "nvme",
            "offload_param_nvme_path": "/fast",
            "gradient_clipping": 0.5,
            "zero3_save_16bit_model": True,
        },
    ),
    "zero 0": (
        {"DeepSpeed?": "y", "Stage": "0"},
        {"use_deepspeed": True, "zero_stage": 0, "gradient_clipping": 1.0},
    ),
    "a file of DeepSpeed": (
        {"DeepSpeed?": "y", "JSON file": "zero.json"},
        {"use_deepspeed": True, "deepspeed_config_file": "zero.json"},
    ),
    "stages of a pipeline": (
        {"Megatron-LM?": "y", "part of the layers": "2", "among the copies": "y"},
        {
            "use_megatron_lm": True,
            "megatron_lm_tp_degree": 1,
            "megatron_lm_pp_degree": 2,
            "megatron_lm_num_micro_batches": 2,
            "megatron_lm_use_distributed_optimizer": True,
            "megatron_lm_recompute_activations": False,
            "megatron_lm_gradient_clipping": 1.0,
        },
    ),
    "shards on the host": (
        {"FSDP": "y", "host memory": "y"},
        {"use_fsdp": True, "fsdp_version": "2", "fsdp_offload_params": True},
    ),
}


@pytest.mark.parametrize("name", ENGINES)
def test_what_is_answered_about_an_engine_is_what_a_launch_reads(name, tmp_path):
    answers, wanted = ENGINES[name]
    given = {"How many processes, on": "4", **answers}
    left = set(given)

    def read(prompt):
        found = [part for part in given if part in prompt]
        left.difference_update(found)
        return given[found[0]] if found else ""

    def engine(values):
        flags = {name for name in wanted if name.startswith("use_")}
        return {key: value for key, value in values.items() if BY_NAME[key].needs in flags} | {
            key: True for key in flags if values.get(key)
        }

    values = ask(read, pytest.fail, {"cpu": True, "num_processes": 1})
    assert engine(values) == wanted
    assert not left
    path = write_config(values, tmp_path / "c.yaml")
    resolved = resolve({"config_file": str(path)}, {})
    assert engine(resolved.values) == wanted
    assert not resolved.without_effect()
    assert not resolved.config.left_aside
    offered = ask(lambda prompt: "", pytest.fail, dict(resolved.config.values))
    assert engine(offered) == wanted  # asked again, empty answers keep all


def test_the_questions_on_a_terminal(home):
    """As a person sees them: prompts come on the terminal, answers are lines."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "anydevice", "config"],
        stdin=follower,
        stdout=follower,
        stderr=follower,
    )
    os.close(follower)
    seen = ""
    for prompt, answer in [
        ("How many machines? [1]", ""),
        ("How many processes, on all machines together? [1]", "2"),
        ("Mixed precision (no, fp16, bf16)? [no]", "bf16"),
        ("Gradient accumulation steps? [1]", ""),
        ("Shard the model over the processes (FSDP)? [false]", "n"),
        ("Train with DeepSpeed? [false]", ""),
        ("Train with Megatron-LM? [false]", "y"),
        ("How many processes divide each layer? [1]", "2"),
        ("Divide norms along the sequence too? [false]", "y"),
        ("How many processes have a part of the layers each? [1]", ""),
        ("Divide the optimizer among the copies of the model? [false]", ""),
        ("Compute attention again in backward? [false]", ""),
        ("The largest norm of the gradient? [1.0]", "0.5"),
    ]:
        seen = _read_until(leader, prompt, seen)
        os.write(leader, answer.encode() + b"\n")
    _read_until(leader, "written:", seen)
    assert process.wait(60) == 0
    os.close(leader)
    written = config(home / "anydevice" / "default_config.yaml")
    assert (written["num_processes"], written["mixed_precision"]) == (2, "bf16")
    assert written["distributed_type"] == "MEGATRON_LM"
    assert written["megatron_lm_config"] == {
        "megatron_lm_tp_degree": 2,
        "megatron_lm_pp_degree": 1,
        "megatron_lm_sequence_parallelism": True,
        "megatron_lm_use_distributed_optimizer": False,
        "megatron_lm_recompute_activations": False,
        "megatron_lm_gradient_clipping": 0.5,
    }


def _read_until(leader, words, seen):
    end = time.monotonic() + 100
    while words not in seen:
        assert time.monotonic() < end, f"no {words!r} in:\n{seen}"
        if select.select([leader], [], [], 1)[0]:
            seen += os.read(leader, 4096).decode()
    return seen.split(words)[-1]
