"""A batch for a model that is run to be seen running: of the right shape, and of no meaning."""

from __future__ import annotations

import inspect
from typing import Any, Final

import torch

from anydevice.errors import ModelError

__all__ = ["synthetic_batch"]

_TOKENS: Final = 8
_SECOND_OF_SOUND: Final = 16_000


def synthetic_batch(model: Any) -> dict[str, torch.Tensor]:
    """Inputs for text, vision, audio and several at once, by the names that ``forward`` takes.

    Args:
        model: a transformers model.

    Raises:
        ModelError: it takes an input for which no batch is known.
    """
    main = getattr(model, "main_input_name", "input_ids")
    takes = inspect.signature(model.forward).parameters
    makers = {
        "input_ids": _token_ids,
        "pixel_values": _pixels,
        "input_values": _waveform,
        "input_features": _spectrogram,
    }
    if main not in makers:
        raise ModelError(
            f"{type(model).__name__} takes {main!r}, for which no synthetic batch is known; load "
            "it with anydevice.from_pretrained and call it yourself"
        )
    batch = {main: makers[main](model)}
    if main == "input_ids" and "pixel_values" in takes and _config(model, "vision_config"):
        batch["pixel_values"] = _pixels(model)
    elif main != "input_ids" and "input_ids" in takes:
        batch["input_ids"] = _token_ids(model)
    if "decoder_input_ids" in takes and _config(model, "is_encoder_decoder"):
        start = _config(model, "decoder_start_token_id") or 0
        batch["decoder_input_ids"] = torch.full((1, 1), start)
    return batch


def _token_ids(model: Any) -> torch.Tensor:
    text = _config(model, "text_config") or model.config
    size = getattr(text, "vocab_size", None) or 100
    return torch.arange(1, _TOKENS + 1).remainder(size).reshape(1, -1)


def _pixels(model: Any) -> torch.Tensor:
    config = _config(model, "vision_config") or model.config
    size = getattr(config, "image_size", None) or 224
    if isinstance(size, dict):
        size = [size.get("height", 224), size.get("width", 224)]
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    channels = getattr(config, "num_channels", None) or 3
    shape = [1, channels, height, width]
    frames = getattr(config, "num_frames", None)
    if frames:  # a video
        shape.insert(1, frames)
    return torch.zeros(shape, dtype=model.dtype)


def _waveform(model: Any) -> torch.Tensor:
    bins = _config(model, "num_mel_bins")
    if bins and _config(model, "max_length"):  # a spectrogram under the same name
        return torch.zeros(1, model.config.max_length, bins, dtype=model.dtype)
    return torch.zeros(1, _SECOND_OF_SOUND, dtype=model.dtype)


def _spectrogram(model: Any) -> torch.Tensor:
    bins = _config(model, "num_mel_bins") or _config(model, "feature_projection_input_dim") or 80
    positions = _config(model, "max_source_positions")
    if positions:  # twice as many, since the first convolution halves them
        return torch.zeros(1, bins, 2 * positions, dtype=model.dtype)
    return torch.zeros(1, 100, bins, dtype=model.dtype)


def _config(model: Any, name: str) -> Any:
    return getattr(model.config, name, None)
