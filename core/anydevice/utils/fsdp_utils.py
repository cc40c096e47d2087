"""The reference's import path for sharded models. No logic here."""

from anydevice.utils import (
    get_parameters_from_modules,
    load_fsdp_model,
    load_fsdp_optimizer,
    save_fsdp_model,
    save_fsdp_optimizer,
)

__all__ = [
    "get_parameters_from_modules",
    "load_fsdp_model",
    "load_fsdp_optimizer",
    "save_fsdp_model",
    "save_fsdp_optimizer",
]
