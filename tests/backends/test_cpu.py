"""The host: memory within a container's limits, by trees of /proc and /sys as they are there."""

import psutil
import pytest
import torch

from anydevice.registry import get_backend
from anydevice_backends import cpu
from anydevice_backends._cgroups import Group, memory_groups

GIB = 1 << 30
NO_LIMIT_V1 = "9223372036854771712"


class Tree:
    """A root folder with what the kernel would show to this process."""

    def __init__(self, root):
        self.root = root
        self.write("proc/self/cgroup", "")
        self.write("proc/self/mountinfo", "22 1 8:1 / / rw - ext4 /dev/vda rw\n")

    def write(self, path, text):
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text if isinstance(text, str) else str(text))

    def mount_v2(self, *, mounted="/", at="sys/fs/cgroup"):
        line = f"31 22 0:26 {mounted} /{at} rw,nosuid shared:4 master:1 - cgroup2 cgroup2 rw\n"
        self.write("proc/self/mountinfo", (self.root / "proc/self/mountinfo").read_text() + line)

    def mount_v1(self, *, mounted="/", at="sys/fs/cgroup/memory"):
        text = (self.root / "proc/self/mountinfo").read_text()
        text += f"34 22 0:29 {mounted} /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
        text += f"35 22 0:32 {mounted} /{at} rw - cgroup cgroup rw,memory\n"
        self.write("proc/self/mountinfo", text)

    def v2(self, folder, current, *, limit="max", high="max", inactive=0, active=0):
        self.write(f"{folder}/memory.max", f"{limit}\n")
        self.write(f"{folder}/memory.high", f"{high}\n")
        self.write(f"{folder}/memory.current", f"{current}\n")
        stat = f"anon 5\nfile {inactive + active}\ninactive_file {inactive}\nactive_file {active}\n"
        self.write(f"{folder}/memory.stat", stat)

    def v1(self, folder, usage, *, limit=NO_LIMIT_V1, cache=0):
        self.write(f"{folder}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{folder}/memory.usage_in_bytes", f"{usage}\n")
        self.write(
            f"{folder}/memory.stat",
            f"inactive_file 7\ntotal_inactive_file {cache}\ntotal_active_file 0\n",
        )

    def groups(self):
        return memory_groups(self.root)


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)


# ---------------------------------------------------------------------- version 2


def test_v2_the_limit_and_what_is_used_without_the_page_cache(tree):
    tree.write("proc/self/cgroup", "0::/app\n")
    tree.mount_v2()
    tree.v2("sys/fs/cgroup/app", 3 * GIB, limit=4 * GIB, inactive=GIB, active=GIB // 2)
    assert tree.groups() == [Group(4 * GIB, 3 * GIB // 2)]


def test_v2_every_level_up_to_the_root_counts(tree):
    tree.write("proc/self/cgroup", "0::/system/app/worker\n")
    tree.mount_v2()
    tree.v2("sys/fs/cgroup/system/app/worker", 10)
    tree.v2("sys/fs/cgroup/system/app", GIB, limit=8 * GIB)
    tree.v2("sys/fs/cgroup/system", 2 * GIB, limit=3 * GIB)
    assert tree.groups() == [Group(8 * GIB, GIB), Group(3 * GIB, 2 * GIB)]


def test_v2_high_is_a_limit_too(tree):
    tree.write("proc/self/cgroup", "0::/app\n")
    tree.mount_v2()
    tree.v2("sys/fs/cgroup/app", GIB, limit=8 * GIB, high=2 * GIB)
    assert tree.groups() == [Group(2 * GIB, GIB)]


def test_v2_in_a_container_of_its_own_namespace(tree):
    tree.write("proc/self/cgroup", "0::/\n")
    tree.mount_v2()
    tree.v2("sys/fs/cgroup", GIB, limit=2 * GIB)
    assert tree.groups() == [Group(2 * GIB, GIB)]


@pytest.mark.parametrize("path", ["/../../other", "/docker/abc/nested"])
def test_v2_a_path_outside_what_is_mounted_means_the_mount(tree, path):
    tree.write("proc/self/cgroup", f"0::{path}\n")
    tree.mount_v2(mounted="/docker/xyz")
    tree.v2("sys/fs/cgroup", GIB, limit=2 * GIB)
    assert tree.groups() == [Group(2 * GIB, GIB)]


def test_v2_a_part_of_the_hierarchy_is_mounted(tree):
    tree.write("proc/self/cgroup", "0::/docker/abc/nested\n")
    tree.mount_v2(mounted="/docker/abc")
    tree.v2("sys/fs/cgroup/nested", 5, limit=GIB)
    tree.v2("sys/fs/cgroup", 6, limit=2 * GIB)
    assert tree.groups() == [Group(GIB, 5), Group(2 * GIB, 6)]


def test_v2_no_limit_is_no_group(tree):
    tree.write("proc/self/cgroup", "0::/app\n")
    tree.mount_v2()
    tree.v2("sys/fs/cgroup/app", GIB)
    assert tree.groups() == []


# ---------------------------------------------------------------------- version 1 and mixtures


def test_v1_the_limit_and_the_parents(tree):
    tree.write("proc/self/cgroup", "5:memory:/docker/abc\n4:cpu,cpuacct:/\n")
    tree.mount_v1()
    tree.v1("sys/fs/cgroup/memory/docker/abc", 3 * GIB, limit=4 * GIB, cache=GIB)
    tree.v1("sys/fs/cgroup/memory/docker", 3 * GIB)
    tree.v1("sys/fs/cgroup/memory", 9 * GIB)
    assert tree.groups() == [Group(4 * GIB, 2 * GIB)]


def test_v1_in_a_container_that_sees_its_own_group_as_the_root(tree):
    tree.write("proc/self/cgroup", "5:memory:/docker/abc\n")
    tree.mount_v1(mounted="/docker/abc")
    tree.v1("sys/fs/cgroup/memory", GIB, limit=2 * GIB)
    assert tree.groups() == [Group(2 * GIB, GIB)]


def test_v1_limits_beside_an_empty_v2_hierarchy(tree):
    tree.write("proc/self/cgroup", "5:memory:/app\n0::/app\n")
    tree.mount_v1()
    tree.mount_v2(at="sys/fs/cgroup/unified")
    tree.v1("sys/fs/cgroup/memory/app", GIB, limit=2 * GIB)
    assert tree.groups() == [Group(2 * GIB, GIB)]


@pytest.mark.parametrize("text", ["", "garbage\n"])
def test_what_cannot_be_read_limits_nothing(tree, text):
    tree.write("proc/self/cgroup", "0::/app\n")
    tree.mount_v2()
    tree.v2("sys/fs/cgroup/app", GIB, limit=2 * GIB)
    tree.write("sys/fs/cgroup/app/memory.current", text)
    assert tree.groups() == []


def test_a_system_without_control_groups(tmp_path):
    assert memory_groups(tmp_path / "nothing") == []


# ---------------------------------------------------------------------- the backend


@pytest.fixture
def backend():
    return get_backend("cpu")


def test_memory_is_the_systems_within_the_tightest_group(backend, monkeypatch):
    system = psutil.virtual_memory()
    monkeypatch.setattr(cpu, "memory_groups", list)
    assert backend.memory_info(0).total == system.total
    groups = [Group(GIB, GIB // 4), Group(2 * GIB, 2 * GIB - 1000)]
    monkeypatch.setattr(cpu, "memory_groups", lambda: groups)
    assert backend.memory_info(0).total == GIB
    assert backend.memory_info(0).free == 1000
    monkeypatch.setattr(cpu, "memory_groups", lambda: [Group(GIB, GIB + 5)])
    assert backend.memory_info(0).free == 0


def test_memory_here_is_real(backend):
    info = backend.memory_info(0)
    assert 0 < info.free <= info.total <= psutil.virtual_memory().total


def test_it_is_always_one_device_without_an_index(backend):
    assert backend.is_available()
    assert backend.device_count() == 1
    assert backend.device(0) == torch.device("cpu") == torch.empty(1).device
    assert backend.device_name(0).strip()
    assert "\n" not in backend.device_name(0)


def test_tensors_on_the_host_are_not_counted_and_that_is_said(backend):
    for ask in (backend.memory_allocated, backend.peak_memory_allocated, backend.reset_peak_memory):
        with pytest.raises(NotImplementedError, match="host"):
            ask(0)


def test_lack_of_memory_is_told_from_other_errors(backend):
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert backend.is_out_of_memory(caught.value)
    assert backend.is_out_of_memory(MemoryError())
    assert not backend.is_out_of_memory(RuntimeError("shape"))
    assert not backend.is_out_of_memory(torch.OutOfMemoryError("of a device"))


def test_its_random_numbers_repeat_and_no_other_devices_are_seeded(backend, sim):
    elsewhere = torch.sim.get_rng_state(0)
    backend.manual_seed_all(3)
    state, first = backend.rng_state(0), torch.rand(3)
    backend.set_rng_state(state, 0)
    assert torch.equal(torch.rand(3), first)
    assert torch.equal(torch.sim.get_rng_state(0), elsewhere)


def test_what_it_claims_is_what_torch_has_there(backend):
    claims = backend.capabilities
    assert claims.collectives == torch.distributed.is_gloo_available()
    assert backend.collective_backend == ("gloo" if claims.collectives else None)
    assert not claims.streams
    assert not claims.pinned_memory
    assert not claims.unified_memory
    for dtype in (torch.float32, torch.bfloat16, torch.uint16, torch.float8_e4m3fn, torch.bool):
        assert backend.supports_dtype(dtype)
    assert not backend.supports_dtype(torch.quint8)
    backend.empty_cache(0)
    backend.synchronize(0)
