"""What a model is made of, as programs ask it: classes, parameters, wrappers of others."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable

import torch
from torch import nn

from anydevice.tensors import is_sharded

__all__ = [
    "get_module_class_from_name",
    "get_parameters_from_modules",
    "has_compiled_regions",
    "is_peft_model",
    "model_has_dtensor",
]


def get_module_class_from_name(module: nn.Module, name: str) -> type[nn.Module] | None:
    """The class of that name among a model and its parts; None where it has none.

    Args:
        module: the model.
        name: of the class, without its package.

    Example:
        >>> from torch import nn
        >>> from anydevice.utils.dataclasses import get_module_class_from_name
        >>> get_module_class_from_name(nn.Sequential(nn.Linear(1, 1)), "Linear").__name__
        'Linear'
    """
    return next((type(part) for part in module.modules() if type(part).__name__ == name), None)


def get_parameters_from_modules(
    modules: Iterable[nn.Module] | str | None,
    model: nn.Module,
    device: torch.device | str | None = None,
) -> set[nn.Parameter]:
    """All parameters of some of a model's modules.

    Args:
        modules: the modules, or a regular expression that their whole names match; None is none.
        model: that they are parts of.
        device: where the modules are moved first; None leaves them.

    Example:
        >>> from torch import nn
        >>> from anydevice.utils.fsdp_utils import get_parameters_from_modules
        >>> model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
        >>> len(get_parameters_from_modules("1", model))
        2
    """
    if modules is None:
        return set()
    if isinstance(modules, str):
        pattern = re.compile(modules)
        modules = [part for name, part in model.named_modules() if pattern.fullmatch(name)]
    chosen = list(modules)
    for part in chosen if device is not None else ():
        part.to(device)
    return {parameter for part in chosen for parameter in part.parameters()}


def is_peft_model(model: nn.Module) -> bool:
    """Whether a model is one of PEFT's, under whatever is put around it.

    Example:
        >>> from torch import nn
        >>> from anydevice.utils import is_peft_model
        >>> is_peft_model(nn.Linear(1, 1))
        False
    """
    peft = sys.modules.get("peft")  # one that is not imported has made no model
    inner = model
    while (within := _wrapped(inner)) is not None:
        inner = within
    return peft is not None and isinstance(inner, peft.PeftModel)


def _wrapped(model: nn.Module) -> nn.Module | None:
    names = {"OptimizedModule": "_orig_mod", "DistributedDataParallel": "module"}
    found: nn.Module | None = getattr(model, names.get(type(model).__name__, ""), None)
    return found


def model_has_dtensor(model: nn.Module) -> bool:
    """Whether parameters are divided over processes.

    Example:
        >>> from torch import nn
        >>> from anydevice.utils import model_has_dtensor
        >>> model_has_dtensor(nn.Linear(1, 1))
        False
    """
    return any(map(is_sharded, model.parameters()))


def has_compiled_regions(module: nn.Module) -> bool:
    """Whether parts of a model are compiled, and not the whole.

    Example:
        >>> from torch import nn
        >>> from anydevice.utils import has_compiled_regions
        >>> has_compiled_regions(nn.Linear(1, 1))
        False
    """
    parts = [part for part in module.modules() if part is not module]
    return any(hasattr(part, "_orig_mod") or part._compiled_call_impl is not None for part in parts)
