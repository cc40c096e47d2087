"""anydevice on the device ``foo``: all that its vendor has to write."""

from anydevice.backend import Capabilities, DeviceBackend, hookimpl


class FooBackend(DeviceBackend):
    """A device that follows PyTorch's conventions, once torch_foo is imported."""

    device_type = "foo"
    torch_package = "torch_foo"
    capabilities = Capabilities(
        caching_allocator=True, streams=True, pinned_memory=True, device_rng=True
    )


@hookimpl
def anydevice_backends():
    """Hand the backend to anydevice."""
    return [FooBackend()]
