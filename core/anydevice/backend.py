"""All that a hardware vendor reads: the interface between anydevice and a device.

A complete backend for a device that follows PyTorch's conventions::

    from anydevice.backend import DeviceBackend, hookimpl

    class FooBackend(DeviceBackend):
        device_type = "foo"

    @hookimpl
    def anydevice_backends():
        return [FooBackend()]

and, in the package's ``pyproject.toml``::

    [project.entry-points."anydevice.backends"]
    foo = "anydevice_foo"

The order in which anydevice calls a backend:

1. `is_available` and `device_count`, at discovery, perhaps before a fork: they start no runtime.
   Nothing else is called while ``device_count()`` is 0.
2. `memory_info`, `supports_dtype`, `device_name`, while a placement is planned.
3. `move` and `pin_memory`, while weights are loaded.
4. `new_stream` once a device, then `use_stream`, `record_event`, `wait_event`, `synchronize_event`
   and `move` for each block of a forward pass, from any thread.
5. `process_environment`, where processes are started; `local_device`, `set_device` and `numa_node`
   once a process; `autocast_dtypes` and `new_grad_scaler` before training.

An ``index`` is always an int from 0 to ``device_count() - 1``; sizes are bytes. A member that a
backend does not claim in `Capabilities` is never called.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

import pluggy
import torch

from anydevice.errors import UnknownDeviceError

__all__ = [
    "ENTRY_POINT_GROUP",
    "INTERFACE_VERSION",
    "Capabilities",
    "DeviceBackend",
    "MemoryInfo",
    "hookimpl",
    "torchs_accelerator",
]

#: The entry-point group in which a package names the module that holds its hook.
ENTRY_POINT_GROUP: Final = "anydevice.backends"
#: The version of this interface, as of its specification: a new member raises the minor version, a
#: member that goes or changes its meaning raises the major version.
INTERFACE_VERSION: Final = "1.1"
#: Marks the one function that a plugin implements: ``anydevice_backends() -> list[DeviceBackend]``.
hookimpl: Final = pluggy.HookimplMarker("anydevice")


@dataclasses.dataclass(frozen=True)
class MemoryInfo:
    """A device's memory, in bytes.

    Attributes:
        free: what a new allocation of this process could get: the driver's free memory plus what
            this process's allocator has cached and does not use.
        total: what the device has.
        shared_with_host: whether it is the host's memory, as an integrated device's is: what one
            takes, the other loses. None: as the capability ``unified_memory`` says for the type.

    Example:
        >>> from anydevice import MemoryInfo
        >>> MemoryInfo(free=1 << 30, total=4 << 30).total
        4294967296
    """

    free: int
    total: int
    shared_with_host: bool | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a device can do, given by keyword.

    Claim only what holds: a claim is tested, and a false one fails.

    Attributes:
        caching_allocator: freed memory stays with the process until `DeviceBackend.empty_cache`.
        streams: `DeviceBackend.new_stream` and related members give queues that run concurrently.
        pinned_memory: `DeviceBackend.pin_memory` gives page-locked memory, from which a
            ``non_blocking`` copy returns before it is done.
        unified_memory: the device's memory is the host's; what one takes, the other loses.
        device_rng: the device has a random generator of its own.
        collectives: ``torch.distributed`` has a backend for the device.
        grad_scaling: `DeviceBackend.new_grad_scaler` gives a loss scaler that works on the device.

    Example:
        >>> from anydevice import Capabilities
        >>> Capabilities(streams=True).pinned_memory
        False
    """

    caching_allocator: bool = False
    streams: bool = False
    pinned_memory: bool = False
    unified_memory: bool = False
    device_rng: bool = False
    collectives: bool = False
    grad_scaling: bool = False

    def claimed(self) -> list[str]:
        """The names of the capabilities that are claimed."""
        return [f.name for f in dataclasses.fields(self) if getattr(self, f.name)]


class DeviceBackend:
    """One type of device. Subclass it, set `device_type`, override what differs.

    The defaults go through the device's own module, ``torch.<device_type>``, by
    the names that ``torch.cuda`` has made usual; where it lacks one, through ``torch.accelerator``
    and ``torch.Stream``. Methods may be called from several threads at once.

    Names that start with ``_anydevice_`` are the interface's own; any other private name is free
    for a backend's helpers. A public name that is no member of the interface is reported.

    Example:
        >>> from anydevice import DeviceBackend
        >>> class FooBackend(DeviceBackend):
        ...     device_type = "foo"
        >>> FooBackend().is_available()  # torch knows no such device
        False
    """

    #: The torch device type, such as ``"foo"`` in ``foo:0``. Required, and unique.
    device_type: ClassVar[str]
    #: The package that makes torch know the device, such as ``"torch_foo"``; None when torch does
    #: by itself. It is imported when the device is first asked for, and need not be installed.
    torch_package: str | None = None
    #: The `INTERFACE_VERSION` that the backend was written for. Another major version is refused, a
    #: newer minor version is noted by ``anydevice backends``; None is taken for any.
    interface_version: str | None = None
    #: Order in ``device_map="auto"``: higher first. The host has 0.
    priority: int = 100
    #: The word for it in names such as ``DistributedType.MULTI_FOO``; None: the device type.
    kind: str | None = None
    #: What the device can do.
    capabilities: Capabilities = Capabilities()
    #: The name that ``torch.distributed`` gives to the device's collectives, such as ``"gloo"``.
    #: None with ``collectives`` claimed: the one that torch itself names for the device type.
    collective_backend: str | None = None
    #: The environment variable that hides devices from a process.
    visible_devices_env: str | None = None
    #: What a plain ``RuntimeError`` of this device says when memory lacks, where it does not raise
    #: ``torch.OutOfMemoryError``. Upper and lower case are the same.
    out_of_memory_words: tuple[str, ...] = ()

    # ------------------------------------------------------------------ presence

    def is_available(self) -> bool:
        """Say whether a device can be used now. Never raises, and starts no runtime."""
        return self.device_count() > 0

    def device_count(self) -> int:
        """How many devices there are; 0 when there is no driver. Starts no runtime.

        The default asks the module's ``device_count`` alone: it is made to be harmless before a
        fork (``torch.cuda`` counts by NVML, others do alike), while ``is_available`` often is not.
        """
        try:
            return int(self.module.device_count())
        except Exception:  # noqa: BLE001 - a driver that fails in any way is a device that is not here
            return 0

    def why_unavailable(self) -> str:
        """Say for a person why `device_count` is 0. Never raises, and starts no runtime."""
        package = self.torch_package
        try:
            if package is not None and importlib.util.find_spec(package) is None:
                return f"{package} is not installed"
            if package is None and not _is_known_to_torch(self.device_type):
                return f"torch does not know the device type {self.device_type!r} (yet)"
            self.module.device_count()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the reason
            return f"{type(error).__name__}: {error}"
        return "no device or driver found"

    def device_name(self, index: int) -> str:
        """Name device ``index`` for a person."""
        name = getattr(self.module, "get_device_name", None)
        return str(name(index)) if name is not None else f"{self.device_type}:{index}"

    def driver_version(self) -> str:
        """Version of the driver or runtime, for reports; empty when it cannot be told."""
        return ""

    # ------------------------------------------------------------------ memory

    def memory_info(self, index: int) -> MemoryInfo:
        """Measure the free and total memory of device ``index``, in bytes.

        Raises:
            NotImplementedError: the device says nothing of its memory; the user must give a budget.
        """
        free, total = self._anydevice_query("mem_get_info", "get_memory_info", index)
        free = int(free) + self._anydevice_cached_bytes(index)
        return MemoryInfo(free=min(free, int(total)), total=int(total))

    def memory_allocated(self, index: int) -> int:
        """Bytes in live tensors of this process on device ``index``."""
        return int(self._anydevice_query("memory_allocated", "memory_allocated", index))

    def peak_memory_allocated(self, index: int) -> int:
        """Most bytes in live tensors of this process on device ``index`` since `reset_peak_memory`.

        Raises:
            NotImplementedError: the device does not keep count.
        """
        return int(self._anydevice_query("max_memory_allocated", "max_memory_allocated", index))

    def reset_peak_memory(self, index: int) -> None:
        """Begin a new count for `peak_memory_allocated`.

        Raises:
            NotImplementedError: the device does not keep count.
        """
        self._anydevice_query("reset_peak_memory_stats", "reset_peak_memory_stats", index)

    def empty_cache(self, index: int) -> None:
        """Give cached memory of device ``index`` back."""
        empty = getattr(self.module, "empty_cache", None)
        if empty is not None:
            with self._anydevice_on(index):
                empty()

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Tell this device's lack of memory from any other error. Never raises."""
        if isinstance(error, torch.OutOfMemoryError):
            return True
        if not self.out_of_memory_words or not isinstance(error, RuntimeError):
            return False
        try:
            text = str(error).lower()
        except Exception:  # noqa: BLE001 - an error that cannot be shown is none of the device's
            return False
        return any(words.lower() in text for words in self.out_of_memory_words)

    # ------------------------------------------------------------------ work and movement

    def synchronize(self, index: int) -> None:
        """Wait for all work queued on device ``index``."""
        self._anydevice_function("synchronize")(index)

    def move(
        self, tensor: torch.Tensor, device: torch.device, *, non_blocking: bool = False
    ) -> torch.Tensor:
        """Return ``tensor`` on ``device``, which is of this type or the host.

        The result has the same dtype, shape, meaning of strides and ``requires_grad``; it is the
        same tensor when it is there already. With ``non_blocking`` the copy is queued on the
        current stream of the device. A ``device`` of this type without an index is device 0.
        """
        index: int | None = device.index
        if index is None and device.type == self.device_type:
            device = self.device(0)  # torch would take the current device
        return tensor.to(device, non_blocking=non_blocking)

    def pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a host tensor to page-locked memory. Capability ``pinned_memory``."""
        if any(
            step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)
        ):
            tensor = tensor.contiguous()  # torch refuses expanded tensors
        return tensor.pin_memory()

    # ------------------------------------------------------------------ streams, if claimed

    def new_stream(self, index: int) -> Any:
        """Make a stream on device ``index`` that runs concurrently with the others."""
        make = getattr(self.module, "Stream", torch.Stream)
        return make(device=self.device(index))

    def current_stream(self, index: int) -> Any:
        """Return the stream on which this thread's work for device ``index`` is queued."""
        return self._anydevice_function("current_stream")(index)

    def use_stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Queue this thread's work on ``stream`` while the context lasts.

        Its device is the current one meanwhile. May be nested, and entered by several threads.
        """
        return self._anydevice_using(stream)

    @contextlib.contextmanager
    def _anydevice_using(self, stream: Any) -> Iterator[Any]:
        # Not `with stream:`, which a stream refuses while another context holds it.
        set_stream = self._anydevice_function("set_stream")
        with self._anydevice_on(stream.device.index):
            before = self.current_stream(stream.device.index)
            set_stream(stream)
            try:
                yield stream
            finally:
                set_stream(before)

    def record_event(self, stream: Any) -> Any:
        """Mark the work queued on ``stream`` so far."""
        return stream.record_event()

    def wait_event(self, stream: Any, event: Any) -> None:
        """Make later work on ``stream`` wait for ``event``; the host goes on."""
        stream.wait_event(event)

    def synchronize_event(self, event: Any) -> None:
        """Make the host wait for the work that ``event`` marks, and for no other."""
        event.synchronize()

    # ------------------------------------------------------------------ numbers

    def supports_dtype(self, dtype: torch.dtype) -> bool:
        """Say whether weights of ``dtype`` can be held and computed with on the device."""
        return dtype in _COMMON_DTYPES

    def manual_seed_all(self, seed: int) -> None:
        """Seed the generators of all devices. Capability ``device_rng``."""
        self.module.manual_seed_all(seed)

    def rng_state(self, index: int) -> torch.Tensor:
        """The state of device ``index``'s generator, as uint8 on the host. Capability as above."""
        state: torch.Tensor = self.module.get_rng_state(self.device(index))
        return state

    def set_rng_state(self, state: torch.Tensor, index: int) -> None:
        """Put back what `rng_state` gave. Capability ``device_rng``."""
        self.module.set_rng_state(state, self.device(index))

    # ------------------------------------------------------------------ precision

    def autocast_dtypes(self) -> frozenset[torch.dtype]:
        """The dtypes that ``torch.autocast`` can compute in on the device; empty without autocast.

        The default is what the device's module names by ``get_amp_supported_dtype``, or else
        float16 and bfloat16; of those, the ones that `supports_dtype` accepts.
        """
        try:
            if not torch.amp.is_autocast_available(self.device_type):
                return frozenset()
        except RuntimeError:  # a device type that torch does not know
            return frozenset()
        ask = getattr(self.module, "get_amp_supported_dtype", None)
        offered = (torch.float16, torch.bfloat16) if ask is None else ask()
        return frozenset(dtype for dtype in offered if self.supports_dtype(dtype))

    def new_grad_scaler(self, **kwargs: Any) -> Any:
        """Make a loss scaler for float16. Capability ``grad_scaling``.

        Args:
            **kwargs: of ``torch.amp.GradScaler``, such as ``init_scale`` or ``enabled``.
        """
        return torch.amp.GradScaler(self.device_type, **kwargs)

    # ------------------------------------------------------------------ processes

    def set_device(self, index: int) -> None:
        """Make device ``index`` the calling thread's current one: a bare ``"foo"`` then means it.

        Where neither the device's module nor ``torch.accelerator`` can, it does nothing.
        """
        setter = self._anydevice_find("set_device", "set_device_index", "set_device_idx")
        if setter is not None:
            setter(index)

    def current_device(self) -> int | None:
        """The index of the calling thread's current device; None where the device does not say."""
        getter = self._anydevice_find(
            "current_device", "current_device_index", "current_device_idx"
        )
        index = getter() if getter is not None else None
        return index if isinstance(index, int) else None

    def local_device(self, local_rank: int) -> int:
        """The index of the device that this machine's process number ``local_rank`` uses.

        Override it where each process sees one device only, whose index is then 0.

        Args:
            local_rank: from 0, among the processes on this machine.

        Raises:
            UnknownDeviceError: there are fewer devices than that. No two processes share one.
        """
        count = self.device_count()
        if not 0 <= local_rank < count:
            raise UnknownDeviceError(
                f"process {local_rank} of this machine has no {self.device_type!r} device: this "
                f"process sees {count}. Start at most {count} processes on this machine, or show "
                f"more devices to each process ({self.visible_devices_env or 'see its driver'})."
            )
        return local_rank

    def numa_node(self, index: int) -> int | None:
        """The NUMA node of the host's memory nearest to device ``index``; None where unknown.

        The default looks up the device's PCI address, where its module tells one, in Linux's
        ``/sys/bus/pci``.
        """
        ask = getattr(self.module, "get_device_properties", None)
        properties = ask(index) if ask is not None else None
        parts = [getattr(properties, f"pci_{part}_id", None) for part in ("bus", "device")]
        if not all(isinstance(part, int) for part in parts):
            return None
        domain = getattr(properties, "pci_domain_id", 0)
        address = f"{domain:04x}:{parts[0]:02x}:{parts[1]:02x}.0"
        try:
            node = int(Path("/sys/bus/pci/devices", address, "numa_node").read_text())
        except (OSError, ValueError):
            return None
        return node if node >= 0 else None

    def process_environment(self, local_world_size: int) -> Mapping[str, str]:
        """Environment variables that processes on this device need when they start.

        Args:
            local_world_size: how many processes there will be on this machine.
        """
        return {}

    # ------------------------------------------------------------------ for the defaults

    @property
    def module(self) -> types.ModuleType:
        """Torch's module for the device type, such as ``torch.foo``.

        Raises:
            ImportError: `torch_package` is not installed, or broken.
            RuntimeError: torch does not know the device type.
        """
        if self.torch_package is not None:
            importlib.import_module(self.torch_package)
        # Not `torch.get_device_module`: it makes a `torch.device`, which a caller's function mode
        # may turn into something else.
        module: types.ModuleType | None = getattr(torch, self.device_type, None)
        if module is None:
            raise RuntimeError(f"torch has no module for the device type {self.device_type!r}")
        return module

    def device(self, index: int) -> torch.device:
        """The `torch.device` of device ``index``."""
        return torch.device(self.device_type, index)

    def _anydevice_on(self, index: int) -> contextlib.AbstractContextManager[Any]:
        """Make device ``index`` the current one, where the device's module can."""
        enter = getattr(self.module, "device", None)
        return enter(index) if enter is not None else contextlib.nullcontext()

    def _anydevice_cached_bytes(self, index: int) -> int:
        """Bytes that this process's allocator holds and does not use."""
        if not self.capabilities.caching_allocator:
            return 0
        reserved = int(self._anydevice_query("memory_reserved", "memory_reserved", index))
        return max(0, reserved - self.memory_allocated(index))

    def _anydevice_function(self, name: str) -> Callable[..., Any]:
        """The function ``name`` of the device's module, or else of ``torch.accelerator``."""
        owner = self.module
        if not hasattr(owner, name) and self._anydevice_is_torchs():
            return getattr(torch.accelerator, name)  # type: ignore[no-any-return]
        return getattr(owner, name)  # type: ignore[no-any-return]

    def _anydevice_find(self, name: str, *accelerator_names: str) -> Callable[..., Any] | None:
        """A function of the device's module, or ``torch.accelerator``'s by one of its names."""
        owners = [(self.module, name)]
        if self._anydevice_is_torchs():  # torch 2.6 has other names there than later ones
            owners += [(torch.accelerator, other) for other in accelerator_names]
        found = (getattr(owner, attribute, None) for owner, attribute in owners)
        return next((function for function in found if function is not None), None)

    def _anydevice_is_torchs(self) -> bool:
        """Whether ``torch.accelerator`` speaks of this device; it knows one type in a process."""
        return torchs_accelerator() == self.device_type

    def _anydevice_query(self, name: str, accelerator_name: str, index: int) -> Any:
        """Ask the device's module, then ``torch.accelerator``, whichever answers.

        Devices fail here in many ways (no such function, NotImplementedError, an internal assertion
        as RuntimeError), so each failure only leads to the next.
        """
        failures = []
        owners: list[tuple[Any, str]] = [(self.module, name)]
        if self._anydevice_is_torchs():
            owners.append((torch.accelerator, accelerator_name))
        for owner, attribute in owners:
            function: Callable[[int], Any] | None = getattr(owner, attribute, None)
            if function is None:
                failures.append(f"{_name(owner)} has no {attribute}")
                continue
            try:
                return function(index)
            except Exception as error:  # noqa: BLE001 - see above
                failures.append(f"{_name(owner)}.{attribute}: {error!s:.120}")
        raise NotImplementedError(
            f"device {self.device_type}:{index} does not answer {name} ({'; '.join(failures)}). "
            "Give its budget yourself, such as "
            f"max_memory={{'{self.device_type}:{index}': '8GiB'}}."
        )


def torchs_accelerator() -> str | None:
    """The device type of which ``torch.accelerator`` speaks, with devices or without; or None."""
    try:
        found = torch.accelerator.current_accelerator()
    except RuntimeError:  # torch 2.6 raises where later ones return None
        return None
    return None if found is None else found.type


def _is_known_to_torch(device_type: str) -> bool:
    try:
        torch.device(device_type)
    except RuntimeError:
        return False
    return True


def _name(owner: Any) -> str:
    return str(getattr(owner, "__name__", type(owner).__name__))


_COMMON_DTYPES: Final = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
        torch.complex64,
        torch.complex128,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    }
)
