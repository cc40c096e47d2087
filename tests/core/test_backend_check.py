"""What is told of a backend's class without calling the device."""

import pytest

from anydevice.backend import INTERFACE_VERSION, Capabilities, DeviceBackend
from anydevice.backend_check import member_faults
from anydevice.registry import list_backends
from anydevice_conformance._version import SPEC_VERSION


def faults_of(**members):
    return member_faults(type("Foo", (DeviceBackend,), {"device_type": "foo", **members})())


def test_the_interface_has_the_version_of_its_specification():
    assert INTERFACE_VERSION == SPEC_VERSION


def test_our_own_backends_have_no_faults():
    assert {r.device_type: member_faults(r.backend) for r in list_backends() if r.backend} == {
        r.device_type: [] for r in list_backends() if r.backend
    }


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"memory_inof": lambda self, index: None}, "did you mean 'memory_info'?"),
        ({"pinn_memory": lambda self, tensor: None}, "did you mean 'pin_memory'?"),
        ({"torch_pakage": "torch_foo"}, "did you mean 'torch_package'?"),
        ({"start_my_driver": lambda self: None}, "starts with an underscore"),
        ({"_anydevice_query": lambda self: None}, "are the interface's own"),
        ({"device_name": lambda self: "foo"}, "cannot be called as the interface calls it"),
        ({"move": lambda self, tensor, device: tensor}, "non_blocking"),
        ({"synchronize": "now"}, "is not a method"),
    ],
)
def test_a_member_that_is_no_member_is_named(members, words):
    (fault,) = faults_of(**members)
    assert fault.startswith(f"Foo.{next(iter(members))}")
    assert words in fault


def test_what_a_backend_may_have_is_no_fault():
    assert faults_of(_helper=lambda self: 1, device_count=lambda self: 1, priority=5) == []
    backend = type("Foo", (DeviceBackend,), {"device_type": "foo"})()
    backend.devices_count = 3
    assert "did you mean 'device_count'?" in member_faults(backend)[0]


def test_a_vendors_helper_collides_with_no_private_name():
    private = {n for n in vars(DeviceBackend) if n.startswith("_") and not n.endswith("__")}
    assert all(name.startswith("_anydevice_") for name in private)
    assert private


def test_capabilities_are_given_by_keyword():
    with pytest.raises(TypeError):
        Capabilities(True)
