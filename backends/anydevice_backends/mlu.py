"""Cambricon's MLU by torch_mlu: https://github.com/Cambricon/torch_mlu."""

from __future__ import annotations

import torch

from anydevice.backend import Capabilities, DeviceBackend, hookimpl

__all__ = ["MluBackend", "anydevice_backends"]


class MluBackend(DeviceBackend):
    """``torch.mlu`` follows ``torch.cuda``, once torch_mlu is imported.

    It counts by the driver's ``libcndev.so``, and so starts no runtime before a fork:
    https://github.com/Cambricon/torch_mlu/blob/main/torch_mlu/mlu/__init__.py
    """

    device_type = "mlu"
    interface_version = "1.1"
    torch_package = "torch_mlu"
    capabilities = Capabilities(
        caching_allocator=True,
        streams=True,
        pinned_memory=True,
        device_rng=True,
        collectives=True,
    )
    # https://github.com/Cambricon/torch_mlu/blob/main/torch_mlu/mlu/cncl.py
    collective_backend = "cncl"
    visible_devices_env = "MLU_VISIBLE_DEVICES"

    def supports_dtype(self, dtype: torch.dtype) -> bool:
        """By the generation of the device; no 64-bit floating point in its matrix products.

        https://github.com/Cambricon/torch_mlu/blob/main/torch_mlu/mlu/__init__.py
        (``is_bf16_supported``, ``is_fp8_supported``)
        """
        if dtype == torch.bfloat16:
            return bool(self.module.is_bf16_supported())
        if dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            supported = getattr(self.module, "is_fp8_supported", None)  # not in older versions
            return supported is not None and bool(supported())
        return super().supports_dtype(dtype) and dtype not in _NOT_HERE


_NOT_HERE = frozenset({torch.float64, torch.complex128})


@hookimpl
def anydevice_backends() -> list[DeviceBackend]:
    """Hand the backend to anydevice."""
    return [MluBackend()]
