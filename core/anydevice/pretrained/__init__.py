"""transformers' models, from a folder or the Hub, onto whatever devices there are."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any, Final

import torch

from anydevice.checkpoint import Checkpoint, fetch_checkpoint, open_checkpoint
from anydevice.dispatch import dispatch_model, init_empty_weights, load_checkpoint_and_dispatch
from anydevice.errors import CheckpointNotFoundError, MissingDependencyError, ModelError
from anydevice.modules import as_dtype
from anydevice.pretrained.keys import adapt
from anydevice.pretrained.options import (
    check_options,
    one_dtype,
    refuse_unknown,
    split_options,
)
from anydevice.pretrained.quantized import load_quantized, method_of, refuse_packed
from anydevice.weights import Slot, exchange, iter_slots

__all__ = ["from_pretrained", "open_pretrained"]

#: The oldest transformers whose interface this is written for.
_FLOOR: Final = (4, 56)
#: Arguments of `dispatch_model` among those of `load_checkpoint_and_dispatch`.
_HOOKING: Final = frozenset(
    {
        "main_device",
        "offload_buffers",
        "skip_keys",
        "preload_module_classes",
        "force_hooks",
        "no_split_module_classes",
        "prefetch_depth",
        "headroom",
        "disk",
        "fallback_allocation",
    }
)


def from_pretrained(
    model_class: Any,
    path_or_repo: str | os.PathLike[str],
    device_map: Any = "auto",
    max_memory: dict[int | str, int | str] | None = None,
    dtype: str | torch.dtype | None = None,
    *,
    torch_dtype: str | torch.dtype | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    variant: str | None = None,
    subfolder: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    offload_folder: str | os.PathLike[str] | None = None,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
    quantization_config: Any = None,
    config: Any = None,
    allow_missing: bool = False,
    progress: bool = False,
    **options: Any,
) -> Any:
    """Load a transformers model with each weight on its device.

    The steps: read the config, build the model empty (no memory is taken), open the checkpoint,
    place the blocks, load each weight onto its device, attach hooks, `eval()`. A quantized
    checkpoint is loaded by transformers' own quantizer, on the host, and then dispatched.

    Args:
        model_class: a transformers class, such as ``AutoModelForCausalLM`` or ``BertModel``; None
            takes the class that the config names.
        path_or_repo: a folder, or a Hub repo id (downloaded through huggingface_hub, with its cache
            and offline mode).
        device_map: ``"auto"``, ``"balanced"``, ``"balanced_low_0"``, ``"sequential"``, a device, or
            a mapping of module names to devices.
        max_memory: budgets per device, bytes or such as ``"10GiB"``; what is free by default.
        dtype: the dtype to hold the weights in; None takes the one that the config names, and
            ``"auto"`` keeps the file's.
        torch_dtype: the older name of ``dtype``.
        revision: branch, tag or commit of a Hub repo.
        token: for a private Hub repo.
        variant: such as ``"fp16"``, for files named so.
        subfolder: of the folder or repo, where config and weights are.
        cache_dir: the folder of the Hub's cache.
        local_files_only: take what the cache has, without asking the Hub.
        offload_folder: where weights placed on the disk are written, unless a file has them.
        trust_remote_code: run the model code that the repo carries.
        attn_implementation: such as ``"eager"`` or ``"sdpa"``; transformers chooses by default.
        quantization_config: how the checkpoint is quantized, or is to be: see transformers.
        config: a config object to use in place of the checkpoint's own.
        allow_missing: initialise weights that the checkpoint lacks as the model does for training,
            with a warning, in place of an error.
        progress: show a progress bar.
        **options: arguments of `anydevice.load_checkpoint_and_dispatch`, and attributes of the
            config, such as ``num_labels=3``. ``force_hooks`` is True unless given, so that inputs
            may come from any device, also when the whole model is on one.

    Returns:
        The model, with ``hf_device_map`` set, and ``anydevice_placement`` (a `Placement`).

    Raises:
        MissingDependencyError: transformers, or the package of a quantizer, is not installed.
        UnknownArgumentError: an option is nobody's; the message says which one may be meant.
        CheckpointNotFoundError: no checkpoint or config there.
        CheckpointMismatchError: the checkpoint lacks weights of the model, or shapes differ.
        ModelError: the class is not transformers', or a quantizer cannot load here.
        OptionError, BudgetError, DeviceMapError, UnknownDeviceError: see
            `anydevice.load_checkpoint_and_dispatch`.
    """
    dtype = one_dtype(dtype, torch_dtype)
    dispatching, others = split_options(options)
    check_options(device_map, max_memory, dispatching)  # before anything is downloaded
    transformers = _transformers()
    folder = fetch_checkpoint(
        path_or_repo,
        revision=revision,
        token=token,
        variant=variant,
        subfolder=subfolder,
        cache_dir=cache_dir,
        local_files_only=local_files_only,
    )
    config = _config(transformers, folder, trust_remote_code, config, others)
    chosen = _class(transformers, model_class, config)
    dispatching.setdefault("force_hooks", True)
    building: dict[str, Any] = {"trust_remote_code": True} if trust_remote_code else {}
    if attn_implementation is not None:
        building["attn_implementation"] = attn_implementation
    method = method_of(config) or method_of(quantization_config)
    if method is not None:
        if quantization_config is not None:
            building["quantization_config"] = quantization_config
        given = {"dtype": dtype, "variant": variant}
        building |= {name: value for name, value in given.items() if value is not None}
        model = load_quantized(
            chosen, folder, config, method, building, allow_missing=allow_missing
        )
        hooking = {name: value for name, value in dispatching.items() if name in _HOOKING}
        if device_map is not None:
            dispatch_model(
                model, device_map, offload_dir=offload_folder, max_memory=max_memory, **hooking
            )
        return model.eval()
    model, checkpoint = _open(chosen, folder, config, dtype, building, variant)
    if allow_missing:
        _initialise_missing(model, checkpoint)
    load_checkpoint_and_dispatch(
        model,
        checkpoint,
        device_map=device_map,
        max_memory=max_memory,
        offload_folder=offload_folder,
        dtype="auto" if dtype == "auto" else None,
        keep_in_fp32_modules=getattr(model, "_keep_in_fp32_modules", None) or None,
        allow_missing=allow_missing,
        progress=progress,
        **dispatching,
    )
    _load_generation_config(transformers, model, folder)
    return model.eval()


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

    Args:
        model_class: see `from_pretrained`, as for all of them.
        path_or_repo: see there.
        dtype: see there.
        trust_remote_code: see there.
        attn_implementation: see there.
        variant: see there.
        config: see there.
        **finding: arguments of `anydevice.checkpoint.fetch_checkpoint`.

    Returns:
        The model, whose parameters are on meta and whose buffers are not; and the checkpoint.

    Raises:
        ModelError: the checkpoint is quantized; or the class is not transformers'.
        MissingDependencyError, CheckpointNotFoundError: see `from_pretrained`.
    """
    transformers = _transformers()
    folder = fetch_checkpoint(path_or_repo, variant=variant, **finding)
    config = _config(transformers, folder, trust_remote_code, config, {})
    method = method_of(config)
    if method is not None:
        raise ModelError(
            f"{path_or_repo} is quantized ({method}), and its quantizer loads a model as a whole: "
            "use anydevice.from_pretrained in one process"
        )
    building: dict[str, Any] = {"trust_remote_code": True} if trust_remote_code else {}
    if attn_implementation is not None:
        building["attn_implementation"] = attn_implementation
    chosen = _class(transformers, model_class, config)
    model, checkpoint = _open(chosen, folder, config, dtype, building, variant)
    _load_generation_config(transformers, model, folder)
    return model, checkpoint


def _open(
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


def _transformers() -> Any:
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


def _config(
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


def _class(transformers: Any, model_class: Any, config: Any) -> Any:
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
