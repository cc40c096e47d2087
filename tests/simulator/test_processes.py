"""Installing, building, forking: what needs a process of its own."""

import os
import sys
import textwrap
import threading

import pytest
import torch
from warm import run_python

from anydevice_conformance import simulator as package
from anydevice_conformance.simulator import build


def run(code, **environment):
    """Run code in a fresh process; return what it prints."""
    path = os.pathsep.join(filter(None, sys.path))
    result = run_python(
        *("-W", "error", "-c", textwrap.dedent(code)),
        env={**os.environ, "PYTHONPATH": path, **environment},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


def test_importing_it_starts_nothing():
    assert run(
        """
        import sys, torch
        from anydevice_conformance import simulator
        from anydevice_conformance.simulator.backend import SimulatorBackend
        backend = SimulatorBackend()
        print(simulator.is_installed(), backend.is_available(), backend.device_count())
        print("torch.utils.cpp_extension" in sys.modules, hasattr(torch, "sim"))
        """,
        ANYDEVICE_SIMULATOR="",
    ) == ["False", "False", "0", "False", "False"]


def test_it_plays_a_vendors_name(simulator):
    assert run(
        """
        import torch
        from anydevice_conformance import simulator
        from anydevice_conformance.simulator.backend import SimulatorBackend
        simulator.install("npu")
        simulator.configure(devices=4)
        x = torch.ones(2, device="npu:3")
        print(x.is_npu, torch.npu.device_count(), torch.npu.Stream(1).device, x.device)
        print(torch.accelerator.current_accelerator(), simulator.installed_name())
        backend = SimulatorBackend()
        print(backend.is_available(), backend.device_count())
        try:
            simulator.install("sim")
        except simulator.SimulatorUnavailableError as error:
            print("plays 'npu'" in str(error))
        """
    ) == ["True", "4", "npu:1", "npu:3", "npu", "npu", "False", "0", "True"]


def test_the_environment_asks_for_a_machine(simulator):
    assert run(
        """
        import torch
        from anydevice_conformance.simulator.backend import SimulatorBackend
        backend = SimulatorBackend()
        print(backend.device_count(), backend.memory_info(2).total)
        """,
        ANYDEVICE_SIMULATOR="devices=3,memory=1MiB:2MiB:3MiB",
    ) == ["3", str(3 << 20)]


def test_an_unreadable_environment_is_a_warning_and_no_device():
    assert run(
        """
        import warnings
        from anydevice_conformance.simulator.backend import SimulatorBackend
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            print(SimulatorBackend().is_available())
        print("ANYDEVICE_SIMULATOR=devices=x" in str(caught[0].message))
        """,
        ANYDEVICE_SIMULATOR="devices=x",
    ) == ["False", "True"]


def test_a_device_of_somebody_else_is_not_displaced():
    assert run(
        """
        import torch
        from anydevice_conformance import simulator
        torch.utils.rename_privateuse1_backend("other")
        try:
            simulator.install()
        except simulator.SimulatorUnavailableError as error:
            print("'other'" in str(error))
        """
    ) == ["True"]


def test_a_second_install_changes_nothing(simulator):
    simulator.configure(devices=3)
    simulator.install()
    assert torch.sim.device_count() == 3
    assert simulator.is_installed()
    assert simulator.installed_name() == "sim"
    with pytest.raises(simulator.SimulatorUnavailableError, match="Start another process"):
        simulator.install("npu")


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_goes_on(machine):
    a = torch.ones(4, device="sim:1")
    a.add_(1)
    child = os.fork()
    if child == 0:  # no pytest here: leave by _exit alone
        right = False
        try:
            right = (a + 1).tolist() == [3.0] * 4 and torch.ones(2).pin_memory().is_pinned()
        finally:
            os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert a.tolist() == [2.0] * 4


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_has_a_thread_pool_before_a_second_thread(machine, monkeypatch):
    calls = []
    monkeypatch.setattr(torch, "set_num_threads", calls.append)
    child = os.fork()
    if child == 0:
        os._exit(0 if calls == [torch.get_num_threads()] else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert calls == []


def test_threads_have_their_own_current_stream(machine):
    side, seen = torch.sim.Stream(0), []
    with side:
        worker = threading.Thread(target=lambda: seen.append(torch.sim.current_stream(0)))
        worker.start()
        worker.join()
        assert torch.sim.current_stream(0) == side
    assert seen == [torch.sim.default_stream(0)]


def test_threads_work_beside_each_other(simulator, mode):
    simulator.configure(mode=mode, kernel=0, copy_latency=0)
    sums = []

    def work(index):
        with torch.sim.Stream(index):
            for _ in range(40):
                pinned = torch.ones(64).pin_memory()
                pinned.seen_by_python = object()  # its death needs the GIL
                there = pinned.to(f"sim:{index}", non_blocking=True)
                del pinned
                torch.sim.get_rng_state(index)  # waits with the GIL held
                sums.append((there.to(f"sim:{1 - index}") + 1).sum().item())

    workers = [threading.Thread(target=work, args=(i % 2,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sums == [128.0] * 160


@pytest.fixture
def empty_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "anydevice" / "simulator"


def test_without_a_compiler_it_says_what_to_install(empty_cache_folder, monkeypatch):
    monkeypatch.setenv("PATH", str(empty_cache_folder))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(package.SimulatorUnavailableError, match=r"apt-get install g\+\+"):
        build.load_extension()


def test_a_compiler_that_fails_is_quoted_and_leaves_no_library(empty_cache_folder, monkeypatch):
    fake = empty_cache_folder.parent / "fake-compiler"
    fake.parent.mkdir(parents=True)
    fake.write_text("#!/bin/sh\n[ $1 = --version ] && exit 0\necho 'error: too old' >&2\nexit 3\n")
    fake.chmod(0o755)
    monkeypatch.setenv("CXX", str(fake))
    with pytest.raises(package.SimulatorUnavailableError, match=r"exit status 3.*\n?.*too old"):
        build.load_extension()
    assert not list(empty_cache_folder.glob("*/*.so"))


def test_it_is_built_once_and_a_killed_build_is_swept_away(empty_cache_folder, monkeypatch):
    built = []

    def compile_slowly(compiler, library):
        built.append(library)
        assert [p.name for p in library.parent.iterdir()] == []
        library.write_bytes(b"library")

    monkeypatch.setattr(build, "_compile", compile_slowly)
    compiler = build._compiler()
    key = build._key(compiler)
    remains = empty_cache_folder / f"{key}.unfinished-1"
    remains.mkdir(parents=True)
    (remains / "half.so").write_bytes(b"")
    workers = [threading.Thread(target=build._build_once, args=(compiler,)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(built) == 1
    assert build._build_once(compiler).read_bytes() == b"library"
    assert not remains.exists()


def test_the_key_names_torch_and_the_compiler(empty_cache_folder, monkeypatch):
    compiler = build._compiler()
    key = build._key(compiler)
    assert torch.__version__.replace("+", "_") in key
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    assert build._key(compiler) != key
    assert build._key("/bin/true") != build._key(compiler)


def test_an_old_torch_is_refused(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.8.0")
    with pytest.raises(package.SimulatorUnavailableError, match=r"needs torch 2\.11 or later"):
        build.load_extension()


MORE_DEVICES = """
import torch
from anydevice_conformance import simulator

def gradient(device):
    x = torch.ones(2, device=device, requires_grad=True)
    x.sum().backward()
    return x.grad.tolist()

simulator.configure(devices=1)
gradient("sim")
simulator.configure(devices=16)
print(gradient("sim:15"), torch.accelerator.device_count())
"""


def test_a_later_machine_may_have_more_devices():
    """Torch's autograd engine makes its queues once, at a process's first backward."""
    assert run_python("-c", MORE_DEVICES, check=True).stdout == "[1.0, 1.0] 16\n"
