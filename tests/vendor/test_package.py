"""A vendor's package, really installed: found, used and removed; and three that are broken."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent

USE = """
    import json
    import torch
    import anydevice

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).eval()
    x = torch.randn(2, 5, 32)
    with torch.no_grad():
        expected = model(x)
    caps = {"foo:0": "80KiB", "foo:1": "80KiB", "cpu": "1GiB"}
    device_map = anydevice.infer_auto_device_map(model, max_memory=caps)
    anydevice.dispatch_model(model, device_map)
    with torch.no_grad():
        output = model(x)
    print(json.dumps({
        "devices": [str(d) for d in anydevice.available_devices()],
        "places": sorted({str(p.device) for p in model.parameters()}),
        "difference": (output.cpu() - expected).abs().max().item(),
    }))
"""


def test_a_package_is_found_used_and_removed(environment, wheel_of):
    assert ("foo", "anydevice-foo 1.2.3") not in environment.backends()

    environment.install(wheel_of(HERE / "anydevice-foo"))
    assert environment.backends(fresh=True)["foo", "anydevice-foo 1.2.3"] == ("available", "", 2)
    used = environment.run(USE)
    assert used["devices"] == ["foo:0", "foo:1", "cpu"]
    assert {"foo:0", "foo:1"} <= set(used["places"])
    assert used["difference"] <= 1e-6

    left_out = environment.backends(ANYDEVICE_BACKENDS="-foo")
    assert left_out["foo", "anydevice-foo 1.2.3"][0] == "excluded"

    environment.uninstall("anydevice-foo")
    assert not [kind for kind, _ in environment.backends() if kind == "foo"]


@pytest.mark.parametrize(
    ("folder", "distribution", "words"),
    [
        ("broken-import", "anydevice-broken-import", "a_driver_library_that_is_not_there"),
        ("broken-return", "anydevice-broken-return", "returned str"),
    ],
)
def test_a_broken_package_is_listed_and_breaks_nothing(
    environment, wheel_of, folder, distribution, words
):
    environment.install(wheel_of(HERE / "anydevice-foo"), wheel_of(HERE / folder))
    found = environment.backends()
    (broken,) = [rest for (_, package), rest in found.items() if package.startswith(distribution)]
    assert broken[0] == "broken"
    assert words in broken[1]
    assert found["foo", "anydevice-foo 1.2.3"] == ("available", "", 2)
    assert found["cpu", next(p for k, p in found if k == "cpu")][0] == "available"


def test_two_packages_for_one_device_are_named_and_one_can_be_picked(environment, wheel_of):
    environment.install(wheel_of(HERE / "anydevice-foo"), wheel_of(HERE / "foo-again"))
    found = environment.backends()
    for package in ("anydevice-foo 1.2.3", "foo-again 0.1"):
        status, reason, count = found["foo", package]
        assert (status, count) == ("duplicate", 0)
        assert "anydevice-foo 1.2.3" in reason
        assert "foo-again 0.1" in reason

    picked = environment.backends(ANYDEVICE_BACKENDS="foo@foo-again")
    assert picked["foo", "foo-again 0.1"] == ("available", "", 2)
    assert picked["foo", "anydevice-foo 1.2.3"][0] == "excluded"
