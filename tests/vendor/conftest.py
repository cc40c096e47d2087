"""Temporary environments into which vendors' packages are really installed, without a network."""

import functools
import json
import os
import subprocess
import sys
import sysconfig
import textwrap
import venv
from pathlib import Path

import pytest
from warm import run_python

HERE = Path(__file__).parent
EXAMPLES = HERE.parent.parent / "examples"


def pip(*arguments):
    command = [sys.executable, "-m", "pip", *map(str, arguments)]
    env = {**os.environ, "PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


class Environment:
    """A virtual environment that also sees the packages of the one that runs the tests.

    Programs run with its packages on the path, as forks of a process that has imported torch; its
    own interpreter runs them where ``fresh`` asks for that.
    """

    def __init__(self, folder):
        venv.create(folder, with_pip=False, symlinks=True)
        self.python = folder / "bin" / "python"
        self.purelib = sysconfig.get_path("purelib", vars={"base": str(folder)})
        parent = sysconfig.get_path("purelib")
        Path(self.purelib, "parent.pth").write_text(f"import site; site.addsitedir({parent!r})\n")

    def install(self, *wheels):
        pip("--python", self.python, "install", "--no-deps", "--no-index", *wheels)

    def uninstall(self, name):
        pip("--python", self.python, "uninstall", "--yes", name)

    #: Warnings are errors, but for the one that a busy machine brings: a count that takes seconds.
    FLAGS = ("-W", "error", "-W", "ignore:the backend of")

    def run(self, code, *, fresh=False, imports=(), **environment):
        """Run Python there; what it printed, read as JSON. ``imports`` as of `run_python`."""
        env = {k: v for k, v in os.environ.items() if not k.startswith("ANYDEVICE_")}
        env |= environment
        words = [*self.FLAGS, "-c", textwrap.dedent(code)]
        if fresh:
            done = subprocess.run(
                [self.python, *words], capture_output=True, text=True, env=env, check=False
            )
        else:
            done = run_python(*words, env={**env, "PYTHONPATH": self.purelib}, imports=imports)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    def backends(self, fresh=False, **environment):
        """Every plugin there: status and reason by package and device type."""
        records = self.run(
            """
            import json
            from anydevice.registry import list_backends
            print(json.dumps([[r.device_type, r.package, r.status, r.reason, r.count()]
                              for r in list_backends()]))
            """,
            fresh=fresh,
            **environment,
        )
        return {(kind, package): tuple(rest) for kind, package, *rest in records}


@pytest.fixture(scope="session")
def wheel_of(tmp_path_factory):
    """Build a package's wheel, once, from a copy: a build leaves its traces in the folder."""

    @functools.cache
    def build(folder):
        copy = tmp_path_factory.mktemp("package") / folder.name
        copy.mkdir()
        for file in folder.iterdir():
            if file.is_file():
                (copy / file.name).write_bytes(file.read_bytes())
        pip("wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w", copy / "dist", copy)
        (wheel,) = (copy / "dist").iterdir()
        return wheel

    return build


@pytest.fixture
def environment(tmp_path):
    return Environment(tmp_path / "environment")


@pytest.fixture(scope="session")
def vulkan_environment(tmp_path_factory, wheel_of):
    """One with the Vulkan example installed."""
    environment = Environment(tmp_path_factory.mktemp("vulkan") / "environment")
    environment.install(wheel_of(EXAMPLES / "anydevice-vulkan"))
    return environment
