"""Megatron-LM's engine on Megatron-core itself: training, checkpoints, choices, refusals."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util

import pytest
from engines import megatron_ranks as ranks
from launching import free_port
from launching import run_ranks as launch
from training import checkpoint_ranks

from anydevice.engines import MegatronLMPlugin
from anydevice.errors import MissingDependencyError, OptionError
from anydevice.launch.arguments import read_words
from anydevice.launch.config_file import read_config
from anydevice.launch.megatron_table import MEGATRON
from anydevice.training import Accelerator, AcceleratorState
from anydevice.training.environment import megatron_from_environment

pytestmark = pytest.mark.xdist_group("megatron")

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None,
    reason="needs megatron-core, of the extra [dev]",
)
FAMILIES = ("gpt2", "llama", "mistral", "qwen2")
run_ranks = functools.partial(
    launch,
    timeout=250,
    imports=(
        *(f"transformers.models.{name}.modeling_{name}" for name in FAMILIES),
        "anydevice.engines.megatron.engine",
        "megatron.core.models.gpt.gpt_layer_specs",
        "megatron.core.pipeline_parallel",
        "megatron.core.optimizer",
    ),
)


@needs_package
@pytest.mark.parametrize(("size", "device"), [(2, "cpu"), (4, "cpu"), (2, "sim")])
def test_training_equals_the_plain_loop_and_resuming_equals_going_on(size, device, tmp_path):
    only = ranks.FEW if device == "sim" else None
    for failed in run_ranks(
        ranks.all_cases, size, device, device == "cpu", str(tmp_path / "saved"), only
    ):
        assert not failed, "\n".join(f"{case}: {text}" for case, text in failed.items())


@needs_package
def test_a_checkpoint_is_read_by_other_layouts_and_another_engine(tmp_path):
    assert all(run_ranks(ranks.other_layouts, 2, "cpu", str(tmp_path / "saved")))


# ---------------------------------------------------------------------- choices

#: What fields that have an effect are seen to do, on each of two ranks.
EFFECTS = {
    "tp_degree": 12,
    "pp_degree": 1,
    "num_micro_batches": 4,
    "gradient_clipping": 0.5,
    "sequence_parallelism": True,
    "recompute_activations": "selective",
    "recompute_granularity": "full",
    "recompute_method": "block",
    "recompute_num_layers": 1,
    "use_distributed_optimizer": "DistributedOptimizer",
    "attention_dropout": 0.25,
    "hidden_dropout": 0.125,
    "attention_softmax_in_fp32": True,
    "calculate_per_token_loss": True,
    "eod_mask_loss": True,
    "return_logits": True,
    "no_save_optim": 0,
    "no_load_optim": None,
    "other_megatron_args": True,
}
#: Those that are compared otherwise below.
OTHERWISE = {"decoder_last_pipeline_num_layers", "seq_length", "use_rotary_position_embeddings"}
#: Values that are refused, with words of the remedy.
REFUSED = {
    "use_custom_fsdp": (True, "FullyShardedDataParallelPlugin"),
    "overlap_cpu_optimizer_d2h_h2d": (True, "cpu_offload"),
    "optimizer_cpu_offload": (True, "cpu_offload"),
    "use_precision_aware_optimizer": (True, "Transformer Engine"),
    "attention_backend": (True, "leave it out"),
    "expert_model_parallel_size": (2, "leave it out"),
    "expert_tensor_parallel_size": (2, "leave it out"),
    "context_parallel_size": (2, "tp_degree"),
    "pipeline_model_parallel_split_rank": (1, "leave it out"),
    "num_layers_per_virtual_pipeline_stage": (1, "pp_degree"),
    "is_train_batch_min": (False, "DataLoader"),
    "train_iters": (10, "loop"),
    "train_samples": (10, "loop"),
    "weight_decay_incr_style": ("linear", "groups"),
    "start_weight_decay": (0.1, "groups"),
    "end_weight_decay": (0.1, "groups"),
    "lr_decay_style": ("cosine", "scheduler"),
    "lr_decay_iters": (1, "scheduler"),
    "lr_decay_samples": (1, "scheduler"),
    "lr_warmup_iters": (1, "scheduler"),
    "lr_warmup_samples": (1, "scheduler"),
    "lr_warmup_fraction": (0.1, "scheduler"),
    "min_lr": (1e-5, "scheduler"),
    "consumed_samples": ([1], "skip_first_batches"),
    "no_wd_decay_cond": (len, "groups"),
    "scale_lr_cond": (len, "groups"),
    "lr_mult": (2.0, "groups"),
    "megatron_dataset_flag": (True, "DataLoader"),
    "encoder_seq_length": (8, "leave it out"),
    "decoder_seq_length": (8, "seq_length"),
    "tensorboard_dir": ("logs", "log_with"),
    "set_all_logging_options": (True, "log_with"),
    "eval_iters": (5, "loop"),
    "eval_interval": (5, "loop"),
    "custom_train_step_class": (object, "loop"),
    "custom_train_step_kwargs": ({}, "loop"),
    "custom_model_provider_function": (len, "prepare the model"),
    "custom_prepare_model_function": (len, "prepare the model"),
    "custom_megatron_datasets_provider_function": (len, "DataLoader"),
    "custom_get_batch_function": (len, "DataLoader"),
    "custom_loss_function": (len, "labels"),
}


def test_each_field_has_a_row():
    rows = [*EFFECTS, *OTHERWISE, *REFUSED]
    assert sorted(rows) == sorted(field.name for field in dataclasses.fields(MegatronLMPlugin))


@needs_package
def test_fields_do_what_they_say(tmp_path):
    for rank, seen in enumerate(run_ranks(ranks.effects, 2, "cpu", str(tmp_path))):
        assert {name: seen[name] for name in EFFECTS} == EFFECTS
        assert seen["decoder_last_pipeline_num_layers"] == 2 - rank
        assert "seq_length=7" in seen["seq_length"]
        assert seen["samples are gathered once"]
        assert not seen["schedulers warn"]


@pytest.mark.parametrize("field", REFUSED)
def test_what_is_not_there_is_refused_with_the_remedy(field):
    value, remedy = REFUSED[field]
    with pytest.raises(OptionError) as caught:
        MegatronLMPlugin(**{field: value})
    assert field in str(caught.value)
    assert remedy in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tp_degree": 0}, r"tp_degree=0\): give a number from 1"),
        ({"num_micro_batches": True}, "num_micro_batches=True"),
        ({"hidden_dropout": 1.5}, "hidden_dropout=1.5"),
        ({"gradient_clipping": -1}, "gradient_clipping=-1"),
        ({"sequence_parallelism": True}, "give tp_degree"),
        ({"recompute_granularity": "half"}, "'selective' or 'full'"),
        ({"recompute_granularity": "full"}, "needs recompute_method"),
        ({"recompute_num_layers": 1}, "recompute_num_layers=.*needs recompute_granularity"),
        ({"recompute_method": "block"}, "recompute_method=.*needs recompute_granularity"),
        (
            {"recompute_activations": True, "recompute_granularity": "full"},
            "Leave one out",
        ),
    ],
)
def test_a_value_without_meaning_is_named(arguments, message):
    with pytest.raises(OptionError, match=message):
        MegatronLMPlugin(**arguments)


# ---------------------------------------------------------------------- refusals

REFUSALS = {
    "processes": "OptionError: MegatronLMPlugin(tp_degree=4, pp_degree=1) needs a multiple of 4",
    "layers": "pp_degree=2) does not divide",
    "rotary": "use_rotary_position_embeddings=False",
    "unknown": "'bucket_sise'",
    "twice": "'hidden_size'",
    "fp16": "use 'bf16' or 'no'",
    "micro": "num_micro_batches=3) does not divide a batch of 4",
    "tokens": "num_micro_batches instead of gradient_accumulation_steps",
    "words": "vocab_size=31",
    "bias": "attention_bias=True",
    "window": "sliding_window=4",
    "drops": "embd_pdrop=0.3",
    "family": "ModelError: MegatronLMPlugin: Linear is none of LlamaForCausalLM",
    "alone": "ModelError: MegatronLMPlugin: this model was prepared without an optimizer",
    "several": "ModelError: MegatronLMPlugin trains one model",
    "unlike": "are one weight of Megatron's",
    "kind": "Megatron has no Adagrad",
    "again": "has no weights",
    "inputs": "Leave token_type_ids out",
    "positions": "leave position_ids out",
    "labels": "needs labels",
    "items": "backward(num_items=): the engine 'megatron_lm'",
    "values": "clip_grad_value_: the engine 'megatron_lm'",
    "norm": "norm 2 only",
    "twice backward": "call the model once for each backward",
    "evaluation": "model.train()",
    "state": "save_state(folder)",
}


@needs_package
def test_what_cannot_be_done_is_refused_by_name():
    for seen in run_ranks(ranks.refusals, 2, "cpu"):
        assert seen.keys() == REFUSALS.keys()
        wrong = {name: seen[name] for name, text in REFUSALS.items() if text not in seen[name]}
        assert not wrong


def test_without_the_package_the_remedy_is_named(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *args: None if name == "megatron" else find(name, *args),
    )
    AcceleratorState._reset_state()
    with pytest.raises(MissingDependencyError, match=r"pip install megatron-core.*tp_size"):
        Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(tp_degree=2))
    AcceleratorState._reset_state()


@needs_package
def test_a_process_that_was_started_alone_is_told_how_to_start():
    AcceleratorState._reset_state()
    with pytest.raises(OptionError, match="anydevice launch"):
        Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin())
    AcceleratorState._reset_state()


# ---------------------------------------------------------------------- the launcher


#: What Accelerate's launcher takes, after ``--megatron_lm_``.
PEER_FLAGS = set(EFFECTS) - {"return_logits", "other_megatron_args"} | {
    "attention_backend",
    "context_parallel_size",
    "decoder_last_pipeline_num_layers",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "optimizer_cpu_offload",
    "overlap_cpu_optimizer_d2h_h2d",
    "use_custom_fsdp",
    "use_precision_aware_optimizer",
    "use_rotary_position_embeddings",
}


def test_every_field_that_a_launcher_can_give_is_a_flag_or_is_refused_there():
    flags = {setting.name.removeprefix("megatron_lm_") for setting in MEGATRON}
    assert flags == PEER_FLAGS - REFUSED.keys()
    for name in PEER_FLAGS & REFUSED.keys():
        with pytest.raises(OptionError, match=r"has no meaning here: .+"):
            read_words([f"--megatron_lm_{name}", "2", "script.py"])


def test_the_variables_of_each_flag_reach_the_plugin(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_MEGATRON_LM", "true")
    given = {
        "tp_degree": 2,
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": 3,
    }
    for setting in MEGATRON:
        name = setting.name.removeprefix("megatron_lm_")
        if name not in given and name != "recompute_activations":
            given[name] = {"int": 3, "float": 0.25, "bool": True}[setting.kind]
        if name in given:
            monkeypatch.setenv(setting.variable, setting.render(given[name]))
    plugin = megatron_from_environment()
    assert {name: getattr(plugin, name) for name in given} == given
    monkeypatch.setenv("MEGATRON_LM_PP_DEGREE", "two")
    with pytest.raises(OptionError, match="MEGATRON_LM_PP_DEGREE='two'"):
        megatron_from_environment()
    monkeypatch.setenv("MEGATRON_LM_PP_DEGREE", "2")
    monkeypatch.setenv("MEGATRON_LM_CONTEXT_PARALLEL_SIZE", "2")
    with pytest.raises(OptionError, match="context_parallel_size=2"):
        megatron_from_environment()


def test_a_configuration_file_of_the_peer_gives_the_flags(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(
        "distributed_type: MEGATRON_LM\n"
        "megatron_lm_config: {megatron_lm_tp_degree: 2, megatron_lm_sequence_parallelism: true}\n"
    )
    assert read_config(path).values == {
        "use_megatron_lm": True,
        "megatron_lm_tp_degree": 2,
        "megatron_lm_sequence_parallelism": True,
    }


@needs_package
def test_a_rank_that_is_killed_while_saving_is_named_and_the_last_checkpoint_is_whole(tmp_path):
    cases = [("megatron", 0, moment) for moment in range(2, 24, 5)]
    cases += [("megatron", 1, moment) for moment in range(1, 6, 2)]
    ports = [free_port() for _ in cases]
    where = str(tmp_path)
    found = run_ranks(checkpoint_ranks.killed_between_ranks, 2, "cpu", where, cases, ports)
    ways = [way for way, *_ in cases]
    (weights,) = run_ranks(checkpoint_ranks.found_after, 1, "cpu", where, ways)
    died = 0
    for (_, victim, moment), *told, weight in zip(cases, *found, weights, strict=True):
        assert weight in ([1.0], [2.0]), (victim, moment)
        if told[victim].startswith("signal"):
            died += 1
            assert f"rank {victim}" in told[1 - victim], (victim, moment, told)
        else:
            assert told == ["saved", "saved"], (victim, moment)
            assert weight == [2.0]
    assert died >= 6
