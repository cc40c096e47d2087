"""A second package for the device ``foo``."""

from anydevice.backend import DeviceBackend, hookimpl


class FooAgain(DeviceBackend):
    """As another package's."""

    device_type = "foo"
    torch_package = "torch_foo"


@hookimpl
def anydevice_backends():
    """Hand the backend to anydevice."""
    return [FooAgain()]
