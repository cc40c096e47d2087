"""`PartialState`, alone and in real processes on the host and on simulated devices."""

import datetime
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launching import Failed, free_port, run_ranks
from processes import ranks

from anydevice.errors import (
    CollectiveMismatchError,
    MissingRankError,
    OptionError,
    ProcessGroupError,
)
from anydevice.processes import DistributedType, PartialState

# With the other tests of several processes: one worker has the process that forks them.
pytestmark = pytest.mark.xdist_group("distributed")


@pytest.fixture
def alone(monkeypatch):
    """A state of its own for one test, in an environment without launchers."""
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(PartialState, "_shared_state", {})
    return PartialState


def line_of(mark, file=ranks.__file__):
    """The line of ``ranks.py`` inside the caller's function that ends in a mark."""
    lines = Path(file).read_text().splitlines()
    return {f"{Path(file).name}:{n}" for n, text in enumerate(lines, 1) if text.endswith(mark)}


@pytest.fixture(scope="module", params=["cpu-2", "cpu-4", "sim-2", "sim-4"])
def toured(request):
    device, size = request.param.split("-")
    return device, int(size), run_ranks(ranks.tour, int(size), device)


def test_each_rank_knows_itself_and_its_device(toured):
    device, size, found = toured
    for rank, seen in enumerate(found):
        assert (seen["rank"], seen["size"], seen["local"]) == (rank, size, rank)
        assert seen["device"] == ("cpu" if device == "cpu" else f"{device}:{rank}")
        assert seen["made"] == seen["device"]
        assert seen["type"] == f"MULTI_{device.upper()}"
        assert (seen["main"], seen["local_main"], seen["last"]) == (
            rank == 0,
            rank == 0,
            rank == size - 1,
        )
        assert seen["same"]
        assert seen["environment_kept"]


def test_functions_run_where_they_should(toured):
    _, size, found = toured
    for rank, seen in enumerate(found):
        own = {"main": 0, "local": 0, "last": size - 1, "one": 1, "local_one": 1}
        assert seen["ran"] == {name: rank if rank == at else None for name, at in own.items()}


def test_shares_put_together_are_the_whole(toured):
    _, _, found = toured
    shares = [seen["shares"] for seen in found]
    for name in ("list", "tuple", "one", "none"):
        together = [item for share in shares for item in share[f"{name} False"]]
        assert together == list(ranks.DATA[name])
    assert torch.equal(torch.cat([s["tensor False"] for s in shares]), ranks.DATA["tensor"])
    assert [w for s in shares for w in s["dict False"]["words"]] == ["x", "y", "z"]


def test_padded_shares_are_equally_long_and_repeat_the_last(toured):
    _, size, found = toured
    for name, data in ranks.DATA.items():
        shares = [seen["shares"][f"{name} True"] for seen in found]
        if name == "dict":
            shares, data = [s["words"] for s in shares], data["words"]
        assert {len(share) for share in shares} == {-(-len(data) // size)}
        for share in shares:
            assert all(any(torch.equal(torch.as_tensor(i), torch.as_tensor(d)) for d in data)
                       if name == "tensor" else i in data for i in share)  # fmt: skip


@pytest.mark.parametrize("size", [2, 3])
def test_the_main_process_is_first(size, tmp_path):
    path = tmp_path / "order"
    run_ranks(ranks.first, size, "cpu", str(path))
    order = path.read_text().split()
    assert len(order) == 4 * size
    assert order[::size] == ["0"] * 4


def test_a_rank_that_left_is_named_to_those_that_wait():
    waited, left = run_ranks(ranks.leaves_early, 2, check=False)
    assert left == "left"
    assert isinstance(waited.error, MissingRankError)
    assert isinstance(waited.error, TimeoutError)
    text = str(waited.error)
    assert "rank 1 has left the group" in text
    assert (
        all(place in text for place in line_of("# WAITS") if "leaves" in place)
        or "ranks.py" in text
    )


def test_a_rank_that_died_is_named_to_those_that_wait():
    waited, died, other = run_ranks(ranks.dies, 3, check=False)
    for survivor in (waited, other):
        assert "rank 1 has died" in str(survivor.error)
    assert isinstance(died, Failed)


def test_different_calls_are_an_error_on_both_that_names_both_lines():
    for rank in run_ranks(ranks.makes_another_call, 2, check=False):
        assert isinstance(rank.error, CollectiveMismatchError)
        text = str(rank.error)
        assert "wait_for_everyone" in text
        assert "main_process_first" in text
        (elsewhere,) = line_of("# ELSEWHERE")
        assert elsewhere in text
        assert sum(place in text for place in line_of("# WAITS")) == 1


def test_a_state_that_is_reset_again_and_again_meets_the_other_ranks():
    assert run_ranks(ranks.resets_the_state, 2) == [[0, 1, 2, 3]] * 2


def test_a_rank_that_comes_too_late_is_an_error_for_all():
    first, last = run_ranks(ranks.never_comes, 2, check=False)
    assert "rank 1 did not come within 1 s" in str(first.error)
    assert isinstance(last.error, ProcessGroupError)  # it must not believe that the others wait


def test_a_group_that_is_there_is_used():
    assert run_ranks(ranks.uses_a_group_that_is_there, 2) == [(0, 2, "gloo"), (1, 2, "gloo")]


def test_a_start_that_failed_leaves_nothing():
    for first, kept, size in run_ranks(ranks.fails_then_starts, 2):
        assert (first, kept, size) == ("ProcessGroupError", {}, 2)


def test_no_rank_goes_on_before_the_collectives_of_all_stand():
    *others, last = run_ranks(ranks.starts_on_all_but_the_last, 3)
    for text, initialized in others:
        assert "do not start on rank 2" in text
        assert "no link" in text
        assert not initialized
    assert "no link" in last[0]


def test_a_group_can_be_formed_again():
    assert run_ranks(ranks.starts_again, 2) == [[2, 2], [2, 2]]


def test_logging(tmp_path):
    path = tmp_path / "log"
    run_ranks(ranks.logs, 3, environment={"LOG_FILE": str(path)})
    assert path.read_text().splitlines() == [
        "main logs",
        "rank 0 logs",
        "rank 1 logs",
        "rank 2 logs",
        "once logs",
    ]


def test_alone_nothing_is_distributed(alone, capsys):
    state = alone(cpu=True)
    assert (state.num_processes, state.process_index) == (1, 0)
    assert state.distributed_type == DistributedType.NO == "NO"
    # Scripts compare with hardware that no backend here knows.
    assert state.distributed_type not in (DistributedType.TPU, DistributedType.MULTI_FOO)
    assert state.backend is None
    assert not torch.distributed.is_initialized()
    state.wait_for_everyone()
    with state.main_process_first(), state.split_between_processes((1, 2)) as part:
        state.print(*part)
    assert capsys.readouterr().out == "1 2\n"
    state.destroy_process_group()


def test_alone_on_an_accelerator(alone, sim):
    state = alone()
    assert state.device == torch.device("sim", 0)
    assert state.default_device == torch.device("sim", 0)
    with pytest.raises(OptionError, match=r"works on sim:0 since the first"):
        alone(cpu=True)


@pytest.mark.parametrize("name", ["ACCELERATE_USE_CPU", "ANYDEVICE_USE_CPU"])
def test_the_environment_can_choose_the_host(alone, sim, monkeypatch, name):
    monkeypatch.setenv(name, "true")
    assert alone().device.type == "cpu"


def test_the_environment_can_name_the_device(alone, sim, monkeypatch):
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "sim:1")
    assert alone().device == torch.device("sim", 1)
    assert torch.ones(1, device="sim").device.index == 1


def test_more_processes_than_devices_is_an_error(alone, sim, monkeypatch):
    for name, value in (("RANK", "2"), ("WORLD_SIZE", "3"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"process 2 of this machine has no 'sim' device.*sees 2"):
        alone()
    assert alone._shared_state == {}


def test_processes_that_do_not_come_are_named(alone, monkeypatch):
    variables = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_PORT": str(free_port())}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MissingRankError, match=r"asks for 3 processes, and 1 came.*rank 1, 2 is"):
        alone(cpu=True, timeout=datetime.timedelta(seconds=0.3))
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("method", "arguments"),
    [("on_process", {"process_index": 1}), ("on_local_process", {"local_process_index": None})],
)
def test_a_rank_that_there_is_not_is_refused(alone, method, arguments):
    with pytest.raises(OptionError, match="give a rank from 0 to 0"):
        getattr(alone(cpu=True), method)(print, **arguments)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"a": [1], "b": [1, 2]}, "equally long"),
        ({1, 2}, "set cannot be split"),
        (torch.tensor(1), "without dimensions"),
        (7, "int cannot be split"),
    ],
)
def test_what_cannot_be_split_is_named(alone, data, words):
    with (
        pytest.raises(OptionError, match=words),
        alone(cpu=True).split_between_processes(data),
    ):
        pass


SCRIPT = """
from processes.ranks import is_in_a_group
print(is_in_a_group(0, 0) + "\\n", end="", flush=True)  # in one piece, unbuffered or not
"""


def test_torchrun(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = ["torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ANYDEVICE_BACKENDS": "cpu"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-m", *command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    lines = re.findall(r"I am \d of \d \w+", done.stdout)  # line ends may be interleaved
    assert sorted(lines) == [f"I am {rank} of 2 MULTI_CPU" for rank in range(2)]


@pytest.mark.parametrize(
    "variables",
    [
        {"OMPI_COMM_WORLD_RANK": "{rank}", "OMPI_COMM_WORLD_SIZE": "2"},
        {"SLURM_PROCID": "{rank}", "SLURM_NTASKS": "2", "SLURM_JOB_ID": str(os.getpid())},
    ],
    ids=["mpi", "slurm"],
)
def test_other_launchers(variables):
    """Processes with the variables that mpirun and srun set."""
    none = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"]
    if "SLURM_JOB_ID" in variables:  # the port follows from it
        none.append("MASTER_PORT")
    environment = {**dict.fromkeys(none), "ANYDEVICE_BACKENDS": "cpu", **variables}
    found = run_ranks(ranks.is_in_a_group, 2, environment=environment)
    assert found == [f"I am {rank} of 2 MULTI_CPU" for rank in range(2)]
