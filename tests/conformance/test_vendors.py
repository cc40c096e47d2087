"""Right backends pass clean: the host, and a device that nobody here wrote."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from warm import run_python

from anydevice_conformance import report as reports

pytestmark = [
    pytest.mark.usefixtures("warm_process"),
    pytest.mark.timeout(600),  # a device of software, on a machine that has other work
]

HERE = Path(__file__).parent
#: Where Vulkan may have gaps.
GAPS = {"DEV", "MEM", "OOM", "STR", "PIN", "COL", "PRO", "TRN"}
VULKAN = HERE.parents[1] / "examples" / "anydevice-vulkan"
DRIVERS = [Path("/usr/share/vulkan/icd.d"), Path("/etc/vulkan/icd.d")]


def install(package, folder):
    """Install a copy of a package into a folder, without a network; returns the folder."""
    copy, site = folder / "source", folder / "site"
    copy.mkdir()
    for file in package.iterdir():
        if file.is_file():
            (copy / file.name).write_bytes(file.read_bytes())
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-build-isolation"]
    command += ["--no-deps", "--no-index", "--target", str(site), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return site


def certify(device_type, folder, **environment):
    kept = {k: v for k, v in os.environ.items() if not k.startswith("ANYDEVICE_")}
    command = ["-m", "anydevice", "certify", device_type, "--quick", "--output", folder]
    done = run_python(*command, cwd=folder, env={**kept, **environment}, timeout=560)
    assert (folder / "report.json").is_file(), done.stdout + done.stderr
    report = json.loads((folder / "report.json").read_text())
    assert reports.validate(report) == []
    assert report["because"] == ["--quick leaves checks out"], done.stdout + done.stderr
    assert done.returncode == 0
    return {r["check"]: r["status"] for r in report["results"]}


def groups_with(statuses, status):
    return {name[5:8] for name, found in statuses.items() if found == status}


def test_the_host(tmp_path):
    statuses = certify("cpu", tmp_path)
    passed = groups_with(statuses, "passed")
    assert passed == {"DEV", "MEM", "MOV", "OOM", "RNG", "DTY", "COL", "INF", "PRO", "TRN"}
    assert statuses["test_MOV_017_between_devices"] == "no hardware"


def test_a_device_that_nobody_here_wrote(tmp_path):
    if os.environ.get("ANYDEVICE_WITHOUT_VULKAN") == "1":
        pytest.skip("ANYDEVICE_WITHOUT_VULKAN=1")
    drivers = [file for folder in DRIVERS for file in folder.glob("lvp_icd*.json")]
    assert importlib.util.find_spec("torchvulkan"), "pip install --no-deps torchvulkan==0.2.1"
    assert drivers, "apt-get install --no-install-recommends mesa-vulkan-drivers"
    site = install(VULKAN, tmp_path)
    environment = {"PYTHONPATH": str(site), "VK_DRIVER_FILES": str(drivers[0])}
    statuses = certify("vulkan", tmp_path, **environment)
    gaps = groups_with(statuses, "not claimed")
    assert {"STR", "PIN", "COL"} <= gaps <= GAPS
    assert {"DEV", "MEM", "MOV", "OOM", "RNG", "DTY", "INF"} <= groups_with(statuses, "passed")
