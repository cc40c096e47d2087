"""transformers' models, from a folder or the Hub, onto whatever devices there are."""

from __future__ import annotations

import os
from typing import Any, Final

import torch

from anydevice.checkpoint import fetch_checkpoint
from anydevice.dispatch import dispatch_model, load_checkpoint_and_dispatch
from anydevice.pretrained.opening import (
    choose_class,
    import_transformers,
    initialise_missing,
    load_generation_config,
    open_empty,
    open_pretrained,
    read_config,
)
from anydevice.pretrained.options import check_options, one_dtype, split_options
from anydevice.pretrained.quantized import load_quantized, method_of

__all__ = ["from_pretrained", "open_pretrained"]

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
        UnknownArgumentError: an option is unknown; the message suggests the nearest one.
        CheckpointNotFoundError: no checkpoint or config there.
        CheckpointMismatchError: the checkpoint lacks weights of the model, or shapes differ.
        ModelError: the class is not transformers', or a quantizer cannot load here.
        OptionError, BudgetError, DeviceMapError, UnknownDeviceError: see
            `anydevice.load_checkpoint_and_dispatch`.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> import anydevice
        >>> config = BertConfig(
        ...     vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1,
        ...     intermediate_size=8, max_position_embeddings=8,
        ... )
        >>> folder = tempfile.mkdtemp()
        >>> BertModel(config).save_pretrained(folder)
        >>> model = anydevice.from_pretrained(BertModel, folder, device_map="cpu")
        >>> model(torch.tensor([[1, 2]])).last_hidden_state.shape
        torch.Size([1, 2, 8])
    """
    dtype = one_dtype(dtype, torch_dtype)
    dispatching, others = split_options(options)
    check_options(device_map, max_memory, dispatching)  # before anything is downloaded
    transformers = import_transformers()
    folder = fetch_checkpoint(
        path_or_repo,
        revision=revision,
        token=token,
        variant=variant,
        subfolder=subfolder,
        cache_dir=cache_dir,
        local_files_only=local_files_only,
    )
    config = read_config(transformers, folder, trust_remote_code, config, others)
    chosen = choose_class(transformers, model_class, config)
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
    model, checkpoint = open_empty(chosen, folder, config, dtype, building, variant)
    if allow_missing:
        initialise_missing(model, checkpoint)
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
    load_generation_config(transformers, model, folder)
    return model.eval()
