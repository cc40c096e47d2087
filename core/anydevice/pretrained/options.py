"""The arguments of `from_pretrained` that are not its own: whose each is, or whose it is not."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import Any, Final

import torch

from anydevice.dispatch import load_checkpoint_and_dispatch
from anydevice.errors import OptionError, UnknownArgumentError
from anydevice.placement import check_budgets, check_form
from anydevice.text import suggest
from anydevice.transfer import read_prefetch_depth

__all__ = ["DISPATCH_OPTIONS", "check_options", "one_dtype", "refuse_unknown", "split_options"]

#: Arguments of `load_checkpoint_and_dispatch` that `from_pretrained` passes on.
DISPATCH_OPTIONS: Final = frozenset(inspect.signature(load_checkpoint_and_dispatch).parameters) - {
    "model",
    "checkpoint",
    "dtype",
    "revision",
    "variant",
    "token",
    "subfolder",
}
#: Its own, for finding the one that was meant.
_OWN: Final = frozenset(
    {
        "attn_implementation",
        "cache_dir",
        "config",
        "dtype",
        "local_files_only",
        "quantization_config",
        "revision",
        "subfolder",
        "token",
        "torch_dtype",
        "trust_remote_code",
        "variant",
    }
)


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options for loading and dispatching, and the others, which a config may take.

    Raises:
        UnknownArgumentError: one is a misspelled option.
    """
    dispatching = {name: value for name, value in options.items() if name in DISPATCH_OPTIONS}
    others = {name: value for name, value in options.items() if name not in DISPATCH_OPTIONS}
    for name in others:
        if difflib.get_close_matches(name, [*DISPATCH_OPTIONS, *_OWN], n=1, cutoff=0.8):
            refuse_unknown([name])
    return dispatching, others


def refuse_unknown(names: list[str]) -> None:
    """Raise for unknown arguments.

    Raises:
        UnknownArgumentError: there is one.
    """
    if names:
        raise UnknownArgumentError(
            f"from_pretrained() has no argument {names[0]!r}, and neither has the model's config"
            f"{suggest(names[0], [*DISPATCH_OPTIONS, *_OWN])}"
        )


def check_options(device_map: Any, max_memory: Any, options: Mapping[str, Any]) -> None:
    """Check what can be checked before anything is downloaded.

    Raises:
        OptionError, BudgetError, DeviceMapError, UnknownDeviceError: it cannot be used.
    """
    read_prefetch_depth(options.get("prefetch_depth", 1))
    check_budgets(max_memory, options.get("headroom"), options.get("disk", True))
    if device_map is not None:
        check_form(device_map)


def one_dtype(
    dtype: str | torch.dtype | None, torch_dtype: str | torch.dtype | None
) -> str | torch.dtype | None:
    """The dtype, which transformers has under two names.

    Raises:
        OptionError: the two differ.
    """
    if dtype is not None and torch_dtype is not None and dtype != torch_dtype:
        raise OptionError(
            f"dtype={dtype!r} and torch_dtype={torch_dtype!r}: they are one option, give one"
        )
    return dtype if dtype is not None else torch_dtype
