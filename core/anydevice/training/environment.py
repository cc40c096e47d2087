"""Choices that a launcher made, read from the environment where the script gives no argument."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any, Final

from anydevice.engines import (
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
    MegatronLMPlugin,
    ParallelismConfig,
)
from anydevice.errors import OptionError
from anydevice.text import TRUE_WORDS, says_yes

__all__ = [
    "deepspeed_from_environment",
    "fsdp_from_environment",
    "is_set",
    "megatron_from_environment",
    "parallelism_from_environment",
]

#: How an argument of each type is read.
_READS: Final[dict[str, Callable[[str], Any]]] = {
    "int": int,
    "float": float,
    "bool": says_yes,
    "str": str,
}


def is_set(name: str) -> bool:
    """Whether a variable says yes."""
    return says_yes(os.environ.get(name, ""))


def _reshard(text: str) -> Any:
    return says_yes(text) if text.lower() in (*TRUE_WORDS, "false", "0", "no") else text


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _policy(text: str) -> str:
    return text.lower()


_FSDP: Final[dict[str, tuple[str, Callable[[str], Any]]]] = {
    "FSDP_VERSION": ("fsdp_version", int),
    "FSDP_SHARDING_STRATEGY": ("sharding_strategy", str),
    "FSDP_RESHARD_AFTER_FORWARD": ("reshard_after_forward", _reshard),
    "FSDP_BACKWARD_PREFETCH": ("backward_prefetch", str),
    "FSDP_OFFLOAD_PARAMS": ("cpu_offload", says_yes),
    "FSDP_AUTO_WRAP_POLICY": ("auto_wrap_policy", _policy),
    "FSDP_TRANSFORMER_CLS_TO_WRAP": ("transformer_cls_names_to_wrap", _names),
    "FSDP_MIN_NUM_PARAMS": ("min_num_params", int),
    "FSDP_STATE_DICT_TYPE": ("state_dict_type", str),
    "FSDP_FORWARD_PREFETCH": ("forward_prefetch", says_yes),
    "FSDP_USE_ORIG_PARAMS": ("use_orig_params", says_yes),
    "FSDP_SYNC_MODULE_STATES": ("sync_module_states", says_yes),
    "FSDP_CPU_RAM_EFFICIENT_LOADING": ("cpu_ram_efficient_loading", says_yes),
    "FSDP_ACTIVATION_CHECKPOINTING": ("activation_checkpointing", says_yes),
    "FSDP_IGNORED_MODULES": ("ignored_modules", str),
}
_DEEPSPEED: Final[dict[str, tuple[str, Callable[[str], Any]]]] = {
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": ("hf_ds_config", str),
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": ("zero_stage", int),
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": ("offload_optimizer_device", str),
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": ("offload_param_device", str),
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH": ("offload_optimizer_nvme_path", str),
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH": ("offload_param_nvme_path", str),
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": ("zero3_save_16bit_model", says_yes),
    "ACCELERATE_GRADIENT_CLIPPING": ("gradient_clipping", float),
}
_MEGATRON: Final[dict[str, tuple[str, Callable[[str], Any]]]] = {
    f"MEGATRON_LM_{field.name.upper()}": (field.name, _READS[str(field.type).partition(" ")[0]])
    for field in dataclasses.fields(MegatronLMPlugin)
    if str(field.type) in ("int | None", "float | None", "bool | None", "str | None")
}


def _read(table: dict[str, tuple[str, Callable[[str], Any]]]) -> dict[str, Any]:
    """The arguments that variables give."""
    given: dict[str, Any] = {}
    for variable, (argument, read) in table.items():
        text = os.environ.get(variable, "")
        if not text or text.lower() == "none":
            continue
        try:
            given[argument] = read(text)
        except ValueError as error:
            raise OptionError(f"{variable}={text!r} in the environment: {error}") from error
    return given


def fsdp_from_environment() -> FullyShardedDataParallelPlugin | None:
    """The plugin that the launcher asks for; None where it asks for none.

    Raises:
        OptionError: a value that cannot be read, or that `fully_shard` cannot do.
    """
    if not is_set("ACCELERATE_USE_FSDP"):
        return None
    given = _read(_FSDP)
    if given.get("auto_wrap_policy") == "size_based_wrap":
        given.setdefault("min_num_params", 100_000_000)
        given.pop("transformer_cls_names_to_wrap", None)
    elif given.get("auto_wrap_policy") != "size_based_wrap":
        given.pop("min_num_params", None)
    if given.get("auto_wrap_policy") == "no_wrap":
        given.pop("transformer_cls_names_to_wrap", None)
    return FullyShardedDataParallelPlugin(**given)


def deepspeed_from_environment() -> DeepSpeedPlugin | None:
    """The plugin that the launcher asks for; None where it asks for none.

    Raises:
        OptionError: a value that cannot be read, or that DeepSpeed does not know.
    """
    return DeepSpeedPlugin(**_read(_DEEPSPEED)) if is_set("ACCELERATE_USE_DEEPSPEED") else None


def megatron_from_environment() -> MegatronLMPlugin | None:
    """The plugin that the launcher asks for; None where it asks for none.

    Raises:
        OptionError: a value that cannot be read, or that is not there.
    """
    return MegatronLMPlugin(**_read(_MEGATRON)) if is_set("ACCELERATE_USE_MEGATRON_LM") else None


def parallelism_from_environment() -> ParallelismConfig | None:
    """The mesh that the launcher asks for; None where it asks for none."""
    return ParallelismConfig() if is_set("ACCELERATE_USE_PARALLELISM_CONFIG") else None
