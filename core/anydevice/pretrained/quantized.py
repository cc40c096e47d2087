"""Quantized checkpoints: transformers' own quantizers load them, and their model is dispatched."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, Final

from anydevice.errors import CheckpointMismatchError, MissingDependencyError, ModelError
from anydevice.text import list_some

__all__ = ["load_quantized", "method_of", "refuse_packed"]

#: Names that quantizers give to packed weights and to what belongs to them.
_PACKED: Final = re.compile(
    r"\.(qweight|qzeros|g_idx|weight_packed|weight_shape|weight_zero_point|absmax|quant_map"
    r"|nested_absmax|quant_state\..*|weight_scale|weight_scale_inv|input_scale|SCB|codebooks|codes"
    r"|weight_format|_blocks|_scales)$|_blocks$|_scales$|\.absmax$"
)


def method_of(config: Any) -> str | None:
    """The name of the method that a config (of a model, or of quantizing) names; None for none."""
    given = getattr(config, "quantization_config", None) or config
    if isinstance(given, dict):
        method = given.get("quant_method")
    else:
        method = getattr(given, "quant_method", None)
    return None if method is None else str(getattr(method, "value", method))


def refuse_packed(names: Iterable[str], expected: Collection[str], source: str) -> None:
    """Refuse packed weights whose checkpoint does not say how they were quantized.

    Raises:
        CheckpointMismatchError: there are some, which the model does not have.
    """
    packed = [name for name in names if name not in expected and _PACKED.search(name)]
    if packed:
        raise CheckpointMismatchError(
            f"{source} holds quantized weights ({list_some(packed, 3)}), but its config.json has "
            "no quantization_config that says how to read them: pass quantization_config=, or load "
            "the checkpoint with the library that quantized it"
        )


def load_quantized(
    model_class: Any,
    folder: Path,
    config: Any,
    method: str,
    options: dict[str, Any],
    *,
    allow_missing: bool,
) -> Any:
    """Load a model through transformers and the package of its quantizer, on the host.

    Args:
        model_class: a class of transformers.
        folder: the checkpoint.
        config: the model's config.
        method: the name of the method.
        options: other arguments of transformers' ``from_pretrained``.
        allow_missing: accept weights that the checkpoint lacks.

    Raises:
        CheckpointMismatchError: the checkpoint lacks weights.
        MissingDependencyError: the quantizer's package is not installed.
        ModelError: the quantizer cannot load on this machine.
    """
    try:
        model, found = model_class.from_pretrained(
            folder, config=config, output_loading_info=True, **options
        )
    except ImportError as error:
        raise MissingDependencyError(
            f"{folder} is quantized with {method!r}, and transformers' quantizer for it needs a "
            f"package that is not installed: {_short(error)}"
        ) from error
    except (RuntimeError, ValueError, NotImplementedError, AttributeError) as error:
        raise ModelError(
            f"{folder} is quantized with {method!r}, and transformers' quantizer for it cannot "
            f"load it on the host of this machine: {type(error).__name__}: {_short(error)}"
        ) from error
    if not allow_missing:
        _require_all(found, folder, method)
    return model


def _require_all(found: dict[str, Any], folder: Path, method: str) -> None:
    """Refuse a model whose weights were initialised, since the checkpoint lacks them."""
    missing = sorted(found.get("missing_keys") or ())
    if missing:
        raise CheckpointMismatchError(
            f"{folder} lacks weights that its quantization with {method!r} needs: "
            f"{list_some(missing)}; they would be random"
        )


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 400 else f"{text[:400]}..."
