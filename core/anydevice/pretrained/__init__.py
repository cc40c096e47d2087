"""transformers' models, from a folder or the Hub, onto whatever devices there are."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch

from anydevice.checkpoint import Checkpoint, fetch_checkpoint, open_checkpoint
from anydevice.dispatch import init_empty_weights, load_checkpoint_and_dispatch
from anydevice.errors import CheckpointNotFoundError, MissingDependencyError, ModelError
from anydevice.modules import as_dtype
from anydevice.placement import check_budgets
from anydevice.pretrained.keys import adapt
from anydevice.transfer import read_prefetch_depth
from anydevice.weights import Slot, exchange, iter_slots

__all__ = ["from_pretrained"]


def from_pretrained(
    model_class: Any,
    path_or_repo: str | os.PathLike[str],
    device_map: Any = "auto",
    max_memory: dict[int | str, int | str] | None = None,
    dtype: str | torch.dtype | None = None,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    variant: str | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    trust_remote_code: bool = False,
    config: Any = None,
    allow_missing: bool = False,
    progress: bool = False,
    **dispatch_options: Any,
) -> Any:
    """Build a transformers model with its weights already in their places.

    The steps: read the config, build the model empty (no memory is taken), plan where each block
    goes, load the checkpoint straight into place, attach what moves weights and inputs, `eval()`.

    Args:
        model_class: a transformers class, such as ``AutoModelForCausalLM`` or ``BertModel``; None
            takes the class that the config names.
        path_or_repo: a folder, or a Hub repo id (downloaded through huggingface_hub, with its cache
            and offline mode).
        device_map: ``"auto"``, ``"balanced"``, ``"balanced_low_0"``, ``"sequential"``, a device, or
            a mapping of module names to devices.
        max_memory: budgets per device, bytes or such as ``"10GiB"``; what is free by default.
        dtype: the dtype to hold the weights in; None keeps the one that the config names.
        revision: branch, tag or commit of a Hub repo.
        token: for a private Hub repo.
        variant: such as ``"fp16"``, for files named so.
        offload_folder: where weights are written that are bound for disk and not in a file yet.
        trust_remote_code: run the model code that the repo carries.
        config: a config object to use in place of the checkpoint's own.
        allow_missing: initialise weights that the checkpoint lacks as the model does for training,
            with a warning, in place of an error.
        progress: show a progress bar.
        **dispatch_options: passed on to `anydevice.load_checkpoint_and_dispatch`. ``force_hooks``
            is True unless given, so that inputs may come from any device, also when the whole model
            is on one.

    Returns:
        The model, with ``hf_device_map`` set, and ``anydevice_placement`` (a `Placement`).

    Raises:
        MissingDependencyError: transformers is not installed.
        CheckpointNotFoundError: no checkpoint or config there.
        CheckpointMismatchError: the checkpoint lacks weights of the model, or shapes differ.
        OptionError, BudgetError, DeviceMapError, UnknownDeviceError: see
            `anydevice.load_checkpoint_and_dispatch`.
    """
    read_prefetch_depth(dispatch_options.get("prefetch_depth", 1))  # before anything is downloaded
    check_budgets(max_memory, dispatch_options.get("headroom"), dispatch_options.get("disk", True))
    transformers = _transformers()
    folder = fetch_checkpoint(path_or_repo, revision=revision, token=token, variant=variant)
    if config is None:
        config = _config(transformers, folder, trust_remote_code)
    chosen = _class(transformers, model_class, config)
    model = _empty_model(chosen, config, dtype, trust_remote_code)
    checkpoint = adapt(model, open_checkpoint(folder, variant=variant))
    dispatch_options.setdefault("force_hooks", True)
    if allow_missing:
        _initialise_missing(model, checkpoint)
    load_checkpoint_and_dispatch(
        model,
        checkpoint,
        device_map=device_map,
        max_memory=max_memory,
        offload_folder=offload_folder,
        keep_in_fp32_modules=getattr(model, "_keep_in_fp32_modules", None) or None,
        allow_missing=allow_missing,
        progress=progress,
        **dispatch_options,
    )
    _load_generation_config(transformers, model, folder)
    return model.eval()


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise MissingDependencyError(
            "from_pretrained needs transformers: pip install 'anydevice[transformers]'"
        ) from error
    return transformers


def _config(transformers: Any, folder: Path, trust_remote_code: bool) -> Any:
    try:
        return transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise CheckpointNotFoundError(
            f"{folder} has no config.json that transformers can read ({error}); pass config="
        ) from error


def _class(transformers: Any, model_class: Any, config: Any) -> Any:
    """The class to build: the one asked for, else the one that the config names."""
    if model_class is not None:
        return model_class
    for name in getattr(config, "architectures", None) or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    return transformers.AutoModel


def _empty_model(model_class: Any, config: Any, dtype: Any, trust_remote_code: bool) -> Any:
    """Build the model without memory, in the dtype that its weights will have."""
    wanted = dtype if dtype is not None else getattr(config, "dtype", None)
    wanted = as_dtype(wanted) if wanted is not None else torch.get_default_dtype()
    build = getattr(model_class, "from_config", None) or getattr(model_class, "_from_config", None)
    if build is None:
        raise ModelError(
            f"{model_class!r} is not a transformers model class; for another model use "
            "anydevice.init_empty_weights and anydevice.load_checkpoint_and_dispatch"
        )
    options = {"trust_remote_code": trust_remote_code} if trust_remote_code else {}
    with init_empty_weights(include_buffers=False):
        model = build(config, dtype=wanted, **options)
    model.tie_weights()
    return model


def _initialise_missing(model: Any, checkpoint: Checkpoint) -> None:
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


def _load_generation_config(transformers: Any, model: Any, folder: Path) -> None:
    """Take the checkpoint's own defaults for generation, where it has some."""
    if model.can_generate() and (folder / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
