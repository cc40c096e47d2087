"""What is wrong, without effect, or only to be shown is said before anything starts."""

import json
import socket

import pytest

from .conftest import RECORD


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num_proceses", "2"], "did you mean '--num_processes'"),
        (["--fsdp-ofload-params", "1"], "did you mean '--fsdp_offload_params'"),
        (["--num_processes", "0"], "--num_processes: '0' is less than 1"),
        (["--num-processes", "two"], "--num-processes: 'two' is not a whole number"),
        (["--mixed_precision", "bf61"], "did you mean 'bf16'"),
        (["--dynamo_backend", "indcutor"], "did you mean 'INDUCTOR'"),
        (["--main_process_port", "70000"], "is more than 65535"),
        (["--machine_rank", "1"], "it is at most 0"),
        (["--num_machines", "2", "--num_processes", "3"], "not a multiple of"),
        (["--num_machines", "2", "--num_processes", "2"], "needs --main_process_ip"),
        (["--device_type", "nope"], "no backend for device type 'nope'"),
        (["--device_type", "npu"], "torch_npu is not installed"),
        (["--cpu", "--device_type", "npu"], "contradict each other"),
        (["--multi_gpu"], "has no accelerator"),
        (["--gpu_ids", "0", "--cpu"], "names no variable that hides devices"),
        (["--fsdp_version", "2"], "no effect without --use_fsdp"),
        (["--gradient_clipping", "1"], "no effect without --use_deepspeed; clip in the script"),
        (["--parallelism_config_tp_size", "2"], "no effect without --use_parallelism_config"),
        (["--use_parallelism_config", "--parallelism_config_cp_size", "2"], "is more than 1"),
        (["--zero_stage", "4"], "--zero_stage: '4' is more than 3"),
        (["--offload_param_device", "gpu"], "'gpu' is not one of none, cpu, nvme"),
        (["--use_fsdp", "--use_deepspeed"], "choose one"),
        (["--use_deepspeed"], "pip install deepspeed"),
        (["--fsdp_offload_params", "maybe", "--use_fsdp"], "neither true nor false"),
        (["--tpu_use_sudo"], "TPU pods are not launched"),
        (["--megatron_lm_tp_degree", "2"], "no effect without --use_megatron_lm"),
        (["--use_megatron_lm", "--use_fsdp"], "choose one"),
        (["--megatron_lm_context_parallel_size", "2"], "use --megatron_lm_tp_degree"),
        (["--use_megatron_lm", "--megatron_lm_pp_degree", "0"], "'0' is less than 1"),
        (["--config_file", "/nowhere.yaml"], "there is no such file"),
        (["-m", "--no_python"], "choose one"),
    ],
)
def test_bad_values_are_named_before_anything_starts(launcher, capsys, words, message):
    assert launcher.run(*words, launcher.script(RECORD)) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert launcher.recorded() == {}


def test_an_option_without_its_value(launcher, capsys):
    assert launcher.run("--num_processes") == 2
    assert "--num_processes needs a value" in capsys.readouterr().err


def test_more_processes_than_devices_are_refused(launcher, sim, capsys):
    assert launcher.run("--num_processes", 3, launcher.script(RECORD)) == 2
    assert "3 processes on this machine, which has 2 sim devices" in capsys.readouterr().err


def test_a_script_that_is_missing(launcher, capsys):
    for words, message in [
        ([], "the script is missing"),
        (["nothere.py"], "there is no such script"),
        (["-m", "a b"], "not the name of a module"),
        (["--no_python", "no-such-program"], "no such program"),
    ]:
        assert launcher.run("--cpu", *words) == 2
        assert message in capsys.readouterr().err


def test_a_busy_port_is_named(launcher, capsys):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert launcher.run("--cpu", "--main_process_port", port, launcher.script(RECORD)) == 2
    assert f"{port} cannot be used" in capsys.readouterr().err


def test_a_world_size_in_the_environment_is_used_or_refused(launcher, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    script = launcher.script(RECORD)
    assert launcher.run("--cpu", "--num_processes", 4, script) == 2
    assert "WORLD_SIZE=2 is set" in capsys.readouterr().err
    assert launcher.run("--cpu", "--dry_run", "--json", script) == 0
    assert json.loads(capsys.readouterr().out)["processes"] == 2


# ---------------------------------------------------------------------- without effect

#: Values that change nothing, and a word of what the launcher says instead.
IDLE = {
    "--same_network": "--main_process_ip",
    "--main_training_function train": "run as it stands",
    "--use_deepspeed": "",
    "--zero3_init_flag true": "deepspeed.zero.Init()",
    "--deepspeed_moe_layer_cls_names A": "set_z3_leaf_modules",
    "--use_parallelism_config": "",
    "--parallelism_config_cp_backend torch": "tp_size or dp_shard_size",
    "--parallelism_config_cp_comm_strategy alltoall": "tp_size or dp_shard_size",
    "--parallelism_config_sp_backend deepspeed": "DeepSpeed's own",
    "--parallelism_config_sp_seq_length 8": "DeepSpeed's own",
    "--parallelism_config_sp_seq_length_is_variable true": "DeepSpeed's own",
    "--parallelism_config_sp_attn_implementation sdpa": "DeepSpeed's own",
}


def test_what_changes_nothing_is_said_by_name(launcher, capfd, monkeypatch):
    monkeypatch.setattr("anydevice.launch.plan._check_packages", lambda settings: None)
    monkeypatch.setattr(
        "anydevice.launch.execute.execute", lambda plan: 0
    )  # only what comes before
    words = [word for flag in IDLE for word in flag.split(" ")]
    file = launcher.folder / "c.yaml"
    file.write_text("fsdp_config: {fsdp_version: 2}\nsame_network: true\n")
    assert launcher.run("--cpu", "--config_file", file, *words, "--no_python", "true") == 0
    said = capfd.readouterr().err.splitlines()
    for flag, instead in IDLE.items():
        name = flag.split(" ")[0]
        assert [instead in line for line in said if f" {name} has no effect" in line] == (
            [True] if instead else []
        ), said
    assert any("fsdp_config.fsdp_version)) has no effect without --use_fsdp" in s for s in said)
    assert len(said) == sum(map(bool, IDLE.values())) + 1
    assert (
        launcher.run("--cpu", "--dry_run", "--json", "--same_network", "--no_python", "true") == 0
    )
    assert "--same_network" in json.loads(capfd.readouterr().out)["without_effect"][0]


# ---------------------------------------------------------------------- precedence


def test_a_dry_run_says_where_each_value_came_from(launcher, capsys, monkeypatch):
    config = launcher.folder / "c.yaml"
    config.write_text(
        "mixed_precision: fp16\nnum_processes: 3\ngradient_accumulation_steps: 5\nuse_cpu: true\n"
        "unheard_of: 7\n"
    )
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ANYDEVICE_GRADIENT_ACCUMULATION_STEPS", "6")
    script = launcher.script(RECORD, "a script.py")
    words = ["--dry-run", "--config_file", config, "--num_processes", 2, script, "two words"]
    assert launcher.run("--json", *words) == 0
    said = json.loads(capsys.readouterr().out)
    origin = {name: (v["value"], v["from"]) for name, v in said["settings"].items()}
    assert origin["num_processes"] == (2, "flag")
    assert origin["mixed_precision"] == ("bf16", "environment ACCELERATE_MIXED_PRECISION")
    assert origin["gradient_accumulation_steps"][0] == 6
    assert origin["cpu"] == (True, f"file {config} (use_cpu)")
    assert origin["max_restarts"] == (0, "default")
    assert said["left_aside"] == ["unheard_of"]
    environment = {k: v["value"] for k, v in said["environment"].items()}
    assert environment["ANYDEVICE_GRADIENT_ACCUMULATION_STEPS"] == "6"
    assert said["torchrun"][-2:] == [script, "two words"]
    assert launcher.run(*words) == 0
    text = capsys.readouterr().out
    assert "-m torch.distributed.run --standalone --nproc-per-node 2" in text
    assert "'two words'" in text
    assert "ACCELERATE_MIXED_PRECISION=bf16  (environment ACCELERATE_MIXED_PRECISION)" in text
    assert launcher.recorded() == {}
