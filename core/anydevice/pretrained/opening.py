"""A transformers model built empty, and its checkpoint opened with the model's names."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any, Final

import torch

from anydevice.checkpoint import Checkpoint, fetch_checkpoint, open_checkpoint
from anydevice.dispatch import init_empty_weights
from anydevice.errors import CheckpointNotFoundError, MissingDependencyError, ModelError
from anydevice.modules import as_dtype
from anydevice.pretrained.keys import adapt
from anydevice.pretrained.options import refuse_unknown
from anydevice.pretrained.quantized import method_of, refuse_packed
from anydevice.weights import Slot, exchange, iter_slots

__all__ = [
    "choose_class",
    "import_transformers",
    "initialise_missing",
    "load_generation_config",
    "open_empty",
    "open_pretrained",
    "read_config",
]

#: The oldest transformers whose interface this is written for.
_FLOOR: Final = (4, 56)


def open_pretrained(
    model_class: Any,
    path_or_repo: str | os.PathLike[str],
    dtype: str | torch.dtype | None = None,
    *,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
    variant: str | None = None,
    config: Any = None,
    **finding: Any,
) -> tuple[Any, Checkpoint]:
    """Build a transformers model empty, and open its checkpoint with the model's names.

    The arguments are those of `from_pretrained`; ``finding`` has those of
    `anydevice.checkpoint.fetch_checkpoint`.

    Returns:
        The model, whose parameters are on meta and whose buffers are not; and the checkpoint.

    Raises:
        ModelError: the checkpoint is quantized; or the class is not transformers'.
        MissingDependencyError, CheckpointNotFoundError: see `from_pretrained`.
    """
    transformers = import_transformers()
    folder = fetch_checkpoint(path_or_repo, variant=variant, **finding)
    config = read_config(transformers, folder, trust_remote_code, config, {})
    method = method_of(config)
    if method is not None:
        raise ModelError(
            f"{path_or_repo} is quantized ({method}), and its quantizer loads a model as a whole: "
            "use anydevice.from_pretrained in one process"
        )
    building: dict[str, Any] = {"trust_remote_code": True} if trust_remote_code else {}
    if attn_implementation is not None:
        building["attn_implementation"] = attn_implementation
    chosen = choose_class(transformers, model_class, config)
    model, checkpoint = open_empty(chosen, folder, config, dtype, building, variant)
    load_generation_config(transformers, model, folder)
    return model, checkpoint


def open_empty(
    model_class: Any,
    folder: Path,
    config: Any,
    dtype: str | torch.dtype | None,
    building: dict[str, Any],
    variant: str | None,
) -> tuple[Any, Checkpoint]:
    """The empty model, and its checkpoint with the model's names."""
    source = open_checkpoint(folder, variant=variant)
    model = _empty_model(model_class, config, _dtype_to_build(dtype, config, source), building)
    checkpoint = adapt(model, source)
    refuse_packed(checkpoint, model.state_dict().keys(), str(folder))
    return model, checkpoint


def import_transformers() -> Any:
    """Transformers.

    Raises:
        MissingDependencyError: it is not installed, or too old.
    """
    try:
        import transformers
    except ImportError as error:
        raise MissingDependencyError(
            "from_pretrained needs transformers: pip install 'anydevice[transformers]'"
        ) from error
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if version < _FLOOR:
        raise MissingDependencyError(
            f"from_pretrained needs transformers {'.'.join(map(str, _FLOOR))} or newer, and "
            f"{transformers.__version__} is installed: pip install -U transformers"
        )
    return transformers


def read_config(
    transformers: Any, folder: Path, trust_remote_code: bool, config: Any, others: dict[str, Any]
) -> Any:
    """The model's config, with the attributes that the caller gives.

    Raises:
        CheckpointNotFoundError: there is none.
        UnknownArgumentError: the config has no such attribute.
    """
    if config is None:
        try:
            config, unknown = transformers.AutoConfig.from_pretrained(
                folder, trust_remote_code=trust_remote_code, return_unused_kwargs=True, **others
            )
        except (OSError, ValueError) as error:
            raise CheckpointNotFoundError(
                f"{folder} has no config.json that transformers can read ({error}); pass config="
            ) from error
        refuse_unknown([name for name in unknown if name in others])
        return config
    refuse_unknown([name for name in others if not hasattr(config, name)])
    for name, value in others.items():
        setattr(config, name, value)
    return config


def choose_class(transformers: Any, model_class: Any, config: Any) -> Any:
    """The class to build: the one asked for, else the one that the config names."""
    if model_class is not None:
        return model_class
    for name in getattr(config, "architectures", None) or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    return transformers.AutoModel


def _dtype_to_build(
    dtype: str | torch.dtype | None, config: Any, source: Checkpoint
) -> torch.dtype:
    """The dtype that the weights will have: asked for, or the config's, or the file's first."""
    wanted = dtype if dtype not in (None, "auto") else getattr(config, "dtype", None)
    if wanted is None and dtype == "auto":
        floating = (source[name].dtype for name in source)
        wanted = next((d for d in floating if d.is_floating_point and d.itemsize > 1), None)
    return as_dtype(wanted) if wanted is not None else torch.get_default_dtype()


def _empty_model(
    model_class: Any, config: Any, dtype: torch.dtype, building: dict[str, Any]
) -> Any:
    """Build the model without memory, in the dtype that its weights will have."""
    build = getattr(model_class, "from_config", None) or getattr(model_class, "_from_config", None)
    if build is None:
        raise ModelError(
            f"{model_class!r} is not a transformers model class; for another model use "
            "anydevice.init_empty_weights and anydevice.load_checkpoint_and_dispatch"
        )
    with init_empty_weights(include_buffers=False):
        model = build(config, dtype=dtype, **building)
    model.tie_weights()
    return model


def initialise_missing(model: Any, checkpoint: Checkpoint) -> None:
    """Give weights that the checkpoint lacks the values that training would begin with."""
    slots = dict(iter_slots(model))
    found = {id(slots[name].get()) for name in checkpoint if name in slots}
    missing: dict[str, tuple[Slot, torch.Tensor]] = {}
    for name, slot in slots.items():
        tensor = slot.get()
        if tensor is not None and tensor.is_meta and slot.persistent and id(tensor) not in found:
            missing[name] = (slot, tensor)
    if not missing:
        return
    warnings.warn(
        f"the checkpoint lacks {', '.join(list(missing)[:5])}{', ...' * (len(missing) > 5)}: "
        f"{len(missing)} weights are random, to be trained before use",
        stacklevel=3,
    )
    for slot, tensor in missing.values():
        exchange(slot, torch.zeros(tensor.shape, dtype=tensor.dtype))
    for module in {slot.module for slot, _ in missing.values()}:
        model._init_weights(module)


def load_generation_config(transformers: Any, model: Any, folder: Path) -> None:
    """Take the checkpoint's own defaults for generation, where it has some."""
    if model.can_generate() and (folder / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
