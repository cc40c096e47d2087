"""What the wheel and the source distribution contain: all that a user needs, and no tests."""

from __future__ import annotations

import configparser
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[2]
#: Where each import package stands.
PACKAGES = {
    "anydevice": ROOT / "core",
    "anydevice_backends": ROOT / "backends",
    "anydevice_conformance": ROOT / "conformance",
}
#: What is made beside the sources, and belongs to nobody.
MADE = {".pyc", ".so"}


def sources():
    """Every file of the import packages, by its path in a wheel."""
    return {
        file.relative_to(folder).as_posix()
        for name, folder in PACKAGES.items()
        for file in (folder / name).rglob("*")
        if file.is_file() and file.suffix not in MADE
    }


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    (path,) = WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    return zipfile.ZipFile(path)


@pytest.fixture(scope="session")
def sdist(tmp_path_factory):
    """The unpacked source distribution."""
    folder = tmp_path_factory.mktemp("sdist")
    (path,) = SdistBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    with tarfile.open(path) as archive:
        archive.extractall(folder, filter="data")
    (unpacked,) = (entry for entry in folder.iterdir() if entry.is_dir())
    return unpacked


def is_a_test(path):
    """Of this project; the suite's own checks, `anydevice_conformance/suite`, are the product."""
    parts = Path(path).parts
    named = parts[-1].startswith(("test_", "conftest")) and parts[-1].endswith(".py")
    return "tests" in parts or (named and "suite" not in parts)


def test_the_wheel_has_every_file_of_the_packages_and_no_other(wheel):
    found = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert found == sources()
    assert not [name for name in found if is_a_test(name)]
    # Not only Python: the simulator's sources, templates, data, and what says that types are there.
    for needed in (
        "anydevice/py.typed",
        "anydevice/launch/refused_flags.json",
        "anydevice_conformance/specification.json",
        "anydevice_conformance/simulator/csrc/bindings.cpp",
        "anydevice_conformance/templates/pyproject.toml.txt",
    ):
        assert needed in found


def test_the_wheel_names_what_it_needs_and_offers(wheel):
    (metadata,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    said = message_from_string(wheel.read(metadata).decode())
    assert said["Requires-Python"] == ">=3.10"
    assert said["License-Expression"] == "Apache-2.0"
    required = {line.split(";")[0].strip() for line in said.get_all("Requires-Dist")}
    assert {"torch>=2.6", "safetensors>=0.4.3", "pluggy>=1.5"} <= required
    assert {"transformers", "conformance", "pictures"} <= set(said.get_all("Provides-Extra"))
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel.namelist())


def test_every_entry_point_leads_to_a_module_of_the_wheel(wheel):
    (name,) = (n for n in wheel.namelist() if n.endswith("/entry_points.txt"))
    points = configparser.ConfigParser(delimiters="=")
    points.optionxform = str
    points.read_string(wheel.read(name).decode())
    assert "anydevice" in points["console_scripts"]
    assert {"cpu", "cuda", "simulator"} <= set(points["anydevice.backends"])
    files = set(wheel.namelist())
    for group in points.sections():
        for target in points[group].values():
            module = target.partition(":")[0].replace(".", "/")
            assert {f"{module}.py", f"{module}/__init__.py"} & files, target


def test_the_sources_make_the_same_wheel_and_hold_no_tests(sdist, wheel, tmp_path):
    names = [file.relative_to(sdist).as_posix() for file in sdist.rglob("*") if file.is_file()]
    assert not [name for name in names if is_a_test(name)]
    for needed in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "SECURITY.md"):
        assert needed in names
    assert "docs/tutorial.md" in names
    assert "docs/images/overview.svg" in names
    (again,) = WheelBuilder(str(sdist)).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(again) as built:
        assert sorted(built.namelist()) == sorted(wheel.namelist())
