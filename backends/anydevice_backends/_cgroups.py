"""The memory that a container's control groups leave to this process.

A process is in one group of each hierarchy, and each group up to the root may have a limit: the
tightest counts. What a group uses includes the page cache of the files that it read; the kernel
drops that before it refuses memory, so it counts as free (as in ``MemAvailable``).

- v2: https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files
- v1: https://docs.kernel.org/admin-guide/cgroup-v1/memory.html
- where groups are mounted: ``man 7 cgroups``, ``man 5 proc`` (mountinfo)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

__all__ = ["Group", "memory_groups"]

#: v1 spells "no limit" as the largest multiple of the page size in 63 bits.
_NO_LIMIT: Final = 1 << 60


@dataclasses.dataclass(frozen=True)
class Group:
    """A control group with a memory limit.

    Attributes:
        limit: bytes that its processes may use together.
        used: bytes that they use and that cannot be reclaimed.
    """

    limit: int
    used: int


def memory_groups(root: Path = Path("/")) -> list[Group]:
    """The groups that limit this process's memory; empty on a system without control groups.

    Args:
        root: where ``/proc`` and ``/sys`` are (for tests).
    """
    groups = []
    for version, folder, top in _hierarchies(root):
        read = _read_v2 if version == "cgroup2" else _read_v1
        for level in (folder, *folder.parents):
            group = read(level)
            if group is not None:
                groups.append(group)
            if level == top:
                break
    return groups


def _hierarchies(root: Path) -> Iterator[tuple[str, Path, Path]]:
    """Version, this process's group and the mount point of each hierarchy that may limit memory."""
    paths: dict[str, str] = {}  # of this process, by controller; "" is v2's
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            paths[controller] = path
    for line in _lines(root / "proc/self/mountinfo"):
        left, _, right = line.partition(" - ")
        mounted, mount_point = left.split(" ")[3:5]
        kind, _, options = right.split(" ", 2)
        if kind == "cgroup2":
            group = paths.get("")
        elif kind == "cgroup" and "memory" in options.split(","):
            group = paths.get("memory")
        else:
            continue
        if group is not None:
            top = root / mount_point.lstrip("/")
            yield kind, top / _below(group, mounted), top


def _below(path: str, mounted: str) -> str:
    """The group's path below its mount point, which may show only a part of the hierarchy.

    In a container ``/proc/self/cgroup`` may give a path outside what is mounted (``/../..`` or the
    host's path); then the mount point itself is the container's group.
    """
    inside = PurePosixPath(path)
    if ".." in inside.parts or not inside.is_relative_to(mounted):
        return ""
    return str(inside.relative_to(mounted))


def _read_v2(folder: Path) -> Group | None:
    limits = [_number(folder / name) for name in ("memory.max", "memory.high")]
    # Above memory.high a process is not refused, but slowed to a crawl: no room to plan with.
    return _group(folder, limits, "memory.current", "")


def _read_v1(folder: Path) -> Group | None:
    limits = [_number(folder / "memory.limit_in_bytes")]
    return _group(folder, limits, "memory.usage_in_bytes", "total_")


def _group(folder: Path, limits: list[int | None], usage: str, prefix: str) -> Group | None:
    set_limits = [limit for limit in limits if limit is not None and limit < _NO_LIMIT]
    used = _number(folder / usage)
    if not set_limits or used is None:
        return None
    cache = 0
    for line in _lines(folder / "memory.stat"):
        name, _, value = line.partition(" ")
        if name in (f"{prefix}inactive_file", f"{prefix}active_file"):
            cache += int(value)
    return Group(min(set_limits), max(0, used - cache))


def _number(file: Path) -> int | None:
    """The number in a file; None for "max", or where there is no such file."""
    text = "".join(_lines(file)).strip()
    return int(text) if text.isdecimal() else None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
