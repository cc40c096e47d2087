"""A new vendor's path: generate, install without a network, look, certify, mend, certify."""

from __future__ import annotations

import ast
import json
import os
import shutil
import textwrap

import pytest
from warm import run_python

from anydevice.cli import main
from anydevice_conformance import report as reports
from anydevice_conformance.scaffold import write_package

pytestmark = pytest.mark.usefixtures("warm_process")

#: What the vendor has already; the simulator plays it.
TORCH_BAR = """
from anydevice_conformance import simulator

simulator.install(name="bar")
simulator.configure(devices=2, memory="64MiB", mode="lazy")
"""


def python(arguments, folder, path):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ANYDEVICE_")}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, path))
    done = run_python(*arguments, cwd=folder, env=environment)
    return done.returncode, done.stdout + done.stderr


def install(package, site):
    command = ["-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps", "--no-index"]
    code, output = python([*command, "--upgrade", "--target", site, package], package, [])
    assert code == 0, output


@pytest.fixture(scope="module")
def vendor(tmp_path_factory):
    """A folder with the vendor's torch package, one with a new package, and where it is installed.

    It is not to be changed.
    """
    folder = tmp_path_factory.mktemp("vendor")
    (folder / "vendor").mkdir()
    (folder / "vendor" / "torch_bar.py").write_text(textwrap.dedent(TORCH_BAR))
    words = ["new-backend", "anydevice-bar", "--device-type", "bar", "--output", str(folder)]
    assert main(words) == 0
    install(folder / "anydevice-bar", folder / "site")
    return folder


def test_the_way_of_the_guide(vendor, tmp_path):
    for name in ("anydevice-bar", "site", "vendor"):
        shutil.copytree(vendor / name, tmp_path / name)
    package, site = tmp_path / "anydevice-bar", tmp_path / "site"
    path = [site, tmp_path / "vendor"]

    code, output = python(["-m", "anydevice", "backends"], tmp_path, path)
    assert code == 0
    assert "anydevice-bar 0.1.0" in output

    # Nothing is claimed yet, and the device caches: the report says what to do.
    certify = ["-m", "anydevice", "certify", "bar", "--quick", "--output", "report"]
    code, output = python(certify, tmp_path, path)
    assert code == 1, output
    assert "FAILED MEM-003" in output
    assert "claim ``caching_allocator``" in output
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    failed = {r["paragraph"] for r in report["results"] if r["status"] == "failed"}
    assert "MEM-003" in failed
    # Laws over all members, and that of a full device, see the same memory not come back.
    assert {p for p in failed if not p.startswith("MEM")} <= {"DEV-012", "DEV-013", "OOM-004"}

    # What works and is not claimed is told.
    probe = """
        import json, pathlib, sys
        from anydevice_conformance.runner import probe
        names = ["streams", "pinned_memory", "device_rng", "collectives", "unified_memory"]
        print(json.dumps(probe("bar", names, pathlib.Path("report"))))
    """
    code, output = python(["-c", textwrap.dedent(probe)], tmp_path, path)
    assert code == 0, output
    found = json.loads(output.splitlines()[-1])
    works = [name for name, works in found.items() if works]
    assert works == ["streams", "pinned_memory", "device_rng"]

    # What the device has is claimed: the package's own tests pass, of which one certifies it.
    backend = package / "anydevice_bar.py"
    text = backend.read_text()
    for name in ("caching_allocator", *works):
        assert f"{name}=False" in text
        text = text.replace(f"{name}=False", f"{name}=True")
    backend.write_text(text)
    install(package, site)
    tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp", tmp_path / "tests"]
    code, output = python(tests, package, path)
    assert code == 0, output
    assert "3 passed" in output
    report = json.loads((tmp_path / "tests" / "test_certify0" / "report.json").read_text())
    assert reports.validate(report) == []
    assert report["because"] == ["--quick leaves checks out"]
    statuses = {r["check"]: r["status"] for r in report["results"]}
    gaps = {check[5:8] for check, status in statuses.items() if status == "not claimed"}
    assert {"DEV", "MEM", "COL"} <= gaps <= {"DEV", "MEM", "COL", "PRO", "TRN"}
    assert statuses["test_STR_004_wait_for_kernel"] == "passed"


def test_without_the_vendors_package_there_is_no_hardware(vendor, tmp_path):
    certify = ["-m", "anydevice", "certify", "bar", "--quick", "--output", "report"]
    code, output = python(certify, tmp_path, [vendor / "site"])
    assert code == 1, output
    assert "Verdict: no hardware" in output
    assert "no device of the type here: torch_bar is not installed" in output


def test_the_simulator_under_a_vendors_name_says_so(vendor, tmp_path):
    certify = ["-m", "anydevice", "certify", "sim", "--quick", "--output", "report"]
    code, output = python(certify, tmp_path, [vendor / "site", vendor / "vendor"])
    assert code == 1, output
    assert "the simulator plays 'bar' in this process" in output
    assert "ANYDEVICE_BACKENDS=-bar ANYDEVICE_SIMULATOR=1" in output
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert reports.validate(report) == []
    messages = {r["message"] for r in report["results"] if r["status"] == "no hardware"}
    assert any("plays 'bar'" in message for message in messages)


def test_all_files_are_whole(tmp_path):
    files = write_package("Anydevice.Foo-Two", "foo_two", tmp_path, imports="vendor.torch_foo")
    names = {str(file.relative_to(tmp_path / "Anydevice.Foo-Two")) for file in files}
    assert names == {
        "pyproject.toml",
        "anydevice_foo_two.py",
        "tests/test_conformance.py",
        "tests/test_backend.py",
        ".github/workflows/conformance.yml",
        "README.md",
        ".gitignore",
    }
    for file in files:
        text = file.read_text()
        assert "@NAME@" not in text
        assert not any(
            word in text for word in ("@MODULE@", "@TYPE@", "@CLASS@", "@TORCH_PACKAGE@")
        )
        if file.suffix == ".py":
            ast.parse(text)
    backend = (tmp_path / "Anydevice.Foo-Two" / "anydevice_foo_two.py").read_text()
    assert "class FooTwoBackend(DeviceBackend):" in backend
    assert 'torch_package = "vendor.torch_foo"' in backend


@pytest.mark.parametrize(
    ("name", "kind", "imports", "words"),
    [
        ("../escape", "foo", None, "not a name of a distribution"),
        ("", "foo", None, "not a name of a distribution"),
        ("anydevice-foo", "Foo:0", None, "not a torch device type"),
        ("anydevice-foo", "foo", "os; import x", "not a module"),
    ],
)
def test_bad_names_are_refused(tmp_path, name, kind, imports, words):
    with pytest.raises(ValueError, match=words):
        write_package(name, kind, tmp_path, imports=imports)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path, capsys):
    words = ["new-backend", "anydevice-foo", "--device-type", "foo", "--output", str(tmp_path)]
    assert main(words) == 0
    assert "anydevice certify foo" in capsys.readouterr().out
    assert main(words) == 1
    assert "is there already" in capsys.readouterr().err


def test_the_package_says_what_it_was_written_for(tmp_path):
    """Which anydevice it works with, and which version of the interface."""
    from anydevice.backend import INTERFACE_VERSION
    from anydevice.backend_check import member_faults

    write_package("anydevice-quux", "quux", tmp_path)
    root = tmp_path / "anydevice-quux"
    project = (root / "pyproject.toml").read_text()
    assert project.count('>=0.1,<1.0"') == 2
    scope = {}
    exec((root / "anydevice_quux.py").read_text(), scope)
    (backend,) = scope["anydevice_backends"]()
    assert backend.interface_version == INTERFACE_VERSION
    assert member_faults(backend) == []
