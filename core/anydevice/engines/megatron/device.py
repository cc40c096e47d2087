"""Megatron's code on this process's device, whichever that is.

Megatron-core asks one accelerator's module of torch for the current device, streams and random
states. Where this process works on another device, Megatron's modules get a torch in which every
accelerator's module is the backend of this process, and tensors that they ask for on another
accelerator are made here. No other module of the process sees a change.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from anydevice.backend import DeviceBackend
from anydevice.registry.selection import HOST

__all__ = ["MegatronDevice"]

_PACKAGE: Final = "megatron.core"
_RANDOM: Final = "megatron.core.tensor_parallel.random"
#: Between the seed of what ranks draw together and those of what each draws alone.
_APART: Final = 2718


class MegatronDevice:
    """Where Megatron works in this process.

    Args:
        backend: of the device.
        device: the device.

    Example:
        >>> import torch
        >>> from anydevice.registry import get_backend
        >>> here = MegatronDevice(get_backend("cpu"), torch.device("cpu"))
        >>> here.meant("meta")
        'meta'
    """

    def __init__(self, backend: DeviceBackend, device: torch.device) -> None:
        self.backend = backend
        self.device = device
        self._redirects: _Redirecting | None = None

    def install(self) -> None:
        """Have Megatron's loaded modules use this device; nothing where it is Megatron's own."""
        random = importlib.import_module(_RANDOM)
        native = random.device_ctx_manager.__module__
        if native.startswith(self.backend.module.__name__):
            return
        view = _Torch(self)
        for name, module in list(sys.modules.items()):
            if name.startswith(_PACKAGE) and isinstance(
                getattr(module, "torch", None), type(torch)
            ):
                module.torch = view  # type: ignore[attr-defined]
        for name in list(vars(random)):
            if name.startswith("_get_") and name.endswith("_rng_state"):
                setattr(random, name, self._rng_state)
            elif name.startswith("_set_") and name.endswith("_rng_state"):
                setattr(random, name, self._set_rng_state)
        self._redirects = _Redirecting(self, native)
        if self.device.type == HOST:
            # It warns when the host's random state changes, which here is the device's.
            logging.getLogger(_RANDOM).setLevel(logging.ERROR)

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """A context for calls into Megatron."""
        with self._redirects or contextlib.nullcontext():
            yield

    def random_tracker(self) -> Any:
        """Megatron's random states by name."""
        tensor_parallel = importlib.import_module("megatron.core.tensor_parallel")
        # Its name has a device's in the middle.
        (name,) = (
            name
            for name in vars(tensor_parallel)
            if name.startswith("get_") and name.endswith("_rng_tracker")
        )
        return getattr(tensor_parallel, name)()

    def seed(self, seed: int, rank: int) -> None:
        """Set the states of random numbers that all, or each, of the tensor-parallel ranks draw."""
        random = importlib.import_module(_RANDOM)
        tracker = self.random_tracker()
        tracker.reset()
        tracker.add(random._DATA_PARALLEL_RNG_TRACKER_NAME, seed)
        tracker.add(random._MODEL_PARALLEL_RNG_TRACKER_NAME, seed + _APART + rank)

    def drawing(self) -> contextlib.AbstractContextManager[None]:
        """A context in which random numbers are those that all tensor-parallel ranks draw."""
        random = importlib.import_module(_RANDOM)
        drawing: contextlib.AbstractContextManager[None] = self.random_tracker().fork(
            random._DATA_PARALLEL_RNG_TRACKER_NAME
        )
        return drawing

    def meant(self, device: Any) -> Any:
        """The device that is used where Megatron asks for ``device``."""
        if isinstance(device, str):
            kind = torch.device(device).type
        elif isinstance(device, torch.device):
            kind = device.type
        else:
            return device
        return device if kind in (HOST, "meta", self.device.type) else self.device

    @property
    def _index(self) -> int:
        return self.device.index or 0

    def _rng_state(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.backend.rng_state(self._index)

    def _set_rng_state(self, state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        self.backend.set_rng_state(state, self._index)


class _DeviceModule:
    """What stands for an accelerator's module of torch: the backend's answers."""

    def __init__(self, here: MegatronDevice, real: types.ModuleType) -> None:
        self._real = real
        backend, index = here.backend, here._index
        self.current_device: Callable[[], Any] = lambda: here.device
        self.is_available = lambda: True
        self.device_count = backend.device_count
        self.synchronize = lambda device=None: backend.synchronize(index)
        self.empty_cache = lambda: backend.empty_cache(index)
        self.current_stream = lambda device=None: backend.current_stream(index)
        self.manual_seed = backend.manual_seed_all
        self.get_rng_state = here._rng_state
        self.set_rng_state = here._set_rng_state

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class _Torch(types.ModuleType):
    """Torch, in which every accelerator's module is this process's device."""

    def __init__(self, here: MegatronDevice) -> None:
        super().__init__("torch")
        self._here = here

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        if (
            name != HOST
            and isinstance(value, types.ModuleType)
            and hasattr(value, "current_device")
            and hasattr(value, "device_count")
        ):
            value = _DeviceModule(self._here, value)
        vars(self)[name] = value
        return value


class _Redirecting(TorchFunctionMode):
    """Makes tensors here that Megatron asks for on another accelerator."""

    def __init__(self, here: MegatronDevice, native: str) -> None:
        super().__init__()
        self._here, self._native = here, native

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Megatron tells precisions by the names of its device's tensor types.
            return f"{self._native}.{func(*args).rpartition('.')[2]}"
        name = getattr(func, "__name__", "")
        if name and name == self._native.rpartition(".")[2]:  # tensor.<device>()
            return args[0].to(self._here.device)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": self._here.meant(kwargs["device"])}
        if func is torch.Tensor.to:
            args = (args[0], *map(self._here.meant, args[1:]))
        return func(*args, **kwargs)
