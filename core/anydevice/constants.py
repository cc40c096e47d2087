"""Names of files that checkpoints and saved models have in the reference."""

from __future__ import annotations

from typing import Final

__all__ = [
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
