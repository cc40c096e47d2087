"""Hooked models that leave their process or are replicated: what torch itself cannot do with them.

`torch.multiprocessing` sends a tensor to another process by sharing its memory. It can share host
memory, and that of the accelerators that it knows; memory of others is sent by value here.
`torch.nn.DataParallel` calls copies of a module, whose hooks would run the original.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final

import torch
import torch.multiprocessing  # registers how storages are sent
from torch import nn
from torch.nn.modules import module as torch_module

from anydevice import registry
from anydevice.devices import CPU, META
from anydevice.errors import ModelError
from anydevice.hooks.base import ModelHook
from anydevice.hooks.forward import HOOK
from anydevice.weights import iter_modules

__all__ = ["prepare_torch"]

_Reduced = tuple[Callable[..., Any], tuple[Any, ...]]

_preparing: Final = threading.Lock()
_handles: Final[list[Any]] = []


def prepare_torch() -> None:
    """Have torch send hooked models to other processes, and refuse what it would do wrong."""
    with _preparing:
        if _handles:
            return
        _handles.append(torch_module.register_module_module_registration_hook(_on_module))
        reducers: dict[type, Callable[[Any], _Reduced]] = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
        share = reducers.get(torch.UntypedStorage)
        if share is not None:
            ForkingPickler.register(torch.UntypedStorage, _Sharing(share))


class _Sharing:
    """Sends a storage to another process: shared where torch can, else by value.

    Args:
        share: what torch has registered.
    """

    def __init__(self, share: Callable[[Any], _Reduced]) -> None:
        self._share = share

    def __call__(self, storage: torch.UntypedStorage) -> _Reduced:
        try:
            return self._share(storage)
        except RuntimeError:
            if storage.device.type in (CPU.type, META.type):
                raise
            content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            return _received, (content.cpu().numpy(), str(storage.device))


def _received(values: Any, device: str) -> torch.UntypedStorage:
    """The storage in the other process."""
    registry.get_backend(device)  # also imports what makes the device known to torch there
    return torch.from_numpy(values).to(device).untyped_storage()


def _on_module(parent: nn.Module, _name: str, module: nn.Module | None) -> None:
    """Refuse `torch.nn.DataParallel` over a hooked model."""
    if not isinstance(parent, nn.DataParallel) or module is None:
        return
    if torch._utils._get_available_device_type() is None:  # type: ignore[no-untyped-call]
        return  # it does nothing then
    parts = iter_modules(module)
    hooked = next((n for n, part in parts if isinstance(part.__dict__.get(HOOK), ModelHook)), None)
    if hooked is not None:
        raise ModelError(
            f"torch.nn.DataParallel cannot replicate this {type(module).__name__}: "
            f"{f'its module {hooked}' if hooked else 'it'} has hooks, which would run the "
            "original's weights in every replica. It is on its devices already: call it without "
            'DataParallel; or move it to one device by anydevice.undispatch(model, "device:0") '
            "first."
        )
