"""The host: always there, the last resort of every placement, and the rest of offloaded weights."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from anydevice.backend import Capabilities, DeviceBackend, MemoryInfo, hookimpl
from anydevice_backends._cgroups import memory_groups

__all__ = ["CpuBackend", "anydevice_backends"]

_GLOO = torch.distributed.is_available() and torch.distributed.is_gloo_available()
#: Beside the common ones, what torch casts on the host. (Newer torch has more of these names.)
_ONLY_HERE = frozenset(
    getattr(torch, name)
    for name in (
        "uint16",
        "uint32",
        "uint64",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    )
    if hasattr(torch, name)
)


class CpuBackend(DeviceBackend):
    """The host's processors and memory.

    ``unified_memory`` is not claimed: it says of another device that it takes from the host.
    """

    device_type = "cpu"
    interface_version = "1.1"
    priority = 0
    capabilities = Capabilities(device_rng=True, collectives=_GLOO, grad_scaling=True)
    collective_backend = "gloo" if _GLOO else None

    def device_count(self) -> int:
        """One, always."""
        return 1

    def device_name(self, index: int) -> str:
        """The processor's name, as far as the system tells it."""
        try:
            lines = Path("/proc/cpuinfo").read_text().splitlines()
        except OSError:
            lines = []
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        return (names and names[0]) or platform.processor() or platform.machine() or "cpu"

    def memory_info(self, index: int) -> MemoryInfo:
        """What the system has available, or less where a container's limits leave less.

        https://psutil.readthedocs.io/en/latest/#psutil.virtual_memory
        """
        import psutil  # not at the top: it takes a fifth of the time of all discovery

        memory = psutil.virtual_memory()
        groups = memory_groups()
        total = min([memory.total, *(group.limit for group in groups)])
        free = min([memory.available, *(group.limit - group.used for group in groups)])
        return MemoryInfo(free=max(0, free), total=total)

    def memory_allocated(self, index: int) -> int:
        """Torch does not count the host's tensors: https://pytorch.org/docs/stable/cpu.html.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("torch does not count the bytes of tensors on the host")

    peak_memory_allocated = memory_allocated

    def reset_peak_memory(self, index: int) -> None:
        """As `memory_allocated`.

        Raises:
            NotImplementedError: always.
        """
        self.memory_allocated(index)

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Torch's host allocator raises a plain RuntimeError.

        https://github.com/pytorch/pytorch/blob/main/c10/core/impl/alloc_cpu.cpp
        """
        if isinstance(error, MemoryError) or not isinstance(error, RuntimeError):
            return isinstance(error, MemoryError)
        try:
            return "DefaultCPUAllocator" in str(error)
        except Exception:  # noqa: BLE001 - an error that cannot be shown is none of the host's
            return False

    def synchronize(self, index: int) -> None:
        """Nothing is queued on the host."""

    def supports_dtype(self, dtype: torch.dtype) -> bool:
        """More than the common ones: whatever torch can hold and cast there."""
        return super().supports_dtype(dtype) or dtype in _ONLY_HERE

    def manual_seed_all(self, seed: int) -> None:
        """Seed the host's generator, and no other (``torch.manual_seed`` seeds all devices)."""
        torch.default_generator.manual_seed(seed)

    def rng_state(self, index: int) -> torch.Tensor:
        """The state of the host's generator."""
        return torch.default_generator.get_state()

    def set_rng_state(self, state: torch.Tensor, index: int) -> None:
        """Put back what `rng_state` gave."""
        torch.default_generator.set_state(state)

    def current_device(self) -> int:
        """The only one."""
        return 0

    def local_device(self, local_rank: int) -> int:
        """All processes of a machine share its host."""
        return 0

    def device(self, index: int) -> torch.device:
        """The host has no index: tensors report ``cpu``."""
        return torch.device("cpu")


@hookimpl
def anydevice_backends() -> list[DeviceBackend]:
    """Hand the backend to anydevice."""
    return [CpuBackend()]
