"""Apple's graphics processors by Metal: one device, whose memory is the host's.

https://docs.pytorch.org/docs/stable/mps.html
"""

from __future__ import annotations

import torch

from anydevice.backend import Capabilities, DeviceBackend, MemoryInfo, hookimpl

__all__ = ["MpsBackend", "anydevice_backends"]


class MpsBackend(DeviceBackend):
    """``torch.mps`` has no streams, no ``mem_get_info``, and functions that take no device."""

    device_type = "mps"
    interface_version = "1.1"
    capabilities = Capabilities(caching_allocator=True, unified_memory=True, device_rng=True)
    # Plain RuntimeErrors; the second is Metal's limit for one tensor.
    # https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/mps/MPSAllocator.mm
    out_of_memory_words = ("MPS backend out of memory", "Invalid buffer size")

    def device_name(self, index: int) -> str:
        """https://docs.pytorch.org/docs/stable/backends.html#module-torch.backends.mps."""
        get_name = getattr(torch.backends.mps, "get_name", None)  # from torch 2.10
        return str(get_name()) if get_name is not None else "Apple GPU"

    def memory_info(self, index: int) -> MemoryInfo:
        """What Metal recommends as the most for this process, and the host has available.

        What this process has taken and its tensors do not use can be allocated again at once.
        https://docs.pytorch.org/docs/stable/generated/torch.mps.recommended_max_memory.html
        https://docs.pytorch.org/docs/stable/generated/torch.mps.driver_allocated_memory.html
        """
        import psutil  # not at the top: discovery imports this module on every machine

        total = int(self.module.recommended_max_memory())
        allocated = self.memory_allocated(index)
        cached = max(0, int(self.module.driver_allocated_memory()) - allocated)
        available = psutil.virtual_memory().available + cached
        return MemoryInfo(free=max(0, min(total - allocated, available)), total=total)

    def memory_allocated(self, index: int) -> int:
        """https://docs.pytorch.org/docs/stable/generated/torch.mps.current_allocated_memory.html."""
        return int(self.module.current_allocated_memory())

    def peak_memory_allocated(self, index: int) -> int:
        """Metal's allocator keeps no peak.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("torch.mps keeps no peak of allocated memory")

    def reset_peak_memory(self, index: int) -> None:
        """As `peak_memory_allocated`.

        Raises:
            NotImplementedError: always.
        """
        self.peak_memory_allocated(index)

    def synchronize(self, index: int) -> None:
        """https://docs.pytorch.org/docs/stable/generated/torch.mps.synchronize.html."""
        self.module.synchronize()

    def move(
        self, tensor: torch.Tensor, device: torch.device, *, non_blocking: bool = False
    ) -> torch.Tensor:
        """Always blocking: a queued copy reads its source after that may be gone.

        https://github.com/pytorch/pytorch/issues/189690
        https://github.com/pytorch/pytorch/issues/139550
        """
        return tensor.to(device)

    def supports_dtype(self, dtype: torch.dtype) -> bool:
        """Metal has no 64-bit floating point, torch has no 8-bit there; bfloat16 needs macOS 14.

        https://developer.apple.com/metal/Metal-Shading-Language-Specification.pdf (2.1)
        """
        if dtype == torch.bfloat16:
            return bool(torch.backends.mps.is_macos_or_newer(14, 0))
        return super().supports_dtype(dtype) and dtype not in _NOT_HERE

    def manual_seed_all(self, seed: int) -> None:
        """https://docs.pytorch.org/docs/stable/generated/torch.mps.manual_seed.html."""
        self.module.manual_seed(seed)


_NOT_HERE = frozenset(
    {torch.float64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2},
)


@hookimpl
def anydevice_backends() -> list[DeviceBackend]:
    """Hand the backend to anydevice."""
    return [MpsBackend()]
