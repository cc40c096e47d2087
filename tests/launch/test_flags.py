"""Every flag of a launch, by its effect in the launched processes."""

import os

import pytest
from launching import free_port, warm_python

from anydevice.launch.table import BY_NAME

from . import test_before_start, test_launch, test_machines
from .conftest import RECORD

# With the other tests of several processes: one worker has the process that forks them.
pytestmark = pytest.mark.xdist_group("distributed")

#: Flags, and the variables that the script must see.
FLAGS = {
    "--mixed-precision=bf16": {"ACCELERATE_MIXED_PRECISION": "bf16"},
    "--gradient_accumulation_steps 4": {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"},
    "--cpu": {"ACCELERATE_USE_CPU": "true", "ACCELERATE_TORCH_DEVICE": "cpu"},
    "--num_cpu_threads_per_process 3": {"OMP_NUM_THREADS": "3"},
    "--enable_cpu_affinity": {"ACCELERATE_CPU_AFFINITY": "true"},
    "--debug": {"ACCELERATE_DEBUG_MODE": "true"},
    "--dynamo_backend inductor": {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"},
    "--dynamo-mode max-autotune": {"ACCELERATE_DYNAMO_MODE": "max-autotune"},
    "--dynamo_use_fullgraph": {"ACCELERATE_DYNAMO_USE_FULLGRAPH": "true"},
    "--dynamo_use_dynamic": {"ACCELERATE_DYNAMO_USE_DYNAMIC": "true"},
    "--dynamo_use_regional_compilation": {"ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "true"},
    "--use_fsdp": {"ACCELERATE_USE_FSDP": "true"},
    "--fsdp_version 2": {"FSDP_VERSION": "2"},
    "--fsdp-offload-params True": {"FSDP_OFFLOAD_PARAMS": "true"},
    "--fsdp_reshard_after_forward false": {"FSDP_RESHARD_AFTER_FORWARD": "false"},
    "--fsdp_auto_wrap_policy size_based_wrap": {"FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP"},
    "--fsdp_transformer_layer_cls_to_wrap A,B": {"FSDP_TRANSFORMER_CLS_TO_WRAP": "A,B"},
    "--fsdp_min_num_params 10": {"FSDP_MIN_NUM_PARAMS": "10"},
    "--fsdp_state_dict_type SHARDED_STATE_DICT": {"FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"},
    "--fsdp_cpu_ram_efficient_loading yes": {"FSDP_CPU_RAM_EFFICIENT_LOADING": "true"},
    "--fsdp_sync_module_states 1": {"FSDP_SYNC_MODULE_STATES": "true"},
    "--fsdp_activation_checkpointing true": {"FSDP_ACTIVATION_CHECKPOINTING": "true"},
    "--fsdp_activation_checkpointing_offload no": {
        "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "false"
    },
    "--fsdp_sharding_strategy FULL_SHARD": {"FSDP_SHARDING_STRATEGY": "FULL_SHARD"},
    "--fsdp_backward_prefetch BACKWARD_PRE": {"FSDP_BACKWARD_PREFETCH": "BACKWARD_PRE"},
    "--fsdp_forward_prefetch false": {"FSDP_FORWARD_PREFETCH": "false"},
    "--fsdp_use_orig_params true": {"FSDP_USE_ORIG_PARAMS": "true"},
    "--use_parallelism_config": {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"},
    "--parallelism_config_tp_size 2": {"PARALLELISM_CONFIG_TP_SIZE": "2"},
    "--parallelism_config_dp_shard_size 1": {"PARALLELISM_CONFIG_DP_SHARD_SIZE": "1"},
    "--parallelism_config_dp_replicate_size 1": {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "1"},
    "--parallelism_config_cp_size 1": {"PARALLELISM_CONFIG_CP_SIZE": "1"},
    "--parallelism_config_cp_backend torch": {"PARALLELISM_CONFIG_CP_BACKEND": "torch"},
    "--parallelism_config_cp_comm_strategy alltoall": {
        "PARALLELISM_CONFIG_CP_COMM_STRATEGY": "alltoall"
    },
    "--parallelism_config_sp_size 1": {"PARALLELISM_CONFIG_SP_SIZE": "1"},
    "--parallelism_config_sp_backend deepspeed": {"PARALLELISM_CONFIG_SP_BACKEND": "deepspeed"},
    "--parallelism_config_sp_seq_length 8": {"PARALLELISM_CONFIG_SP_SEQ_LENGTH": "8"},
    "--parallelism_config_sp_seq_length_is_variable yes": {
        "PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE": "true"
    },
    "--parallelism_config_sp_attn_implementation sdpa": {
        "PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION": "sdpa"
    },
    "--num_processes 2": {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
    "--save_state_alone": {"ANYDEVICE_SAVE_STATE_ALONE": "true"},
    "--role trainers": {"ROLE_NAME": "trainers"},
    "--max_restarts 1": {"TORCHELASTIC_MAX_RESTARTS": "1"},
    "--monitor_interval 0.05": {},
}  # fmt: skip
#: Arguments of the script that a shell, or a careless launcher, would change.
ARGUMENTS = [
    "--num_processes",
    "9",
    "two words",
    'quo"te',
    "it's",
    "$HOME",
    "",
    "--",
    "ünï",
    "a\nb",
]


def test_each_flag_reaches_the_processes(launcher):
    flags = [word for flag in FLAGS for word in flag.split(" ")]
    before = dict(os.environ)
    script, port = launcher.script(RECORD, "a script.py"), free_port()
    words = [*flags, "--main_process_port", port, script, *ARGUMENTS]
    assert launcher.run(*words, fresh=True) == 0
    assert dict(os.environ) == before
    found = launcher.recorded()
    assert list(found) == ["0-0", "1-0"]
    for rank, record in enumerate(found.values()):
        wanted = {k: v for variables in FLAGS.values() for k, v in variables.items()}
        wanted |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": str(port)}
        assert {k: record["env"].get(k) for k in wanted} == wanted
        assert record["argv"] == [script, *ARGUMENTS]
        assert (record["name"], record["main"], record["torch"]) == ("__main__", True, False)
        assert record["path"] == str(launcher.folder)


# ---------------------------------------------------------------------- DeepSpeed


#: Flags that need DeepSpeed: the variables that the script sees.
DEEPSPEED_FLAGS = {
    "--use_deepspeed": {"ACCELERATE_USE_DEEPSPEED": "true"},
    "--deepspeed_config_file {file}": {"ACCELERATE_DEEPSPEED_CONFIG_FILE": "{file}"},
    "--zero_stage 3": {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"},
    "--offload_optimizer_device nvme": {"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "nvme"},
    "--offload_param_device cpu": {"ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu"},
    "--offload_optimizer_nvme_path /a": {"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH": "/a"},
    "--offload-param-nvme-path /b": {"ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH": "/b"},
    "--zero3_init_flag false": {"ACCELERATE_DEEPSPEED_ZERO3_INIT": "false"},
    "--zero3_save_16bit_model true": {"ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true"},
    "--deepspeed_moe_layer_cls_names A,B": {"ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": "A,B"},
    "--gradient_clipping 0.5": {"ACCELERATE_GRADIENT_CLIPPING": "0.5"},
}  # fmt: skip
#: A package in its place: it writes down the configuration that it is given.
STAND_IN = """
    import json, os, pathlib

    def initialize(model, optimizer, config, **others):
        folder = pathlib.Path(os.environ["RECORD_FOLDER"])
        (folder / "config.json").write_text(json.dumps(config))
        return model, optimizer, None, None
"""
TRAIN = """
    import torch
    from anydevice import Accelerator

    Accelerator(cpu=True).prepare(torch.nn.Linear(1, 1))
"""


def test_the_flags_of_deepspeed_reach_deepspeed(launcher, monkeypatch):
    launcher.script(STAND_IN, "deepspeed.py")
    monkeypatch.syspath_prepend(launcher.folder)
    monkeypatch.setenv("PYTHONPATH", str(launcher.folder))
    monkeypatch.setenv("PYTHON_EXEC", warm_python(launcher.folder))
    file = launcher.folder / "ds.json"
    file.write_text('{"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": "auto"}}')
    flags = [word.format(file=file) for flag in DEEPSPEED_FLAGS for word in flag.split(" ")]
    assert launcher.run("--cpu", *flags, launcher.script(RECORD + TRAIN)) == 0
    found = launcher.recorded()
    wanted = {
        name: value.format(file=file)
        for variables in DEEPSPEED_FLAGS.values()
        for name, value in variables.items()
    }
    assert {name: found["0-0"]["env"].get(name) for name in wanted} == wanted
    assert found["config"] == {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": False},
        "fp16": {"enabled": False},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "nvme", "nvme_path": "/a"},
            "offload_param": {"device": "cpu", "nvme_path": "/b"},
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    }


# ---------------------------------------------------------------------- Megatron-LM

MEGATRON_FLAGS = {
    "--use_megatron_lm": {"ACCELERATE_USE_MEGATRON_LM": "true"},
    "--megatron_lm_tp_degree 2": {"MEGATRON_LM_TP_DEGREE": "2"},
    "--megatron-lm-pp-degree 2": {"MEGATRON_LM_PP_DEGREE": "2"},
    "--megatron_lm_num_micro_batches 4": {"MEGATRON_LM_NUM_MICRO_BATCHES": "4"},
    "--megatron_lm_gradient_clipping 0.5": {"MEGATRON_LM_GRADIENT_CLIPPING": "0.5"},
    "--megatron_lm_recompute_granularity full": {"MEGATRON_LM_RECOMPUTE_GRANULARITY": "full"},
    "--megatron_lm_recompute_method block": {"MEGATRON_LM_RECOMPUTE_METHOD": "block"},
    "--megatron_lm_recompute_num_layers 1": {"MEGATRON_LM_RECOMPUTE_NUM_LAYERS": "1"},
    "--megatron_lm_decoder_last_pipeline_num_layers 3": {
        "MEGATRON_LM_DECODER_LAST_PIPELINE_NUM_LAYERS": "3"
    },
    "--megatron_lm_attention_dropout 0.25": {"MEGATRON_LM_ATTENTION_DROPOUT": "0.25"},
    "--megatron_lm_hidden_dropout 0.5": {"MEGATRON_LM_HIDDEN_DROPOUT": "0.5"},
    **{
        f"--megatron_lm_{name} true": {f"MEGATRON_LM_{name.upper()}": "true"}
        for name in (
            "sequence_parallelism",
            "recompute_activations",
            "use_distributed_optimizer",
            "attention_softmax_in_fp32",
            "calculate_per_token_loss",
            "use_rotary_position_embeddings",
            "eod_mask_loss",
            "no_save_optim",
            "no_load_optim",
        )
    },
}


def test_the_flags_of_megatron_reach_the_processes(launcher, monkeypatch):
    launcher.script("", "megatron.py")  # a package in its place
    monkeypatch.syspath_prepend(launcher.folder)
    flags = [word for flag in MEGATRON_FLAGS for word in flag.split(" ")]
    assert launcher.run("--cpu", *flags, launcher.script(RECORD)) == 0
    wanted = {k: v for variables in MEGATRON_FLAGS.values() for k, v in variables.items()}
    environment = launcher.recorded()["0-0"]["env"]
    assert {name: environment.get(name) for name in wanted} == wanted


# ---------------------------------------------------------------------- output and rendezvous


def test_output_rendezvous_and_a_file_against_a_flag(launcher, sim, monkeypatch, capfd):
    monkeypatch.setenv("ANYDEVICE_SIMULATOR", "devices=2,memory=64MiB")
    file, logs, port = launcher.folder / "c.yaml", launcher.folder / "logs", free_port()
    file.write_text("use_cpu: true\nmixed_precision: bf16\n")
    words = ["--config_file", file, "--multi_gpu", "--num_processes", 1]
    words += ["--rdzv_backend", "c10d", "--rdzv_id", "job7", "--main_process_ip", "127.0.0.1"]
    words += ["--main_process_port", port, "--tee", 3, "--log_dir", logs, "--quiet"]
    script = launcher.script(RECORD + "\n    print('so far'); raise SystemExit(3)\n")
    assert launcher.run(*words, script) == 3
    environment = launcher.recorded()["0-0"]["env"]
    assert environment["ACCELERATE_TORCH_DEVICE"] == "sim"  # the flag, not the file's use_cpu
    assert environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert environment["TORCHELASTIC_RUN_ID"] == "job7"
    assert [f.read_text() for f in logs.rglob("stdout.log")] == ["so far\n"]
    captured = capfd.readouterr()
    assert "so far" in captured.out
    assert "rank 0" not in captured.err  # --quiet


def test_the_options_of_the_rendezvous(launcher, capfd):
    """Told that it is not the host, the only machine finds none, and soon."""
    words = ["--cpu", "--rdzv_backend", "c10d", "--main_process_ip", "127.0.0.1"]
    words += ["--main_process_port", free_port(), "--rdzv_conf", "is_host=0,read_timeout=1"]
    assert launcher.run(*words, launcher.script(RECORD)) == 1
    assert launcher.recorded() == {}
    assert "RendezvousConnectionError" in capfd.readouterr().err


def test_help_and_all_of_it(launcher, capsys):
    for flag, has_all in (("--help", False), ("--help-all", True)):
        with pytest.raises(SystemExit) as stopped:
            launcher.run(flag)
        assert stopped.value.code == 0
        out = capsys.readouterr().out
        assert "--num_processes" in out
        assert ("--zero_stage" in out) == has_all


#: Settings whose effect another test shows, and that test.
ELSEWHERE = {
    **dict.fromkeys(
        ("config_file", "multi_gpu", "rdzv_id", "tee", "log_dir", "quiet"),
        test_output_rendezvous_and_a_file_against_a_flag,
    ),
    **dict.fromkeys(("help", "help_all"), test_help_and_all_of_it),
    **dict.fromkeys(
        ("num_machines", "machine_rank", "main_process_ip", "main_process_port"),
        test_machines.test_two_machines_on_loopback,
    ),
    **dict.fromkeys(
        ("dry_run", "json"), test_before_start.test_a_dry_run_says_where_each_value_came_from
    ),
    **dict.fromkeys(
        ("device_type", "gpu_ids"),
        test_launch.test_four_processes_on_accelerators_with_their_devices_hidden,
    ),
    **dict.fromkeys(
        ("same_network", "main_training_function"),
        test_before_start.test_what_changes_nothing_is_said_by_name,
    ),
    "module": test_launch.test_a_module_and_its_package,
    "no_python": test_launch.test_a_program_of_its_own,
    **dict.fromkeys(("rdzv_backend", "rdzv_conf"), test_the_options_of_the_rendezvous),
}


def test_no_flag_is_without_a_test():
    words = [
        flag.split(" ")[0].split("=")[0] for flag in (*FLAGS, *DEEPSPEED_FLAGS, *MEGATRON_FLAGS)
    ]
    shown = {word.lstrip("-").replace("-", "_") for word in words}
    assert not shown & set(ELSEWHERE)
    assert shown | set(ELSEWHERE) == set(BY_NAME)
