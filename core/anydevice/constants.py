"""Names of the reference: of the files of checkpoints and saved models, and of choices."""

from __future__ import annotations

from typing import Final

__all__ = [
    "FSDP2_STATE_DICT_TYPE",
    "FSDP_AUTO_WRAP_POLICY",
    "FSDP_BACKWARD_PREFETCH",
    "FSDP_MODEL_NAME",
    "FSDP_SHARDING_STRATEGY",
    "FSDP_STATE_DICT_TYPE",
    "MODEL_NAME",
    "OPTIMIZER_NAME",
    "PROFILE_PATTERN_NAME",
    "RNG_STATE_NAME",
    "SAFE_MODEL_NAME",
    "SAFE_WEIGHTS_INDEX_NAME",
    "SAFE_WEIGHTS_NAME",
    "SAFE_WEIGHTS_PATTERN_NAME",
    "SAMPLER_NAME",
    "SCALER_NAME",
    "SCHEDULER_NAME",
    "WEIGHTS_INDEX_NAME",
    "WEIGHTS_NAME",
    "WEIGHTS_PATTERN_NAME",
]

# `Accelerator.save_state`.
MODEL_NAME: Final = "pytorch_model"
SAFE_MODEL_NAME: Final = "model"
OPTIMIZER_NAME: Final = "optimizer"
RNG_STATE_NAME: Final = "random_states"
SCALER_NAME: Final = "scaler.pt"
SCHEDULER_NAME: Final = "scheduler"
SAMPLER_NAME: Final = "sampler"
PROFILE_PATTERN_NAME: Final = "profile_{suffix}.json"

# `Accelerator.save_model`.
WEIGHTS_NAME: Final = f"{MODEL_NAME}.bin"
WEIGHTS_PATTERN_NAME: Final = "pytorch_model{suffix}.bin"
WEIGHTS_INDEX_NAME: Final = f"{WEIGHTS_NAME}.index.json"
SAFE_WEIGHTS_NAME: Final = f"{SAFE_MODEL_NAME}.safetensors"
SAFE_WEIGHTS_PATTERN_NAME: Final = "model{suffix}.safetensors"
SAFE_WEIGHTS_INDEX_NAME: Final = f"{SAFE_WEIGHTS_NAME}.index.json"

# What scripts may say of sharding; `FullyShardedDataParallelPlugin` refuses what there is not.
FSDP2_STATE_DICT_TYPE: Final = ["SHARDED_STATE_DICT", "FULL_STATE_DICT"]
FSDP_AUTO_WRAP_POLICY: Final = ["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"]
FSDP_BACKWARD_PREFETCH: Final = ["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"]
FSDP_MODEL_NAME: Final = "pytorch_model_fsdp"
FSDP_SHARDING_STRATEGY: Final = [
    "FULL_SHARD",
    "SHARD_GRAD_OP",
    "NO_SHARD",
    "HYBRID_SHARD",
    "HYBRID_SHARD_ZERO2",
]
FSDP_STATE_DICT_TYPE: Final = ["FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"]
