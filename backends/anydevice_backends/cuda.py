"""NVIDIA's devices by CUDA and AMD's by ROCm, which torch both calls ``cuda``.

https://docs.pytorch.org/docs/stable/cuda.html and
https://docs.pytorch.org/docs/stable/notes/hip.html
"""

from __future__ import annotations

import dataclasses
from typing import Final

import psutil
import torch

from anydevice.backend import Capabilities, DeviceBackend, MemoryInfo, hookimpl

__all__ = ["CudaBackend", "anydevice_backends"]

_HAS_NCCL: Final = torch.distributed.is_available() and torch.distributed.is_nccl_available()


class CudaBackend(DeviceBackend):
    """What the defaults do not know of CUDA and ROCm.

    They count by ``torch.cuda.device_count``, which asks NVML (on ROCm, AMD SMI) and so starts no
    runtime before a fork:
    https://docs.pytorch.org/docs/stable/generated/torch.cuda.device_count.html
    """

    device_type = "cuda"
    interface_version = "1.1"
    kind = "gpu"
    capabilities = Capabilities(
        caching_allocator=True,
        streams=True,
        pinned_memory=True,
        device_rng=True,
        collectives=_HAS_NCCL,
        grad_scaling=True,
    )
    # RCCL answers to NCCL's name: https://docs.pytorch.org/docs/stable/notes/hip.html
    collective_backend = "nccl" if _HAS_NCCL else None
    # https://rocm.docs.amd.com/en/latest/conceptual/gpu-isolation.html
    visible_devices_env = "HIP_VISIBLE_DEVICES" if torch.version.hip else "CUDA_VISIBLE_DEVICES"
    # What the allocator does not see: a context, a library's workspace.
    # https://docs.nvidia.com/cuda/cublas/#cublasstatus-t
    out_of_memory_words = (
        "CUDA error: out of memory",
        "HIP error: out of memory",
        "CUBLAS_STATUS_ALLOC_FAILED",
        "HIPBLAS_STATUS_ALLOC_FAILED",
    )

    def memory_info(self, index: int) -> MemoryInfo:
        """An integrated device (GB10, Jetson, Strix Halo) has the host's memory.

        The driver counts the host's page cache as used, though an allocation gets it:
        https://docs.nvidia.com/cuda/cuda-runtime-api/structcudaDeviceProp.html (``integrated``)
        """
        info = super().memory_info(index)
        if not self._is_integrated(index):
            return dataclasses.replace(info, shared_with_host=False)
        cached = max(0, self.module.memory_reserved(index) - self.module.memory_allocated(index))
        available = psutil.virtual_memory().available + cached
        free = min(info.total, max(info.free, available))
        return MemoryInfo(free=free, total=info.total, shared_with_host=True)

    def _is_integrated(self, index: int) -> bool:
        """Whether a device has no memory of its own: ``cudaDeviceProp.integrated``."""
        properties = self.module.get_device_properties(index)
        named = (getattr(properties, name, 0) for name in ("is_integrated", "integrated"))
        return any(bool(value) for value in named)

    def driver_version(self) -> str:
        """Of the runtime that torch was built for: torch tells no driver's version in public.

        https://docs.pytorch.org/docs/stable/notes/hip.html (``torch.version``)
        """
        if torch.version.hip:
            return f"HIP runtime {torch.version.hip}"
        return f"CUDA runtime {torch.version.cuda}" if torch.version.cuda else ""

    def supports_dtype(self, dtype: torch.dtype) -> bool:
        """Old devices compute no bfloat16.

        https://docs.pytorch.org/docs/stable/cuda.html (``is_bf16_supported``)
        """
        if dtype == torch.bfloat16:
            return bool(self.module.is_bf16_supported())
        return super().supports_dtype(dtype)


@hookimpl
def anydevice_backends() -> list[DeviceBackend]:
    """Hand the backend to anydevice."""
    return [CudaBackend()]
