"""The reference's functions that write and read a sharded model or optimizer by itself."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from anydevice.errors import OptionError
from anydevice.training.checkpoints.fitting import plan_model, plan_optimizer
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

    All processes call this.

    Raises:
        OptionError: ``adapter_only`` of a peft model: save it with its own ``save_pretrained``.

    Example:
        >>> from torch import nn
        >>> from anydevice import Accelerator, FullyShardedDataParallelPlugin
        >>> from anydevice.utils import save_fsdp_model
        >>> plugin = FullyShardedDataParallelPlugin(state_dict_type="FULL_STATE_DICT")
        >>> accelerator = Accelerator(cpu=True)
        >>> model = accelerator.prepare(nn.Linear(2, 2))
        >>> save_fsdp_model(plugin, accelerator, model, "checkpoint")
    """
    _refuse_adapter(adapter_only, accelerator, model)
    folder = _folder(output_dir)
    whole = fsdp_plugin.state_dict_type == "FULL_STATE_DICT"
    state = accelerator.engine.state_dict(model, full=whole)
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
    """Read what `save_fsdp_model` wrote; all processes call this.

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
    _refuse_adapter(adapter_only, accelerator, model)
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
    _refuse_adapter(adapter_only, accelerator, model)
    plan_optimizer(accelerator.engine, model, optimizer, Path(input_dir), optimizer_index)()


def _folder(path: str | os.PathLike[str]) -> Path:
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _refuse_adapter(adapter_only: bool, accelerator: Any, model: nn.Module) -> None:
    """A model without adapters is written whole; of one that has them, parts are not told apart."""
    if adapter_only and hasattr(accelerator.unwrap_model(model), "peft_config"):
        raise OptionError(
            "adapter_only=True is not there: save the adapter with the model's save_pretrained()"
        )
