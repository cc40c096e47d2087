"""Intel's graphics processors by SYCL: https://docs.pytorch.org/docs/stable/xpu.html."""

from __future__ import annotations

from typing import Final

import torch

from anydevice.backend import Capabilities, DeviceBackend, MemoryInfo, hookimpl

__all__ = ["XpuBackend", "anydevice_backends"]

# From torch 2.7; https://docs.pytorch.org/docs/stable/distributed.html#backends
_HAS_XCCL: Final = torch.distributed.is_available() and bool(
    getattr(torch.distributed, "is_xccl_available", bool)()
)


class XpuBackend(DeviceBackend):
    """Integrated ones do not tell their free memory, and some have no 64-bit floating point."""

    device_type = "xpu"
    interface_version = "1.1"
    capabilities = Capabilities(
        caching_allocator=True,
        streams=True,
        pinned_memory=True,
        device_rng=True,
        collectives=_HAS_XCCL,
        grad_scaling=True,
    )
    collective_backend = "xccl" if _HAS_XCCL else None
    # https://oneapi-src.github.io/level-zero-spec/level-zero/latest/core/PROG.html#affinity-mask
    visible_devices_env = "ZE_AFFINITY_MASK"
    # https://github.com/oneapi-src/unified-runtime (ur_result_t), seen from oneDNN and oneMKL
    out_of_memory_words = ("UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY", "OUT_OF_RESOURCES")

    def driver_version(self) -> str:
        """Of the first device's: https://docs.pytorch.org/docs/stable/generated/torch.xpu.get_device_properties.html."""
        return str(self.module.get_device_properties(0).driver_version)

    def memory_info(self, index: int) -> MemoryInfo:
        """As the default, with what helps where the driver does not answer.

        https://github.com/pytorch/pytorch/issues/157989

        Raises:
            NotImplementedError: the driver does not tell its free memory.
        """
        try:
            return super().memory_info(index)
        except NotImplementedError as error:
            raise NotImplementedError(
                f"{error} (An integrated device may answer with the environment variable "
                "UR_L0_ENABLE_SYSMAN_ENV_DEFAULT=0 and a newer driver.)"
            ) from error

    def supports_dtype(self, dtype: torch.dtype) -> bool:
        """Ask the devices: https://docs.pytorch.org/docs/stable/generated/torch.xpu.get_device_properties.html."""
        if dtype in (torch.float64, torch.complex128):
            indices = range(self.device_count())
            return all(bool(self.module.get_device_properties(i).has_fp64) for i in indices)
        if dtype == torch.bfloat16:
            return bool(self.module.is_bf16_supported())
        return super().supports_dtype(dtype)


@hookimpl
def anydevice_backends() -> list[DeviceBackend]:
    """Hand the backend to anydevice."""
    return [XpuBackend()]
