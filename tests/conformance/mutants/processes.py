"""Faults of what a process asks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from mutants.gallery import Fault, mutant


@mutant("PRO-001")
class StaysWhereItIs(Fault):
    """`set_device` does nothing."""

    def set_device(self, index: int) -> None:
        pass


@mutant("PRO-001")
class SaysTheFirst(Fault):
    """`current_device` is always 0."""

    def current_device(self) -> int | None:
        return 0


@mutant("PRO-002")
class RanksShare(Fault):
    """Every rank gets device 0."""

    def local_device(self, local_rank: int) -> int:
        return 0


@mutant("PRO-002")
class RanksGoRound(Fault):
    """Ranks above the count begin again at 0."""

    def local_device(self, local_rank: int) -> int:
        return local_rank % self.device_count()


@mutant("PRO-002")
class EnvironmentBeforeArgument(Fault):
    """Where `LOCAL_RANK` is set, it counts, and not the rank that is asked for."""

    def local_device(self, local_rank: int) -> int:
        return super().local_device(int(os.environ.get("LOCAL_RANK", local_rank)))


@mutant("PRO-003")
class NodeIsMinusOne(Fault):
    """The driver's -1 for "unknown" is passed on."""

    def numa_node(self, index: int) -> int | None:
        return -1


@mutant("PRO-003")
class NodeIsNotHere(Fault):
    """A node of some other machine."""

    def numa_node(self, index: int) -> int | None:
        return 4093


@mutant("PRO-004")
class EnvironmentOfNumbers(Fault):
    """A value is an int."""

    def process_environment(self, local_world_size: int) -> Mapping[str, Any]:
        return {"FOO_THREADS": local_world_size}


@mutant("PRO-004")
class EnvironmentIsWritten(Fault):
    """The variables are set in the asking process."""

    def process_environment(self, local_world_size: int) -> Mapping[str, str]:
        os.environ["FOO_CONFORMANCE_MUTANT"] = str(local_world_size)
        return {}
