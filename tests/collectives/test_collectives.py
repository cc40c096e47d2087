"""Collectives between real processes: the same on the host and on simulated devices."""

import dataclasses
from pathlib import Path

import pytest
import torch
from collectives import ranks
from launching import run_ranks

from anydevice.collectives import (
    CannotPadNestedTensorWarning,
    broadcast,
    find_batch_size,
    gather,
    pad_across_processes,
    pad_input_tensors,
    reduce,
    slice_tensors,
)
from anydevice.errors import CollectiveMismatchError, MissingRankError, OptionError
from anydevice.processes import PartialState

# With the other tests of several processes: one worker has the process that forks them.
pytestmark = pytest.mark.xdist_group("distributed")

LAUNCHES = ["cpu-2", "cpu-4", "sim-2", "sim-4"]


@pytest.fixture(scope="module", params=LAUNCHES)
def toured(request):
    device, size = request.param.split("-")
    return device, int(size), run_ranks(ranks.tour, int(size), device)


def stacked(tensors):
    return torch.cat([torch.atleast_1d(tensor) for tensor in tensors])


def test_gather_keeps_the_structure_and_the_order_of_ranks(toured):
    device, size, found = toured
    for rank, seen in enumerate(found):
        assert seen["devices"] == {device}
        nested = seen["nested"]
        one = [ranks.nested(rank) for rank in range(size)]
        assert torch.equal(nested["tensor"], stacked([o["tensor"] for o in one]))
        assert torch.equal(nested["scalar"], stacked([o["scalar"] for o in one]))
        assert torch.equal(nested["turned"], stacked([o["turned"] for o in one]))
        assert torch.equal(nested["trained"], stacked([o["trained"].detach() for o in one]))
        assert not nested["trained"].requires_grad
        assert nested["list"][0].tolist() == list(range(size))
        assert isinstance(nested["list"][1], tuple)
        assert nested["list"][1][1] is None
        assert type(nested["pair"]).__name__ == "Pair"
        assert nested["pair"].right.tolist() == [-r for r in range(size)]
        assert dataclasses.is_dataclass(nested["output"])
        assert nested["output"].loss.tolist() == [r + 0.5 for r in range(size)]
        assert nested["output"].extra["more"].shape == (0, 4)
        assert type(nested["batch"]).__name__ == "Batch"
        assert nested["batch"].name == f"of {rank}"
        assert nested["batch"]["mask"].dtype == torch.bool
        assert torch.equal(nested["batch"]["mask"], stacked([o["batch"]["mask"] for o in one]))
        assert seen["not nested"].tolist() == list(range(size))
        assert seen["host tensor"].tolist() == list(range(size))
        assert seen["nothing"] == {"a": [], "b": None}


@pytest.mark.parametrize("dtype", ranks.DTYPES)
def test_every_dtype_travels(toured, dtype):
    _, size, found = toured
    each = [ranks.values(rank, dtype, "cpu") for rank in range(size)]
    wide = torch.stack([e.to(torch.complex128 if e.is_complex() else torch.float64) for e in each])
    for seen in found:
        gathered = seen[f"gather {dtype}"]
        assert gathered.dtype == each[0].dtype
        assert torch.equal(gathered.view(torch.uint8), torch.cat(each).view(torch.uint8))
        assert torch.equal(seen[f"broadcast {dtype}"].view(torch.uint8), each[-1].view(torch.uint8))
        total = seen[f"sum {dtype}"]
        assert total.dtype == (torch.int64 if dtype == "bool" else each[0].dtype)
        assert torch.equal(total, wide.sum(0).to(total.dtype))
        mean = seen[f"mean {dtype}"]
        fractional = each[0].is_floating_point() or each[0].is_complex()
        assert mean.dtype == (each[0].dtype if fractional else torch.float32)
        torch.testing.assert_close(mean.to(wide.dtype), wide.mean(0).to(mean.dtype).to(wide.dtype))
        if dtype != "complex64":
            assert torch.equal(seen[f"max {dtype}"], wide.max(0).values.to(each[0].dtype))


def test_reduce(toured):
    _, size, found = toured
    ranks_sum = sum(range(size))
    for rank, seen in enumerate(found):
        assert torch.equal(seen["none"], ranks.values(rank, "float32", "cpu"))
        assert seen["scaled"].tolist() == [size / 2] * 2
        reduced = seen["reduced"]
        assert reduced["scalar"].item() == ranks_sum
        assert reduced["scalar"].ndim == 0
        assert reduced["pair"].left.tolist() == [ranks_sum]
        assert reduced["batch"]["mask"].tolist() == [size, 1, 0]
        assert reduced["output"].extra["more"].shape == (0, 4)


def test_broadcast_fills_what_is_there(toured):
    _, _, found = toured
    source = ranks.nested(1)
    for seen in found:
        assert seen["broadcast is in place"]
        received = seen["broadcast"]
        for name in ("tensor", "scalar", "turned", "trained"):
            assert torch.equal(received[name], source[name])
        assert received["trained"].requires_grad
        assert received["batch"]["ids"].tolist() == [10, 11, 12]
        assert received["pair"].right.tolist() == [-1]


def test_padding(toured):
    _, size, found = toured
    for rank, seen in enumerate(found):
        padded = seen["padded"]
        first, front = padded["first"]["a"], padded["front"]["a"]
        assert first.shape == front.shape == (size, 2)
        assert first[: rank + 1].tolist() == [[rank, rank]] * (rank + 1)
        assert first[rank + 1 :].tolist() == [[0, 0]] * (size - rank - 1)
        assert front[: size - rank - 1].tolist() == [[7, 7]] * (size - rank - 1)
        assert padded["first"]["b"][0].shape == (2, rank)
        for name in ("second", "last"):
            wide = padded[name]["b"][0]
            assert wide.dtype == torch.bool
            assert wide.tolist() == [[False] * rank + [True] * (size - 1 - rank)] * 2
        assert padded["fifth"]["a"].shape == (rank + 1, 2)
        together = seen["padded and gathered"].reshape(size, -1)
        assert [row[row >= 0].tolist() for row in together] == [
            list(range(2 * r)) for r in range(size)
        ]


def test_objects(toured):
    _, size, found = toured
    for seen in found:
        assert seen["objects"] == [x for r in range(size) for x in (("rank", r), {"n": r})]
        assert seen["object"] == [{"rank": r} for r in range(size)]
        assert seen["large"] == [30_000 if r % 2 else 5 for r in range(size)]
        for count in (1, 50_000):
            assert seen[f"sent {count}"] == (1, 2 * count, True)


@pytest.mark.parametrize("size", [2, 4])
def test_what_differs_is_an_error_on_every_rank_that_names_every_line(size):
    lines = Path(ranks.__file__).read_text().splitlines()
    for told in run_ranks(ranks.mismatches, size):
        assert told.pop("afterwards") == list(range(size))
        assert len(told) == 10
        for name, (kind, text) in told.items():
            assert kind == CollectiveMismatchError.__name__, name
            line = next(n for n, source in enumerate(lines, 1) if f'"{name}": lambda' in source)
            assert text.count(f"ranks.py:{line}") == size, text
        assert "float32[3]" in told["shape"][1]
        assert "float32[2]" in told["shape"][1]
        assert "int32[2]" in told["dtype"][1]
        assert "[float32[1]]" in told["structure"][1]
        assert "{'b': float32[1]}" in told["keys"][1]
        assert "different calls" in told["call"][1]
        assert "from rank 1" in told["root"][1]
        assert "pad_across_processes" in told["shape"][1]


@pytest.mark.parametrize("size", [2, 3])
def test_calls_of_any_size_follow_one_another(size):
    for seed in range(3):
        assert run_ranks(ranks.sequences, size, "cpu", seed) == [True] * size


def test_a_rank_that_comes_late_is_named_and_learns_that_it_is_alone():
    lines = Path(ranks.__file__).read_text().splitlines()
    both, waits = (
        next(n for n, source in enumerate(lines, 1) if source.endswith(mark))
        for mark in ("# BOTH", "# WAITS TOO LONG")
    )
    waited, late = run_ranks(ranks.comes_late, 2, check=False)
    assert isinstance(waited.error, MissingRankError)
    assert "rank 1 did not come within 1 s" in str(waited.error)
    assert f"rank 0: {ranks.__file__}:{waits} gather" in str(waited.error)
    assert f"rank 1: {ranks.__file__}:{both} gather" in str(waited.error)
    assert isinstance(late.error, MissingRankError)
    assert "rank 0 " in str(late.error)


def test_a_collective_on_the_main_process_only_names_both_lines():
    lines = Path(ranks.__file__).read_text().splitlines()
    alone, together = (
        next(n for n, source in enumerate(lines, 1) if source.endswith(mark))
        for mark in ("# ALONE", "# TOGETHER")
    )
    for rank in run_ranks(ranks.only_main, 2, check=False):
        assert isinstance(rank.error, CollectiveMismatchError)
        assert f"ranks.py:{alone} gather" in str(rank.error)
        assert f"ranks.py:{together} wait_for_everyone" in str(rank.error)
        assert "is_main_process" in str(rank.error) or "same calls" in str(rank.error)


def test_a_rank_that_dies_is_named():
    first, _, third = run_ranks(ranks.dies_in_between, 3, check=False)
    for rank in (first, third):
        assert isinstance(rank.error, MissingRankError)
        assert "rank 1 has died" in str(rank.error)


# ---------------------------------------------------------------------- alone


@pytest.fixture
def alone(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(PartialState, "_shared_state", {})
    return PartialState(cpu=True)


def test_alone_the_data_is_its_own_result(alone):
    data = ranks.nested(0)
    for collective in (gather, broadcast, pad_across_processes):
        assert collective(data) is data
    reduced = reduce(data, "mean")
    assert torch.equal(reduced["tensor"], data["tensor"])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"a": [torch.ones(1), 3]}, r"at \['a'\]\[1\] there is a int"),
        ("text", "there is a str"),
        (ranks.Output(torch.ones(1), {1, 2}), r"at .extra there is a set"),
    ],
)
@pytest.mark.parametrize("collective", [gather, reduce, broadcast])
def test_what_is_no_tensor_is_named(alone, collective, data, words):
    with pytest.raises(TypeError, match=words):
        collective(data)


def test_what_cannot_be_done_is_refused(alone):
    with pytest.raises(OptionError, match="reduction='median'"):
        reduce(torch.ones(1), "median")
    with pytest.raises(OptionError, match="no maximum"):
        reduce(torch.ones(1, dtype=torch.complex64), "max")
    with pytest.raises(OptionError, match="from_process=1"):
        broadcast(torch.ones(1), from_process=1)
    with pytest.raises(OptionError, match="no dense tensor"):
        gather(torch.eye(2).to_sparse())


def test_padding_a_batch_repeats_its_last_samples():
    data = {"ids": torch.arange(5), "scale": torch.tensor(2.0), "other": torch.ones(3)}
    padded = pad_input_tensors(data, 5, 3)
    assert padded["ids"].tolist() == [0, 1, 2, 3, 4, 4]
    assert padded["scale"] is data["scale"]
    assert padded["other"] is data["other"]
    assert pad_input_tensors(data, 5, 5) is data
    across = pad_input_tensors(torch.arange(6).reshape(2, 3), 3, 2, dim=1)
    assert across.tolist() == [[0, 1, 2, 2], [3, 4, 5, 5]]
    with pytest.raises(OptionError, match="empty batch"):
        pad_input_tensors(torch.zeros(0), 0, 2)


def test_slices_and_sizes():
    data = {"ids": torch.arange(4), "n": torch.tensor(1), "name": "x"}
    part = slice_tensors(data, slice(1, 3))
    assert part["ids"].tolist() == [1, 2]
    assert part["n"] is data["n"]
    assert find_batch_size([torch.tensor(1), {"a": torch.zeros(3, 2)}]) == 3
    assert find_batch_size("text") is None


def test_a_nested_tensor_is_left_alone_with_a_warning():
    from anydevice.collectives.padding import _length

    nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    with pytest.warns(CannotPadNestedTensorWarning):
        assert _length(nested, 0) == 0
