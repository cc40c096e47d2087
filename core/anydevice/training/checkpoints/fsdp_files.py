"""The reference's functions that write and read a sharded model or optimizer by itself."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from anydevice.errors import CheckpointNotFoundError
from anydevice.inspecting import is_peft_model
from anydevice.training.checkpoints.fitting import plan_model, plan_optimizer
from anydevice.training.checkpoints.reading import Parts, read_torch
from anydevice.training.checkpoints.weights import (
    ModelFiles,
    numbered_name,
    save_parts,
    save_whole,
)

__all__ = ["load_fsdp_model", "load_fsdp_optimizer", "save_fsdp_model", "save_fsdp_optimizer"]


def save_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: nn.Module,
    output_dir: str | os.PathLike[str],
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Write a sharded model's weights: whole or in parts, as the plugin's ``state_dict_type`` says.

    All processes call this. With ``adapter_only`` only what is trained of a PEFT model is written:
    its adapters, and not the frozen weights beneath.

    Example:
        >>> from torch import nn
        >>> from anydevice import Accelerator, FullyShardedDataParallelPlugin
        >>> from anydevice.utils import save_fsdp_model
        >>> plugin = FullyShardedDataParallelPlugin(state_dict_type="FULL_STATE_DICT")
        >>> accelerator = Accelerator(cpu=True)
        >>> model = accelerator.prepare(nn.Linear(2, 2))
        >>> save_fsdp_model(plugin, accelerator, model, "checkpoint")
    """
    folder = _folder(output_dir)
    whole = fsdp_plugin.state_dict_type == "FULL_STATE_DICT"
    state = accelerator.engine.state_dict(model, full=whole)
    if adapter_only:
        state = _trained(accelerator, model, state)
    if not whole:
        save_parts({"model": state}, folder / ModelFiles.parts.format(model_index))
    elif accelerator.should_save_model:
        save_whole(state, folder, model_index, safe=False)
    accelerator.wait_for_everyone()


def load_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: nn.Module,
    input_dir: str | os.PathLike[str],
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Read what `save_fsdp_model` wrote; all processes call this, with the same ``adapter_only``.

    Example:
        >>> from torch import nn
        >>> from anydevice import Accelerator, FullyShardedDataParallelPlugin
        >>> from anydevice.utils import load_fsdp_model, save_fsdp_model
        >>> plugin = FullyShardedDataParallelPlugin(state_dict_type="FULL_STATE_DICT")
        >>> accelerator = Accelerator(cpu=True)
        >>> model = accelerator.prepare(nn.Linear(2, 2))
        >>> save_fsdp_model(plugin, accelerator, model, "checkpoint")
        >>> load_fsdp_model(plugin, accelerator, model, "checkpoint")
    """
    if adapter_only and is_peft_model(accelerator.unwrap_model(model)):
        _load_trained(accelerator, model, Path(input_dir), model_index)
    else:
        plan_model(accelerator.engine, model, Path(input_dir), model_index)()


def save_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: nn.Module,
    output_dir: str | os.PathLike[str],
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Write a sharded optimizer's state, as `save_fsdp_model` does a model's.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from anydevice import Accelerator, FullyShardedDataParallelPlugin
        >>> from anydevice.utils import save_fsdp_optimizer
        >>> plugin = FullyShardedDataParallelPlugin(state_dict_type="FULL_STATE_DICT")
        >>> accelerator = Accelerator(cpu=True)
        >>> model = nn.Linear(2, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = accelerator.prepare(model, optimizer)
        >>> save_fsdp_optimizer(plugin, accelerator, optimizer, model, "checkpoint")
    """
    folder = _folder(output_dir)
    whole = fsdp_plugin.state_dict_type == "FULL_STATE_DICT"
    state = accelerator.engine.state_dict(model, optimizer, full=whole)
    if not whole:
        save_parts(
            {"optimizer": state}, folder / ModelFiles.optimizer_parts.format(optimizer_index)
        )
    elif accelerator.should_save_model:
        torch.save(state, folder / numbered_name(ModelFiles.optimizer, optimizer_index))
    accelerator.wait_for_everyone()


def load_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: nn.Module,
    input_dir: str | os.PathLike[str],
    optimizer_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Read what `save_fsdp_optimizer` wrote; all processes call this.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from anydevice import Accelerator, FullyShardedDataParallelPlugin
        >>> from anydevice.utils import load_fsdp_optimizer, save_fsdp_optimizer
        >>> plugin = FullyShardedDataParallelPlugin(state_dict_type="FULL_STATE_DICT")
        >>> accelerator = Accelerator(cpu=True)
        >>> model = nn.Linear(2, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = accelerator.prepare(model, optimizer)
        >>> save_fsdp_optimizer(plugin, accelerator, optimizer, model, "checkpoint")
        >>> load_fsdp_optimizer(plugin, accelerator, optimizer, model, "checkpoint")
    """
    plan_optimizer(accelerator.engine, model, optimizer, Path(input_dir), optimizer_index)()


def _folder(path: str | os.PathLike[str]) -> Path:
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _trained(accelerator: Any, model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """What is trained of a PEFT model; all of another one."""
    plain = accelerator.unwrap_model(model, keep_torch_compile=False)
    if not is_peft_model(plain):
        return state
    names = {name for name, parameter in plain.named_parameters() if parameter.requires_grad}
    return {name: value for name, value in state.items() if name in names}


def _load_trained(accelerator: Any, model: nn.Module, folder: Path, index: int) -> None:
    engine = accelerator.engine
    parts = Parts(folder, ModelFiles.parts.format(index), "model", index)
    whole = folder / numbered_name(ModelFiles.torch_file, index)
    if parts.exist():
        state = _trained(accelerator, model, engine.state_dict(model, full=False))
        parts.read(state)
    elif whole.exists():
        state = read_torch(whole)
    else:
        raise CheckpointNotFoundError(
            f"{str(folder)!r} has no adapters: neither {parts.path.name} nor {whole.name}"
        )
    engine.load_state_dict(model, state, strict=False)
