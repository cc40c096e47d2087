"""anydevice on Vulkan devices, by torchvulkan: https://pypi.org/project/torchvulkan/.

Its streams are refused and its pinned memory is not pinned, so neither is claimed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import subprocess
import sys

from anydevice.backend import Capabilities, DeviceBackend, hookimpl

__all__ = ["VulkanBackend", "anydevice_backends"]


class VulkanBackend(DeviceBackend):
    """Only the count differs from the defaults."""

    device_type = "vulkan"
    torch_package = "torchvulkan"
    capabilities = Capabilities(caching_allocator=True, device_rng=True)

    def device_count(self) -> int:
        """Ask a child process: torchvulkan starts Vulkan to count, and then no fork can use it."""
        installed = importlib.util.find_spec("torchvulkan") is not None
        count = _count_in_a_child() if installed else 0
        if count:
            importlib.import_module("torchvulkan")  # from now on torch knows the device type
        return count


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
