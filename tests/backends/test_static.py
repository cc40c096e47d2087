"""Backends against the vendors' published APIs, and the checker against wrong backends."""

import json
import subprocess
import sys
import textwrap
import zipfile

import pytest

from anydevice.errors import BackendError
from anydevice_conformance import static
from anydevice_conformance.static import extract
from anydevice_conformance.static.surface import parse_signature


@pytest.mark.parametrize("device_type", ["cuda", "mps", "xpu", "npu", "mlu"])
def test_every_call_of_a_backend_is_in_its_vendors_api(device_type):
    assert [str(finding) for finding in static.check(device_type)] == []
    calls = {call.name for call in static.calls_of(device_type) if call.owner == "module"}
    assert {"device_count", "empty_cache"} <= calls
    if device_type != "mps":
        assert {"Stream", "Stream.record_event", "Stream.wait_event", "set_stream"} <= calls
        assert {"mem_get_info", "memory_reserved", "get_rng_state", "manual_seed_all"} <= calls


def test_there_is_data_for_each_vendor_and_it_says_where_it_is_from():
    assert static.published() == ["cuda", "mlu", "mps", "npu", "xpu"]
    for device_type in static.published():
        surface = static.load_surface(device_type)
        assert surface.device_type == device_type
        assert surface.version
        assert surface.source
        for signature in surface.names.values():
            assert signature is None or parse_signature(signature) is not None


def test_the_vendors_packages_are_not_imported():
    code = (
        "from anydevice_conformance import static\n"
        "import sys\n"
        "assert [f for t in static.published() for f in static.check(t)] == []\n"
        "print([m for m in sys.modules if m.split('.')[0] in "
        "('torch_npu', 'torch_mlu', 'anydevice_backends') and m.count('.')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ---------------------------------------------------------------------- wrong backends are caught

BACKEND = """
    import torch
    from anydevice.backend import Capabilities, DeviceBackend

    class Backend(DeviceBackend):
        device_type = "npu"
        capabilities = Capabilities({claims})

        def wrong(self, index, *rest):
            {statement}
"""


def findings(tmp_path, statement, claims="", surface=None):
    source = tmp_path / "backend.py"
    source.write_text(textwrap.dedent(BACKEND).format(statement=statement, claims=claims))
    return static.check("npu", source=source, surface=surface)


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        ("self.module.get_memory(index)", "there is no torch_npu.npu.get_memory"),
        ("self.module.current_device(index)", "too many positional arguments"),
        ("self.module.get_device_name(device=index)", "unexpected keyword argument 'device'"),
        ("self.module.manual_seed_all()", "missing a required argument: 'seed'"),
        ("torch.npu.mem_get_infos(index)", "there is mem_get_info"),
        ("getattr(self.module, 'empty_cash')()", "there is no torch_npu.npu.empty_cash"),
        ("name = getattr(self.module, 'empty_cache', None); name(index)", "too many positional"),
        ("module = self.module; module.empty_cache(index)", "too many positional"),
        (
            "self._anydevice_query('memory_used', 'used_memory', index)",
            "there is no torch_npu.npu.memory_",
        ),
        ("self._anydevice_function('synchronise')(index)", "there is no torch_npu.npu.synchronise"),
        ("stream = self.module.Stream(index, 0, 1)", "too many positional"),
        ("stream = self.module.Stream(); stream.record_event(1, 2)", "too many positional"),
        ("torch.accelerator.memory_free(index)", "has no torch.accelerator.memory_free"),
        ("torch.accelerator.synchronize(device=index)", "positional"),
        ("[self.module.set_device() for _ in rest]", "missing a required argument: 'device'"),
        ("return lambda: self.module.set_device()", "missing a required argument: 'device'"),
    ],
)
def test_a_wrong_call_is_caught(tmp_path, statement, problem):
    found = findings(tmp_path, statement)
    assert len(found) == 1, [str(f) for f in found]
    assert problem in str(found[0])
    assert f"{tmp_path / 'backend.py'}:10" in str(found[0])


@pytest.mark.parametrize(
    "statement",
    [
        "self.module.mem_get_info(index)",
        "self.module.mem_get_info(device=index)",
        "self.module.mem_get_info(*rest)",
        "self.module.Stream(device=index, priority=-1, anything=1)",
        "getattr(self.module, 'not_in_old_versions', None)(index)",
        "self._anydevice_query('not_there', 'get_memory_info', index)",
        "self.other(index).get_memory(index)",
        "torch.empty(1)",
    ],
)
def test_a_right_call_is_not(tmp_path, statement):
    assert findings(tmp_path, statement) == []


def without(name):
    surface = static.load_surface("npu")
    names = {n: s for n, s in surface.names.items() if n.partition(".")[0] != name}
    return static.Surface(**{**vars(surface), "names": names})


def test_what_is_inherited_is_checked_when_its_capability_is_claimed(tmp_path):
    surface = without("manual_seed_all")
    assert findings(tmp_path, "pass", "", surface) == []
    (found,) = findings(tmp_path, "pass", "device_rng=True", surface)
    assert "manual_seed_all" in str(found)
    assert found.call.file.endswith("backend.py")
    assert findings(tmp_path, "pass", "device_rng=False", surface) == []


def test_what_is_overridden_is_not_checked(tmp_path):
    overridden = (
        "pass\n    def device_count(self): return 1\n    def why_unavailable(self): return ''"
    )
    surface = without("device_count")
    assert "device_count" in str(findings(tmp_path, "pass", "", surface)[0])
    assert findings(tmp_path, overridden, "", surface) == []


def test_a_base_class_in_the_same_file_counts(tmp_path):
    source = tmp_path / "backend.py"
    source.write_text(
        "from anydevice.backend import DeviceBackend\n"
        "class Base(DeviceBackend):\n"
        "    def empty_cache(self, index):\n"
        "        self.module.empty_cache(index)\n"
        "class Backend(Base):\n"
        "    device_type = 'npu'\n"
    )
    (found,) = static.check("npu", source=source)
    assert found.call.line == 4


def test_no_such_backend_and_no_such_api_are_said_so(tmp_path):
    with pytest.raises(BackendError, match=r"no published API.*'sim'.*extract"):
        static.check("sim")
    with pytest.raises(BackendError, match="no installed plugin"):
        static.calls_of("nope")
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(LookupError, match=r"empty\.py has no class"):
        static.calls_of("npu", tmp_path / "empty.py")


# ---------------------------------------------------------------------- making the data

VENDOR = {
    "torch_foo/__init__.py": "raise ImportError('no driver')",
    "torch_foo/foo/__init__.py": """
        import os
        from typing import Any
        from .memory import *
        from .streams import Stream as Queue
        from . import later
        from torch_foo.other import outside
        _private = 1
        version = "1"

        @cache
        def device_count() -> int: ...

        if os.name == "posix":
            def only_there(device: Any = None, /, *args: int, priority: int = 0, **more): ...
        else:
            def only_there(): ...

        try:
            from .fast import quick
        except ImportError:
            def quick(x, y=(1, 2)): ...
        same = device_count
    """,
    "torch_foo/foo/memory.py": """
        from . import device_count  # while that module is being read
        def memory_allocated(device=None) -> int: ...
        def _hidden(): ...
    """,
    "torch_foo/foo/streams.py": """
        class _Base:
            def wait(self, event): ...
        class Stream(_Base):
            def __new__(cls, device=None, priority=0): ...
            def record(self, event: "Event" = None): ...
            @staticmethod
            def make(index): ...
            def _private(self): ...
    """,
    "torch_foo/other.py": "def outside(): ...",
}
NAMES = {
    "Queue": "(device=None, priority=0)",
    "Queue.make": "(index)",
    "Queue.record": "(event=None)",
    "Queue.wait": "(event)",
    "device_count": "()",
    "memory_allocated": "(device=None)",
    "only_there": "(device=None, /, *args, priority=0, **more)",
    "quick": "(x, y=(1, 2))",
    "same": "()",
    "version": None,
}


@pytest.fixture
def wheel(tmp_path):
    file = tmp_path / "torch_foo-1.5-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        for name, text in VENDOR.items():
            archive.writestr(name, textwrap.dedent(text))
    return file


def test_a_wheel_is_read_without_being_imported(tmp_path, wheel, capsys):
    output = tmp_path / "foo.json"
    extract.main(
        ["torch_foo.foo", "--device-type", "foo", "--wheel", str(wheel), "-o", str(output)]
    )
    assert "10 names" in capsys.readouterr().out
    data = json.loads(output.read_text())
    assert data["names"] == NAMES
    assert (data["module"], data["version"]) == ("torch_foo.foo", "1.5")
    assert static.Surface.load(output).names == NAMES


def test_a_wheel_without_the_module_is_said_so(tmp_path, wheel):
    with pytest.raises(SystemExit, match="no public name"):
        extract.main(["torch_foo.bar", "--device-type", "foo", "--wheel", str(wheel), "-o", "x"])
    with pytest.raises(SystemExit, match="not installed"):
        extract.main(["torch.not_there", "--device-type", "foo", "-o", "x"])


def test_torchs_own_modules_as_installed_have_what_the_data_has():
    """The kept data is of one torch version; what the backends use is in the installed one, too."""
    for device_type in ("cuda", "xpu", "mps"):
        surface = extract.read_installed(f"torch.{device_type}", device_type)
        assert static.check(device_type, surface=surface) == []
        assert surface.names["device_count"] == "()"
