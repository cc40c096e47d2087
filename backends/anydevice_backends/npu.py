"""Huawei's Ascend by torch_npu: https://github.com/Ascend/pytorch.

API: https://www.hiascend.com/document/detail/en/Pytorch/latest/apiref/apilist/ptaoplist_000001.html
"""

from __future__ import annotations

import torch

from anydevice.backend import Capabilities, DeviceBackend, hookimpl

__all__ = ["NpuBackend", "anydevice_backends"]


class NpuBackend(DeviceBackend):
    """``torch.npu`` follows ``torch.cuda``, once torch_npu is imported.

    It counts by the driver's ``libascend_hal.so``, and so starts no runtime before a fork.
    """

    device_type = "npu"
    interface_version = "1.1"
    torch_package = "torch_npu"
    capabilities = Capabilities(
        caching_allocator=True,
        streams=True,
        pinned_memory=True,
        device_rng=True,
        collectives=True,
        grad_scaling=True,
    )
    # https://github.com/Ascend/pytorch/tree/master/torch_npu/distributed
    collective_backend = "hccl"
    # https://www.hiascend.com/document/detail/en/canncommercial/latest/envvar
    visible_devices_env = "ASCEND_RT_VISIBLE_DEVICES"
    # A plain RuntimeError in older versions: https://github.com/vllm-project/vllm-ascend/issues/19
    out_of_memory_words = ("NPU out of memory",)

    def supports_dtype(self, dtype: torch.dtype) -> bool:
        """No 64-bit floating point in its matrix products, no 8-bit before Ascend 950.

        https://www.hiascend.com/document/detail/en/CANNCommunityEdition/latest (aclnnMatmul)
        """
        if dtype == torch.bfloat16:
            return bool(self.module.is_bf16_supported())
        return super().supports_dtype(dtype) and dtype not in _NOT_HERE


_NOT_HERE = frozenset(
    {torch.float64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2},
)


@hookimpl
def anydevice_backends() -> list[DeviceBackend]:
    """Hand the backend to anydevice."""
    return [NpuBackend()]
