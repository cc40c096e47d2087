"""Discovery, on plugins written into a folder as pip would leave them."""

import os
import sys
import textwrap
import threading
import types
import warnings

import pytest
import torch
from warm import run_python

import anydevice
from anydevice import registry
from anydevice.backend import DeviceBackend
from anydevice.devices import parse_device
from anydevice.errors import BackendError, DuplicateBackendError, UnknownDeviceError
from anydevice_conformance.simulator.backend import SimulatorBackend

GOOD = """
    from anydevice.backend import DeviceBackend, hookimpl

    class Backend(DeviceBackend):
        device_type = "{kind}"

        def device_count(self):
            return 2

    @hookimpl
    def anydevice_backends():
        return [Backend()]
"""


#: Before a plugin's source: leaves a mark each time that the plugin is imported.
COUNTED = """
import pathlib
with (pathlib.Path(__file__).parent / "count").open("a") as file:
    file.write("x")
"""


class Plugins:
    """A folder on ``sys.path`` into which packages are put and from which they are taken."""

    def __init__(self, folder):
        self.folder = folder
        self.modules = []

    def add(self, distribution, source, *, point="maia", module=None, version="1.0", **names):
        """Install a package of one module, as pip would leave it."""
        module = module or f"plugin_{distribution.replace('-', '_')}"
        (self.folder / f"{module}.py").write_text(textwrap.dedent(source).format(**names))
        info = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        info.joinpath("METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        )
        info.joinpath("entry_points.txt").write_text(f"[anydevice.backends]\n{point} = {module}\n")
        self.modules.append(module)
        registry._registry.reset()
        return module


@pytest.fixture
def plugins(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("ANYDEVICE_BACKENDS", raising=False)
    # Other tests of this process may have installed it; here only the plugins have devices.
    monkeypatch.setattr(SimulatorBackend, "is_available", lambda backend: False)
    added = Plugins(tmp_path)
    yield added
    for module in added.modules:
        sys.modules.pop(module, None)
    monkeypatch.undo()
    registry._registry.reset()


def record_of(kind, distribution=None):
    found = [
        r
        for r in registry.list_backends()
        if r.device_type == kind and distribution in (None, r.distribution)
    ]
    assert len(found) == 1, found
    return found[0]


def run(code, *, path=None, **environment):
    """Run Python in a process of its own; its last line of output."""
    env = {**os.environ, **environment}
    env.pop("ANYDEVICE_SIMULATOR", None)
    if path is not None:
        env["PYTHONPATH"] = str(path)
    return run_python(
        "-W", "error", "-c", textwrap.dedent(code), env=env, check=True
    ).stdout.strip()


# ---------------------------------------------------------------------- what comes along


def test_the_six_and_the_simulator_are_found_by_entry_point():
    found = {r.device_type: r.distribution for r in registry.list_backends()}
    for kind in ("cpu", "cuda", "mps", "xpu", "npu", "mlu", "sim"):
        assert found[kind] == "anydevice"


def test_a_backend_without_its_device_says_why():
    assert record_of("npu").reason == "torch_npu is not installed"
    assert record_of("npu").status == "unavailable"
    assert record_of("mps").reason == "no device or driver found"


def test_the_host_is_always_there_and_last():
    devices = anydevice.available_devices()
    assert devices[-1] == torch.device("cpu")
    assert registry.get_backend("cpu").priority == 0


def test_importing_anydevice_reads_no_entry_point(plugins):
    plugins.add("anydevice-foo", "raise SystemExit('imported')")
    assert run("import anydevice; print('fine')", path=plugins.folder) == "fine"


# ---------------------------------------------------------------------- a plugin


def test_a_plugin_is_found_and_named(plugins):
    plugins.add("anydevice-foo", GOOD, kind="maia", version="1.2")
    record = record_of("maia")
    assert (record.status, record.package, record.count()) == ("available", "anydevice-foo 1.2", 2)
    assert isinstance(registry.get_backend("maia:1"), DeviceBackend)
    assert registry.primary_type() == "maia"


def test_the_order_is_availability_then_priority_then_name(plugins):
    source = GOOD + "\n    Backend.priority = {priority}\n"
    plugins.add("p-low", source, point="low", kind="ve", priority=50)
    plugins.add("p-high", source, point="high", kind="ipu", priority=200)
    plugins.add("p-also", source, point="also", kind="fpga", priority=200)
    kinds = [r.device_type for r in registry.list_backends()]
    assert kinds[:4] == ["fpga", "ipu", "ve", "cpu"]


def test_asking_twice_imports_once(plugins):
    count = plugins.folder / "count"
    plugins.add(
        "anydevice-foo",
        COUNTED + textwrap.dedent(GOOD),
        kind="maia",
    )
    for _ in range(3):
        registry.list_backends()
        registry.get_backend("maia")
    assert count.read_text() == "x"


def test_sixteen_threads_at_once_import_once_and_agree(plugins):
    count = plugins.folder / "count"
    plugins.add(
        "anydevice-foo",
        COUNTED + textwrap.dedent(GOOD),
        kind="maia",
    )
    barrier, answers = threading.Barrier(16), []

    def ask():
        barrier.wait()
        answers.append(registry.get_backend("maia"))

    threads = [threading.Thread(target=ask) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert count.read_text() == "x"
    assert len(answers) == 16
    assert len({id(answer) for answer in answers}) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_child_forked_while_another_thread_discovers_is_not_stuck():
    code = """
        import os, threading
        from anydevice import registry

        held, done = threading.Event(), threading.Event()

        def hold():
            with registry._registry._lock:
                held.set()
                done.wait()

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        import warnings
        warnings.simplefilter("ignore")  # newer Pythons warn of forking beside threads
        child = os.fork()
        if child == 0:
            os._exit(0 if registry.get_backend("cpu").device_count() == 1 else 1)
        print(os.waitpid(child, 0)[1])
        done.set()
        thread.join()
    """
    assert run(code) == "0"


# ---------------------------------------------------------------------- broken plugins


def assert_broken_alone(distribution, words):
    record = next(r for r in registry.list_backends() if r.distribution == distribution)
    assert record.status == "broken"
    assert words in record.reason
    assert record.package.startswith(distribution)
    assert registry.get_backend("cpu").device_count() == 1
    assert registry.get_backend("ve").device_count() == 2


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import no_such_driver_library", "No module named 'no_such_driver_library'"),
        ("def broken(:", "SyntaxError"),
        ("raise SystemExit(3)", "SystemExit"),
        ("x = 1", "no @hookimpl function named anydevice_backends"),
        ("{hook}    return None", "returned NoneType"),
        ("{hook}    return 'foo'", "returned str"),
        ("{hook}    return DeviceBackend()", "not a list of DeviceBackend"),
        ("{hook}    return [object()]", "is not an instance of"),
        ("{hook}    return [DeviceBackend]", "is not an instance of"),
        ("{hook}    return [DeviceBackend()]", "device_type is None"),
        ("{hook}    return [type('B', (DeviceBackend,), dict(device_type='foo:0'))()]", "'foo:0'"),
        ("{hook}    return [type('B', (DeviceBackend,), dict(device_type='disk'))()]", "'disk'"),
        (
            "{hook}    return [type('B', (DeviceBackend,), dict(device_type='a', priority='9'))()]",
            "priority",
        ),
        (
            "{hook}    return [type('B', (DeviceBackend,), dict(device_type='foo', "
            "capabilities=dict(streams=True)))()]",
            "capabilities",
        ),
        ("{hook}    return 1 / 0", "ZeroDivisionError"),
        (
            "{hook}    return [type('B', (DeviceBackend,), dict(device_type='a', "
            "torch_package=5))()]",
            "torch_package of 'a' is 5",
        ),
        (
            "{hook}    return [type('B', (DeviceBackend,), dict(device_type='a', "
            "out_of_memory_words='oom'))()]",
            "out_of_memory_words of 'a' is 'oom', not a tuple",
        ),
        (
            "import anydevice.backend as b\n@b.hookimpl\ndef anydevice_backends(extra): pass",
            "extra",
        ),
    ],
)
def test_a_broken_plugin_is_listed_with_its_error_and_breaks_no_other(plugins, source, words):
    hook = (
        "from anydevice.backend import DeviceBackend, hookimpl\n"
        "@hookimpl\ndef anydevice_backends():\n"
    )
    plugins.add("anydevice-bad", source, point="bad", hook=hook)
    plugins.add("anydevice-ok", GOOD, point="ok", kind="ve")
    assert_broken_alone("anydevice-bad", words)
    with pytest.raises(BackendError, match="anydevice-bad"):
        registry.get_backend("bad")


def test_an_entry_point_without_its_module_is_broken(plugins):
    module = plugins.add("anydevice-bad", "", point="bad")
    (plugins.folder / f"{module}.py").unlink()
    plugins.add("anydevice-ok", GOOD, point="ok", kind="ve")
    assert_broken_alone("anydevice-bad", module)


def test_a_type_that_torch_does_not_know_has_no_devices(plugins):
    plugins.add("anydevice-bad", GOOD, point="bad", kind="nobody")
    plugins.add("anydevice-ok", GOOD, point="ok", kind="ve")
    assert record_of("nobody").status == "unavailable"
    assert "nobody" in record_of("nobody").reason
    assert [str(d) for d in anydevice.available_devices()] == ["ve:0", "ve:1", "cpu"]


@pytest.mark.parametrize("count", ["1 / 0", "-1", "'2'", "None", "2.0"])
def test_a_backend_that_counts_nonsense_has_no_devices(plugins, count):
    plugins.add("anydevice-foo", GOOD.replace("return 2", f"return {count}"), kind="maia")
    record = record_of("maia")
    assert record.status == "unavailable"
    assert record.reason
    assert torch.device("cpu") in anydevice.available_devices()


#: A backend whose vendor's package counts the devices, and is not installed yet.
VENDORS = """
    from anydevice.backend import DeviceBackend, hookimpl

    class Backend(DeviceBackend):
        device_type = "maia"
        torch_package = "{package}"

        def is_available(self):
            with open(__file__ + ".asked", "a") as file:
                file.write("x")
            return super().is_available()

        def device_count(self):
            try:
                return self.module and 1
            except ImportError:
                return 0

    @hookimpl
    def anydevice_backends():
        return [Backend()]
"""


@pytest.fixture
def vendors(plugins, monkeypatch):
    """The plugin's module and its vendor's, the latter not installed."""
    monkeypatch.setattr(torch, "maia", object(), raising=False)
    module = plugins.add("anydevice-foo", VENDORS, package="torch_maia_here")
    plugins.modules.append("torch_maia_here")
    return plugins.folder / f"{module}.py.asked", plugins.folder / "torch_maia_here.py"


def test_a_package_that_is_not_installed_is_looked_for_once(vendors):
    asked, _ = vendors
    for _ in range(3):
        assert anydevice.available_devices() == [torch.device("cpu")]
        assert record_of("maia").reason == "torch_maia_here is not installed"
    assert asked.read_text() == "x"


def test_a_package_installed_later_is_found_after_a_refresh(vendors):
    _, package = vendors
    assert record_of("maia").status == "unavailable"
    package.write_text("")
    registry.refresh()
    assert torch.device("maia", 0) in anydevice.available_devices()


def test_a_package_imported_later_is_found_without(vendors, monkeypatch):
    assert record_of("maia").status == "unavailable"
    monkeypatch.setitem(sys.modules, "torch_maia_here", types.ModuleType("torch_maia_here"))
    assert record_of("maia").status == "available"


def test_each_backend_is_asked_once_for_the_devices(vendors):
    asked, package = vendors
    package.write_text("")
    anydevice.available_devices()
    assert asked.read_text() == "x"


def test_a_plugin_may_offer_nothing(plugins):
    plugins.add("anydevice-foo", GOOD.replace("[Backend()]", "[]"), kind="maia")
    assert record_of("maia").status == "unavailable"
    assert "no backend" in record_of("maia").reason


# ---------------------------------------------------------------------- two for one type


def test_two_packages_for_one_type_are_both_named(plugins):
    plugins.add("anydevice-foo", GOOD, kind="maia")
    plugins.add("other-foo", GOOD, kind="maia", version="2.0")
    with pytest.raises(DuplicateBackendError) as caught:
        registry.get_backend("maia")
    text = str(caught.value)
    assert "anydevice-foo 1.0" in text
    assert "other-foo 2.0" in text
    assert "ANYDEVICE_BACKENDS=maia@" in text
    assert {r.status for r in registry.list_backends() if r.device_type == "maia"} == {"duplicate"}
    assert [d.type for d in anydevice.available_devices()] == ["cpu"]


@pytest.mark.parametrize("pick", ["other-foo", "Other_Foo"])
def test_the_user_picks_one_of_two(plugins, monkeypatch, pick):
    plugins.add("anydevice-foo", GOOD, kind="maia")
    plugins.add("other-foo", GOOD, kind="maia")
    monkeypatch.setenv("ANYDEVICE_BACKENDS", f"maia@{pick}")
    assert type(registry.get_backend("maia")).__module__ == "plugin_other_foo"
    assert record_of("maia", "anydevice-foo").status == "excluded"
    assert record_of("cpu").status == "available"


def test_a_pick_that_is_not_there_picks_none(plugins, monkeypatch):
    plugins.add("anydevice-foo", GOOD, kind="maia")
    plugins.add("other-foo", GOOD, kind="maia")
    monkeypatch.setenv("ANYDEVICE_BACKENDS", "maia@third")
    with pytest.raises(DuplicateBackendError):
        registry.get_backend("maia")


# ---------------------------------------------------------------------- allow and deny


def test_a_denied_plugin_is_not_even_imported(plugins, monkeypatch):
    module = plugins.add("anydevice-foo", GOOD, kind="maia")
    monkeypatch.setenv("ANYDEVICE_BACKENDS", "-maia")
    assert record_of("maia").status == "excluded"
    assert "ANYDEVICE_BACKENDS=-maia" in record_of("maia").reason
    assert module not in sys.modules
    with pytest.raises(BackendError, match="excluded"):
        registry.get_backend("maia")


def test_only_what_is_allowed_is_used_and_the_host(plugins, monkeypatch):
    plugins.add("anydevice-foo", GOOD, kind="maia")
    plugins.add("anydevice-bar", GOOD, point="fpga", kind="fpga")
    monkeypatch.setenv("ANYDEVICE_BACKENDS", " fpga , ")
    assert [str(d) for d in anydevice.available_devices()] == ["fpga:0", "fpga:1", "cpu"]
    assert record_of("maia").status == "excluded"


def test_the_host_cannot_be_left_out(plugins, monkeypatch):
    monkeypatch.setenv("ANYDEVICE_BACKENDS", "-cpu,maia")
    assert anydevice.available_devices() == [torch.device("cpu")]


# ---------------------------------------------------------------------- unclaimed types


def test_a_torch_that_raises_where_it_has_no_accelerator(monkeypatch):
    """As torch 2.6 does; later ones return None."""

    def refuse():
        raise RuntimeError("Cannot access accelerator device when none is available.")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", refuse)
    assert anydevice.available_devices()[-1] == torch.device("cpu")
    with pytest.raises(UnknownDeviceError):
        registry.get_backend("nope")
    with pytest.raises(UnknownDeviceError):
        parse_device("nope")


UNCLAIMED = """
    import types, warnings
    import torch
    torch.utils.rename_privateuse1_backend("bare")
    module = types.SimpleNamespace(is_available=lambda: {available}, device_count=lambda: 1)
    torch._register_device_module("bare", module)
    from anydevice import registry, available_devices
    from anydevice.devices import parse_device
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            found = [str(d) for d in available_devices()]
            registry.list_backends()
    print(found, [str(w.message) for w in caught], str(parse_device("bare")))
"""


def test_a_type_that_torch_reports_and_no_plugin_claims_gets_the_default_with_one_warning():
    assert run(UNCLAIMED.format(available=True)) == (
        "['bare:0', 'cpu'] [\"no plugin claims device type 'bare'; using the default backend, "
        'uncertified"] bare:0'
    )


def test_a_type_that_torch_names_without_a_device_gets_none():
    assert run(UNCLAIMED.format(available=False)) == "['cpu'] [] bare:0"


def test_a_denied_unclaimed_type_stays_out():
    code = UNCLAIMED.format(available=True)
    assert run(code, ANYDEVICE_BACKENDS="-bare") == "['cpu'] [] bare:0"


def test_an_unknown_type_lists_the_known():
    with pytest.raises(UnknownDeviceError, match=r"'nope'.*cpu, cuda"):
        registry.get_backend("nope:0")


def test_a_warning_of_a_plugin_reaches_the_user(plugins):
    plugins.add(
        "anydevice-foo",
        "import warnings\nwarnings.warn('beta')\n" + textwrap.dedent(GOOD),
        kind="maia",
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert record_of("maia").status == "available"
    assert [str(w.message) for w in caught] == ["beta"]


# ---------------------------------------------------------------------- vendors' mistakes


def test_the_vendors_package_is_imported_before_any_question(plugins):
    """Also where the backend counts by itself, as a driver's library would."""
    source = GOOD + '\n    Backend.torch_package = "torch_first"\n'
    package = plugins.folder / "torch_first.py"
    package.write_text("import sys; sys.first = True")
    plugins.modules.append("torch_first")
    plugins.add("anydevice-foo", source, kind="maia")
    for question in (lambda: registry.get_backend("maia"), anydevice.available_devices):
        sys.modules.pop("torch_first", None)
        registry._registry.reset()
        question()
        assert "torch_first" in sys.modules


def test_a_vendors_package_that_fails_is_named_and_breaks_nothing(plugins):
    (plugins.folder / "torch_bad_driver.py").write_text("raise OSError('libfoo.so: not found')")
    plugins.add(
        "anydevice-foo", GOOD + '\n    Backend.torch_package = "torch_bad_driver"\n', kind="maia"
    )
    reason = "importing torch_bad_driver failed: OSError: libfoo.so: not found"
    assert record_of("maia").reason == reason
    assert registry.get_backend("maia") is not None
    assert anydevice.available_devices() == [torch.device("cpu")]


@pytest.mark.parametrize("kind", ["cpu", "cuda", "npu"])
def test_a_package_that_claims_a_built_in_type_leaves_the_built_in_one(plugins, monkeypatch, kind):
    plugins.add("anydevice-rival", GOOD, point="rival", kind=kind)
    assert type(registry.get_backend(kind)).__module__ == f"anydevice_backends.{kind}"
    rival = record_of(kind, "anydevice-rival")
    assert (rival.status, rival.backend) == ("duplicate", None)
    assert f"ANYDEVICE_BACKENDS={kind}@anydevice-rival" in rival.reason
    monkeypatch.setenv("ANYDEVICE_BACKENDS", f"{kind}@anydevice-rival")
    registry.refresh()
    assert type(registry.get_backend(kind)).__module__ == "plugin_anydevice_rival"
    assert record_of(kind, "anydevice").status == "excluded"


@pytest.mark.parametrize("count", ["-1", "'2'", "None", "2.0", "True"])
def test_a_count_that_is_none_is_named_with_what_was_returned(plugins, count):
    plugins.add("anydevice-foo", GOOD.replace("return 2", f"return {count}"), kind="maia")
    assert f"device_count() of Backend returned {count}, not a number" in record_of("maia").reason


def test_an_answer_that_is_no_truth_is_named(plugins):
    plugins.add(
        "anydevice-foo", GOOD + "\n    Backend.is_available = lambda s: 'no'\n", kind="maia"
    )
    assert "is_available() of Backend returned 'no', not a bool" in record_of("maia").reason


@pytest.mark.parametrize(
    ("answer", "good"),
    [
        ("(1, 2)", False),
        ("MemoryInfo('1', 2)", False),
        ("MemoryInfo(-1, 2)", False),
        ("MemoryInfo(float('nan'), 2)", False),
        ("None", False),
        ("MemoryInfo(1.0, 2)", True),
    ],
)
def test_memory_that_is_no_memory_info_is_named(plugins, answer, good):
    source = GOOD + (
        "\n    from anydevice.backend import MemoryInfo"
        f"\n    Backend.memory_info = lambda self, index: {answer}\n"
    )
    plugins.add("anydevice-foo", source, kind="maia")
    if good:
        assert registry.measure_memory("maia:1").free == 1
        return
    with pytest.raises(BackendError, match=r"anydevice-foo 1\.0") as caught:
        registry.measure_memory(torch.device("maia", 1))
    assert "memory_info(1) of Backend returned" in str(caught.value)
    assert any("memory_info(1) of Backend" in note for note in record_of("maia").notes)


@pytest.fixture
def clock(monkeypatch):
    """Time that a plugin passes by ``sys.now += seconds``."""
    monkeypatch.setattr(sys, "now", 0.0, raising=False)
    monkeypatch.setattr("anydevice.registry.records._clock", lambda: sys.now)


def test_a_plugin_slow_to_import_is_named(plugins, clock):
    plugins.add("anydevice-foo", "import sys; sys.now += 3\n" + textwrap.dedent(GOOD), kind="maia")
    with pytest.warns(
        UserWarning, match="anydevice-foo 1.0.* is slow: importing the plugin .*3.0 s"
    ):
        anydevice.available_devices()
    assert record_of("maia").notes == ["importing the plugin took 3.0 s"]


def test_a_backend_slow_to_count_is_asked_once_and_named(plugins, clock):
    source = GOOD.replace("return 2", "import sys; sys.now += 2.5; return int(sys.now)")
    plugins.add("anydevice-foo", source, kind="maia")
    with pytest.warns(UserWarning, match="counting its devices took 2.5 s"):
        record_of("maia")
    for _ in range(3):
        assert len(anydevice.available_devices()) == 3
    assert sys.now == 2.5


@pytest.mark.parametrize(
    ("stated", "status", "words"),
    [
        ("None", "available", ""),
        ("'1.0'", "available", ""),
        ("'1.99'", "available", "written for version 1.99"),
        ("'0.9'", "broken", "update the backend's package"),
        ("'2.0'", "broken", "update anydevice"),
        ("'new'", "broken", "interface_version is 'new'"),
        ("1.0", "broken", "interface_version is 1.0"),
    ],
)
def test_the_interface_version_that_a_backend_was_written_for(plugins, stated, status, words):
    plugins.add(
        "anydevice-foo", GOOD + f"\n    Backend.interface_version = {stated}\n", kind="maia"
    )
    record = record_of("maia")
    assert record.status == status
    assert words in " ".join([record.reason, *record.notes])
    assert bool(words) == bool(record.reason or record.notes)


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("ANYDEVICE_BACKENDS", "cdua", "did you mean 'cuda'"),
        ("ANYDEVICE_BACKENDS", "-nqu", "did you mean 'npu'"),
        ("ANYDEVICE_BACKENDS", "cuda@anydevise", "did you mean 'anydevice'"),
        ("ANYDEVICE_BACKEND", "cpu", "did you mean ANYDEVICE_BACKENDS"),
    ],
)
def test_a_misspelled_choice_is_warned_of(plugins, monkeypatch, variable, value, words):
    monkeypatch.setenv(variable, value)
    registry.refresh()
    with pytest.warns(UserWarning, match=words):
        anydevice.available_devices()


def test_an_impossible_simulated_machine_is_warned_of():
    code = """
        import warnings
        import anydevice
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = anydevice.available_devices()
        (record,) = [r for r in anydevice.list_backends() if r.device_type == "sim"]
        print(found, str(caught[0].message) == "ANYDEVICE_SIMULATOR is set, but " + record.reason)
        print(record.reason)
    """
    path = {**os.environ, "ANYDEVICE_SIMULATOR": "devices=99"}
    done = run_python("-c", textwrap.dedent(code), env=path, check=True)
    assert done.stdout.splitlines() == [
        "[device(type='cpu')] True",
        "ANYDEVICE_SIMULATOR=devices=99: devices=99: there can be 1 to 16",
    ]


def test_a_dispatch_to_a_device_of_wrong_memory_names_the_member(sim, monkeypatch):
    monkeypatch.setattr(SimulatorBackend, "memory_info", lambda self, index: (1, 2))
    model = torch.nn.Linear(2, 2)
    with pytest.raises(BackendError, match=r"memory_info\(1\) of SimulatorBackend returned"):
        anydevice.dispatch_model(model, {"": "sim:1"})
