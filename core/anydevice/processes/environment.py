"""Which process this is, as the environment says: set by torchrun, SLURM or MPI, or not set.

Nothing here writes ``os.environ``.
"""

from __future__ import annotations

import dataclasses
import os
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Final

from anydevice.errors import ProcessGroupError

__all__ = ["Launch", "first_host", "read_launch", "setting"]

_HOST: Final = "127.0.0.1"


@dataclasses.dataclass(frozen=True)
class Launch:
    """One process among those that were started together.

    Attributes:
        rank: from 0, among all.
        size: how many processes there are.
        local_rank: from 0, among those on this machine.
        local_size: how many processes this machine runs.
        source: who started them, for messages.
        address: where process 0 waits for the others; empty when not set.
        port: its port; 0 when not set.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    source: str = "alone"
    address: str = ""
    port: int = 0

    @property
    def is_grouped(self) -> bool:
        """Whether a process group is to be formed."""
        return self.size > 1 or bool(self.address and self.port)


def setting(name: str, default: str = "", environment: Mapping[str, str] | None = None) -> str:
    """A setting of the environment, under our prefix or the reference's.

    Args:
        name: without prefix, such as ``"USE_CPU"`` for ``ANYDEVICE_USE_CPU`` and
            ``ACCELERATE_USE_CPU``.
        default: where neither is set.
        environment: instead of ``os.environ``.
    """
    found = os.environ if environment is None else environment
    return found.get(f"ANYDEVICE_{name}", found.get(f"ACCELERATE_{name}", default))


def read_launch(environment: Mapping[str, str] | None = None) -> Launch:
    """Read which process this is.

    Args:
        environment: instead of ``os.environ``.

    Raises:
        ProcessGroupError: the variables contradict each other, or ask for processes that nothing
            started.

    Example:
        >>> read_launch({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"})
        Launch(rank=1, size=2, local_rank=1, local_size=2, source='torchrun', address='a', port=1)
    """
    found = os.environ if environment is None else environment
    launch = next((made for read in _SOURCES if (made := read(found)) is not None), Launch())
    asked = _integer(found, "WORLD_SIZE")
    if asked is not None and asked != launch.size:
        raise ProcessGroupError(
            f"WORLD_SIZE={asked} asks for {asked} processes, but {_told(launch)}. Start them with "
            "torchrun, srun, mpirun or `anydevice launch`, which number the processes; or unset "
            "WORLD_SIZE to run alone."
        )
    if not (0 <= launch.rank < launch.size and 0 <= launch.local_rank < launch.local_size):
        raise ProcessGroupError(
            f"{launch.source} says rank {launch.rank} of {launch.size} and local rank "
            f"{launch.local_rank} of {launch.local_size}: a rank is from 0 to one less than the "
            "number of processes. See to RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE."
        )
    return launch


def _told(launch: Launch) -> str:
    if launch.source == "alone":
        return "nothing says which of them this is (RANK is not set): this one runs alone"
    return f"{launch.source} started {launch.size}"


def _by_torchrun(found: Mapping[str, str]) -> Launch | None:
    """Torchrun's variables, which `anydevice launch` and many launchers set, too."""
    rank = _integer(found, "RANK")
    if rank is None:
        return None
    size = _integer(found, "WORLD_SIZE")
    if size is None:
        raise ProcessGroupError(
            f"RANK={rank} is set and WORLD_SIZE is not: set both, or unset RANK to run alone"
        )
    local_rank, local_size = _integer(found, "LOCAL_RANK"), _integer(found, "LOCAL_WORLD_SIZE")
    if local_rank is None and local_size is None:
        local_rank, local_size = rank, size  # one machine
    elif local_rank is None:
        local_rank = rank % max(local_size or 1, 1)
    elif local_size is None:
        local_size = size if local_rank == rank else local_rank + 1
    return _placed(Launch(rank, size, local_rank, local_size or 1, "torchrun"), found)


def _by_slurm(found: Mapping[str, str]) -> Launch | None:
    """A task of srun: https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES."""
    rank = _integer(found, "SLURM_PROCID")
    size = _integer(found, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    if rank is None or size is None:
        return None
    local_rank = _integer(found, "SLURM_LOCALID")
    node = _integer(found, "SLURM_NODEID") or 0
    tasks = found.get("SLURM_STEP_TASKS_PER_NODE") or found.get("SLURM_TASKS_PER_NODE", "")
    counts = [
        int(count)
        for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks)
        for _ in range(int(times or 1))
    ]
    local_size = counts[node] if node < len(counts) else size
    launch = Launch(rank, size, rank if local_rank is None else local_rank, local_size, "SLURM")
    nodes = found.get("SLURM_STEP_NODELIST") or found.get("SLURM_NODELIST", "")
    job = f"{found.get('SLURM_JOB_ID', '')}.{found.get('SLURM_STEP_ID', '')}"
    return _placed(launch, found, first_host(nodes), job)


def _by_mpi(found: Mapping[str, str]) -> Launch | None:
    """A process of mpirun, in the dialects of Open MPI, MPICH and Intel MPI, and MVAPICH.

    https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html
    """
    for rank_name, size_name, local_rank_name, local_size_name in _MPI_NAMES:
        rank, size = _integer(found, rank_name), _integer(found, size_name)
        if rank is None or size is None:
            continue
        local_rank = _integer(found, local_rank_name)
        local_size = _integer(found, local_size_name)
        launch = Launch(
            rank,
            size,
            rank if local_rank is None else local_rank,
            size if local_size is None else local_size,
            "MPI",
        )
        # Processes of one mpirun on one machine have one parent, where nothing else names the job.
        job = found.get("PMIX_NAMESPACE") or found.get("OMPI_MCA_ess_base_jobid")
        return _placed(launch, found, job=job or str(os.getppid()))
    return None


#: Rank, size, local rank and local size in each dialect.
_MPI_NAMES: Final = (
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    (
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
_SOURCES: Final[tuple[Callable[[Mapping[str, str]], Launch | None], ...]] = (
    _by_torchrun,
    _by_slurm,
    _by_mpi,
)


def _placed(launch: Launch, found: Mapping[str, str], host: str = "", job: str = "") -> Launch:
    """The launch with the address and port where its processes meet."""
    address, port = found.get("MASTER_ADDR", ""), _integer(found, "MASTER_PORT") or 0
    if launch.size > 1:
        if launch.local_size == launch.size:
            address = address or _HOST
        address = address or host
        if job:
            port = port or 20_000 + zlib.crc32(job.encode()) % 10_000
        if not address or not port:
            missing = " and ".join(
                name
                for name, value in (("MASTER_ADDR", address), ("MASTER_PORT", port))
                if not value
            )
            raise ProcessGroupError(
                f"{launch.source} says that this is process {launch.rank} of {launch.size}, but "
                f"{missing} is not set, so the processes cannot find each other. Set MASTER_ADDR "
                "to the host of process 0 and MASTER_PORT to a free port of it, in all of them; or "
                "start with torchrun or `anydevice launch`, which do."
            )
    return dataclasses.replace(launch, address=address, port=port)


def first_host(nodes: str) -> str:
    """The first host of SLURM's list: ``"a[03-05,9],b"`` gives ``"a03"``."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+))?", nodes)
    return "" if match is None else match[1] + (match[2] or "")


def _integer(found: Mapping[str, str], *names: str) -> int | None:
    """The first of the variables that is set, as a number."""
    for name in names:
        text = found.get(name, "").strip()
        if text:
            try:
                return int(text)
            except ValueError:
                raise ProcessGroupError(
                    f"{name}={text!r} in the environment is no number"
                ) from None
    return None
