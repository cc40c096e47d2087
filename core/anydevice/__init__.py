"""Run PyTorch models that do not fit on one device, on any accelerator."""

from anydevice._version import __version__
from anydevice.registry import available_devices, get_backend, list_backends

__all__ = ["__version__", "available_devices", "get_backend", "list_backends"]
