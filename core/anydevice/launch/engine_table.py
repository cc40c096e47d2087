"""The settings of what runs inside the processes: torch.compile, FSDP, DeepSpeed, parallelism."""

from __future__ import annotations

from typing import Final

from anydevice.launch.settings import Kind, Setting

__all__ = ["DEEPSPEED", "DYNAMO", "FSDP", "PARALLELISM"]

_S = Setting
_DYNAMO_BACKENDS = (
    "no", "eager", "aot_eager", "inductor", "aot_ts_nvfuser", "nvprims_nvfuser", "cudagraphs",
    "ofi", "fx2trt", "onnxrt", "tensorrt", "aot_torchxla_trace_once", "torchxla_trace_once", "tvm",
)  # fmt: skip
DYNAMO: Final = (
    _S(
        "dynamo_backend",
        "choice",
        "compile the model with torch.compile and this backend",
        "torch.compile",
        keys=("dynamo_config.dynamo_backend", "dynamo_backend"),
        variable="ACCELERATE_DYNAMO_BACKEND",
        choices=tuple(name.upper() for name in _DYNAMO_BACKENDS),
    ),
    _S(
        "dynamo_mode",
        "choice",
        "how long it may compile for speed",
        "torch.compile",
        keys=("dynamo_config.dynamo_mode",),
        variable="ACCELERATE_DYNAMO_MODE",
        choices=("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
    ),
    *(
        _S(
            f"dynamo_use_{name}",
            "flag",
            text,
            "torch.compile",
            keys=(f"dynamo_config.dynamo_use_{name}",),
            variable=f"ACCELERATE_DYNAMO_USE_{name.upper()}",
        )
        for name, text in (
            ("fullgraph", "refuse a model that breaks into several graphs"),
            ("dynamic", "compile for any shape"),
            ("regional_compilation", "compile repeated blocks once"),
        )
    ),
)


def _fsdp(
    name: str,
    kind: Kind,
    text: str,
    *,
    variable: str = "",
    choices: tuple[str, ...] = (),
    unused: str = "",
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
        unused=unused,
    )


FSDP: Final = (
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
    _fsdp(
        "activation_checkpointing_offload",
        "bool",
        "accepted without effect",
        unused="use --fsdp_activation_checkpointing",
    ),
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


def _deepspeed(
    name: str,
    kind: Kind,
    text: str,
    suffix: str,
    *,
    choices: tuple[str, ...] = (),
    unused: str = "",
) -> Setting:
    return Setting(
        name,
        kind,
        text,
        "deepspeed",
        keys=(f"deepspeed_config.{name}",),
        variable=f"ACCELERATE_DEEPSPEED_{suffix}",
        choices=choices,
        least=0 if kind == "int" else None,
        most=3 if kind == "int" else None,
        needs="use_deepspeed",
        unused=unused,
    )


DEEPSPEED: Final = (
    _deepspeed("deepspeed_config_file", "text", "DeepSpeed's own JSON file", "CONFIG_FILE"),
    _deepspeed("zero_stage", "int", "stage of ZeRO, 0 to 3", "ZERO_STAGE"),
    *(
        _deepspeed(
            f"offload_{what}_device",
            "choice",
            f"where each {what} rests",
            f"OFFLOAD_{what.upper()}_DEVICE",
            choices=("none", "cpu", "nvme"),
        )
        for what in ("optimizer", "param")
    ),
    _deepspeed("offload_optimizer_nvme_path", "text", "a folder", "OFFLOAD_OPTIMIZER_NVME_PATH"),
    _deepspeed("offload_param_nvme_path", "text", "a folder", "OFFLOAD_PARAM_NVME_PATH"),
    _deepspeed(
        "zero3_init_flag",
        "bool",
        "accepted without effect",
        "ZERO3_INIT",
        unused="build the model in the script within deepspeed.zero.Init()",
    ),
    _deepspeed(
        "zero3_save_16bit_model", "bool", "save gathered 16-bit weights", "ZERO3_SAVE_16BIT_MODEL"
    ),
    _deepspeed(
        "deepspeed_moe_layer_cls_names",
        "text",
        "accepted without effect",
        "MOE_LAYER_CLS_NAMES",
        unused="set them in the script: deepspeed.utils.set_z3_leaf_modules(model, [Layer])",
    ),
    _S(
        "gradient_clipping",
        "float",
        "the largest norm of the gradient",
        "deepspeed",
        keys=("gradient_clipping", "deepspeed_config.gradient_clipping"),
        variable="ACCELERATE_GRADIENT_CLIPPING",
        least=0.0,
        needs="use_deepspeed",
        instead="clip in the script: accelerator.clip_grad_norm_(model.parameters(), max_norm)",
    ),
)
_NO_CONTEXT: Final = "context parallelism is not part of anydevice: use tp_size or dp_shard_size"
_NO_SEQUENCE: Final = "sequence parallelism is DeepSpeed's own: use its configuration file"
#: Name, kind, help, and why it has no effect.
_SIZES: Final[tuple[tuple[str, Kind, str, str], ...]] = (
    ("dp_replicate_size", "int", "copies of the model", ""),
    ("dp_shard_size", "int", "processes that shard one copy", ""),
    ("tp_size", "int", "processes of tensor parallelism", ""),
    ("cp_size", "int", "only 1: context parallelism is not there", ""),
    ("cp_backend", "text", "accepted without effect", _NO_CONTEXT),
    ("cp_comm_strategy", "text", "accepted without effect", _NO_CONTEXT),
    ("sp_size", "int", "only 1: sequence parallelism is not there", ""),
    ("sp_backend", "text", "accepted without effect", _NO_SEQUENCE),
    ("sp_seq_length", "int", "accepted without effect", _NO_SEQUENCE),
    ("sp_seq_length_is_variable", "bool", "accepted without effect", _NO_SEQUENCE),
    ("sp_attn_implementation", "text", "accepted without effect", _NO_SEQUENCE),
)
PARALLELISM: Final = (
    _S(
        "use_parallelism_config",
        "flag",
        "divide the processes by the sizes below",
        "parallelism",
        variable="ACCELERATE_USE_PARALLELISM_CONFIG",
    ),
    *(
        _S(
            f"parallelism_config_{name}",
            kind,
            text,
            "parallelism",
            keys=(f"parallelism_config.parallelism_config_{name}", f"parallelism_config.{name}"),
            variable=f"PARALLELISM_CONFIG_{name.upper()}",
            least=1 if kind == "int" else None,
            most=1 if name in ("cp_size", "sp_size") else None,
            needs="use_parallelism_config",
            unused=unused,
        )
        for name, kind, text, unused in _SIZES
    ),
)
