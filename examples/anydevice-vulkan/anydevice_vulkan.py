"""anydevice on Vulkan devices, by torchvulkan: https://pypi.org/project/torchvulkan/.

Its streams are refused and its pinned memory is not pinned, so neither is claimed.
"""

from __future__ import annotations

import functools
import importlib.util
import subprocess
import sys

import torch

from anydevice.backend import Capabilities, DeviceBackend, hookimpl

__all__ = ["VulkanBackend", "anydevice_backends"]


class VulkanBackend(DeviceBackend):
    """Only the count and one dtype differ from the defaults."""

    device_type = "vulkan"
    torch_package = "torchvulkan"
    capabilities = Capabilities(caching_allocator=True, device_rng=True)

    def device_count(self) -> int:
        """Ask a child process: torchvulkan starts Vulkan to count, and then no fork can use it."""
        if importlib.util.find_spec("torchvulkan") is None or not _count_in_a_child():
            return 0
        assert self.module  # from now on torch knows the device type
        return _count_in_a_child()

    def supports_dtype(self, dtype: torch.dtype) -> bool:
        """Without the extension for it, bfloat16 is computed on the host."""
        if dtype == torch.bfloat16:
            return bool(self.module.is_bf16_supported())
        return super().supports_dtype(dtype)


@functools.cache
def _count_in_a_child() -> int:
    code = "import torchvulkan; print(torchvulkan.device_count())"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return int(done.stdout) if done.returncode == 0 else 0


@hookimpl
def anydevice_backends() -> list[DeviceBackend]:
    """Hand the backend to anydevice."""
    return [VulkanBackend()]
