"""Settings of a launch that divide the model: FSDP, DeepSpeed, sizes of parallelism."""

from __future__ import annotations

from typing import Final

from anydevice.launch.settings import Kind, Setting

__all__ = ["DEEPSPEED", "FSDP", "PARALLELISM"]


def _fsdp(
    name: str, kind: Kind, text: str, *, variable: str = "", choices: tuple[str, ...] = ()
) -> Setting:
    return Setting(
        f"fsdp_{name}",
        kind,
        text,
        "fsdp",
        keys=(f"fsdp_config.fsdp_{name}", f"fsdp_config.{name}"),
        variable=variable or f"FSDP_{name.upper()}",
        choices=choices,
        least=0 if kind == "int" else None,
        needs="use_fsdp",
    )


FSDP = (
    _fsdp("version", "choice", "of FSDP; version 2 is what is used", choices=("1", "2")),
    _fsdp("offload_params", "bool", "keep parameters and gradients in host memory"),
    _fsdp("reshard_after_forward", "text", "free gathered weights after forward: true or false"),
    _fsdp(
        "auto_wrap_policy",
        "choice",
        "which modules are sharded on their own",
        choices=("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"),
    ),
    _fsdp(
        "transformer_layer_cls_to_wrap",
        "text",
        "class names of those modules, with commas",
        variable="FSDP_TRANSFORMER_CLS_TO_WRAP",
    ),
    _fsdp("min_num_params", "int", "least parameters of such a module, by size"),
    _fsdp(
        "state_dict_type",
        "choice",
        "how checkpoints are saved",
        choices=("FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT"),
    ),
    _fsdp("cpu_ram_efficient_loading", "bool", "the first process alone reads the checkpoint"),
    _fsdp("sync_module_states", "bool", "send the weights of rank 0 to all at the start"),
    _fsdp("activation_checkpointing", "bool", "compute activations again in backward"),
    _fsdp("activation_checkpointing_offload", "bool", "keep their inputs in host memory"),
    _fsdp(
        "sharding_strategy",
        "choice",
        "of FSDP 1",
        choices=(
            "FULL_SHARD",
            "SHARD_GRAD_OP",
            "NO_SHARD",
            "HYBRID_SHARD",
            "HYBRID_SHARD_ZERO2",
            *"12345",
        ),
    ),
    _fsdp(
        "backward_prefetch",
        "choice",
        "of FSDP 1",
        choices=("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"),
    ),
    _fsdp("forward_prefetch", "bool", "gather the next weights during forward"),
    _fsdp("use_orig_params", "bool", "of FSDP 1"),
)


def _deepspeed(name: str, kind: Kind, text: str, suffix: str) -> Setting:
    return Setting(
        name,
        kind,
        text,
        "deepspeed",
        keys=(f"deepspeed_config.{name}",),
        variable=f"ACCELERATE_DEEPSPEED_{suffix}",
        least=0 if kind == "int" else None,
        needs="use_deepspeed",
    )


DEEPSPEED = (
    _deepspeed("deepspeed_config_file", "text", "DeepSpeed's own JSON file", "CONFIG_FILE"),
    _deepspeed("zero_stage", "int", "stage of ZeRO, 0 to 3", "ZERO_STAGE"),
    _deepspeed("offload_optimizer_device", "text", "none, cpu or nvme", "OFFLOAD_OPTIMIZER_DEVICE"),
    _deepspeed("offload_param_device", "text", "none, cpu or nvme", "OFFLOAD_PARAM_DEVICE"),
    _deepspeed("offload_optimizer_nvme_path", "text", "a folder", "OFFLOAD_OPTIMIZER_NVME_PATH"),
    _deepspeed("offload_param_nvme_path", "text", "a folder", "OFFLOAD_PARAM_NVME_PATH"),
    _deepspeed("zero3_init_flag", "bool", "build the model sharded", "ZERO3_INIT"),
    _deepspeed(
        "zero3_save_16bit_model", "bool", "save gathered 16-bit weights", "ZERO3_SAVE_16BIT_MODEL"
    ),
    _deepspeed("deepspeed_moe_layer_cls_names", "text", "with commas", "MOE_LAYER_CLS_NAMES"),
)

_SIZES: Final[tuple[tuple[str, Kind, str], ...]] = (
    ("dp_replicate_size", "int", "copies of the model"),
    ("dp_shard_size", "int", "processes that shard one copy"),
    ("tp_size", "int", "processes of tensor parallelism"),
    ("cp_size", "int", "processes of context parallelism"),
    ("cp_backend", "text", "of context parallelism"),
    ("cp_comm_strategy", "text", "allgather or alltoall"),
    ("sp_size", "int", "processes of sequence parallelism"),
    ("sp_backend", "text", "of sequence parallelism"),
    ("sp_seq_length", "int", "length of all sequences"),
    ("sp_seq_length_is_variable", "bool", "lengths differ between batches"),
    ("sp_attn_implementation", "text", "of attention"),
)

PARALLELISM = (
    Setting(
        "use_parallelism_config",
        "flag",
        "divide the processes by the sizes below",
        "parallelism",
        variable="ACCELERATE_USE_PARALLELISM_CONFIG",
    ),
    *(
        Setting(
            f"parallelism_config_{name}",
            kind,
            text,
            "parallelism",
            keys=(f"parallelism_config.parallelism_config_{name}", f"parallelism_config.{name}"),
            variable=f"PARALLELISM_CONFIG_{name.upper()}",
            least=1 if kind == "int" else None,
            needs="use_parallelism_config",
        )
        for name, kind, text in _SIZES
    ),
)
