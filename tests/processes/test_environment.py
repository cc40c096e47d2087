"""Which process this is: each launcher's variables, and what contradicts itself."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anydevice.errors import ProcessGroupError
from anydevice.processes import Launch, read_launch, setting

MEET = {"MASTER_ADDR": "host", "MASTER_PORT": "29500"}


def test_alone():
    assert read_launch({}) == Launch()
    assert not read_launch({"WORLD_SIZE": "1"}).is_grouped


def test_torchrun():
    found = read_launch(
        {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", **MEET}
    )
    assert found == Launch(5, 8, 1, 4, "torchrun", "host", 29500)
    one = read_launch({"RANK": "0", "WORLD_SIZE": "1", **MEET})
    assert one.is_grouped  # torchrun with one process: code may use torch.distributed


def test_slurm_on_two_nodes():
    found = read_launch(
        {
            "SLURM_PROCID": "5",
            "SLURM_NTASKS": "6",
            "SLURM_LOCALID": "1",
            "SLURM_NODEID": "1",
            "SLURM_STEP_TASKS_PER_NODE": "4,2",
            "SLURM_STEP_NODELIST": "gpu[07-08],login",
            "SLURM_JOB_ID": "123",
            "SLURM_STEP_ID": "0",
        }
    )
    assert (found.rank, found.size, found.local_rank, found.local_size) == (5, 6, 1, 2)
    assert (found.source, found.address) == ("SLURM", "gpu07")
    assert 20_000 <= found.port < 30_000


def test_slurm_counts_the_tasks_of_the_step_not_of_the_job():
    step = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1"}
    assert read_launch(step).size == 1


@pytest.mark.parametrize(
    "names",
    [
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
        ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ],
)
def test_mpi_on_one_machine_needs_no_address(names):
    ranks = [
        read_launch(dict(zip(names, (str(rank), "2", str(rank)), strict=True))) for rank in (0, 1)
    ]
    assert [(r.rank, r.size, r.local_rank, r.source) for r in ranks] == [
        (0, 2, 0, "MPI"),
        (1, 2, 1, "MPI"),
    ]
    assert (ranks[0].address, ranks[0].port) == (ranks[1].address, ranks[1].port)


def test_torchrun_inside_srun_is_torchruns():
    both = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "RANK": "3", "WORLD_SIZE": "4", **MEET}
    assert (read_launch(both).rank, read_launch(both).source) == (3, "torchrun")


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4 asks for 4 processes.*runs alone"),
        ({"RANK": "1"}, "RANK=1 is set and WORLD_SIZE is not"),
        ({"RANK": "2", "WORLD_SIZE": "2", **MEET}, "rank 2 of 2"),
        ({"RANK": "-1", "WORLD_SIZE": "2", **MEET}, "rank -1 of 2"),
        ({"RANK": "zero", "WORLD_SIZE": "2"}, "RANK='zero' in the environment is no number"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_PORT is not set"),
        (
            {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
            "MASTER_ADDR and MASTER_PORT is not set",
        ),
        (
            {"WORLD_SIZE": "4", "SLURM_PROCID": "0", "SLURM_NTASKS": "2", **MEET},
            "WORLD_SIZE=4 asks for 4 processes, but SLURM started 2",
        ),
    ],
)
def test_what_contradicts_itself_is_named(environment, words):
    with pytest.raises(ProcessGroupError, match=words):
        read_launch(environment)


@given(
    size=st.integers(1, 64),
    data=st.data(),
)
@settings(max_examples=50)
def test_any_rank_of_any_launch_is_read_back(size, data):
    rank = data.draw(st.integers(0, size - 1))
    found = read_launch({"RANK": str(rank), "WORLD_SIZE": str(size), **MEET})
    assert (found.rank, found.size) == (rank, size)
    assert 0 <= found.local_rank < found.local_size


def test_a_setting_has_our_prefix_or_the_references():
    assert setting("USE_CPU", environment={"ACCELERATE_USE_CPU": "true"}) == "true"
    both = {"ACCELERATE_USE_CPU": "true", "ANYDEVICE_USE_CPU": "false"}
    assert setting("USE_CPU", environment=both) == "false"
    assert setting("USE_CPU", "x", environment={}) == "x"
