"""Dividing data among processes: nothing is lost, what is repeated is known, the end is known."""

from __future__ import annotations

import random

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from anydevice.data import (
    DataLoaderDispatcher,
    DataLoaderShard,
    SeedableRandomSampler,
    current_iteration,
    prepare_data_loader,
    skip_first_batches,
)
from anydevice.errors import OptionError


class Stream(IterableDataset):
    def __init__(self, length):
        self.length = length

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        step = info.num_workers if info else 1
        yield from range(info.id if info else 0, self.length, step)


class Shuffled(Sampler):
    """A user's sampler that draws from Python's, numpy's and torch's global generators."""

    def __init__(self, length):
        self.length = length

    def __iter__(self):
        order = list(range(self.length))
        random.shuffle(order)
        for place in range(self.length):
            if numpy.random.rand() < 0.5 and torch.rand(()) < 0.5:
                order[place:] = [*order[:place:-1], order[place]]
            yield order[place]

    def __len__(self):
        return self.length


def passes(loader):
    """Each batch with the note that was current while it was out."""
    out = []
    for batch in loader:
        now = current_iteration()
        assert now.loader is loader
        out.append((batch.tolist(), now.round, now.last))
    assert current_iteration() is None
    return out


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(0, 23),
    batch=st.integers(1, 5),
    count=st.integers(1, 4),
    split=st.booleans(),
    even=st.booleans(),
    drop_last=st.booleans(),
    stream=st.booleans(),
    workers=st.sampled_from([0, 0, 0, 2]),
)
def test_all_samples_go_out_once_and_the_repeated_are_known(
    length, batch, count, split, even, drop_last, stream, workers
):
    size = batch * count if split else batch
    data = Stream(length) if stream else list(range(length))
    if stream and workers and not even:
        workers = 0  # each worker then ends where it will: nothing to compare
    options = {"split_batches": split, "even_batches": even}
    seen = []
    lengths = []
    for index in range(count):
        loader = DataLoader(data, size, drop_last=drop_last, num_workers=workers)
        prepared = prepare_data_loader(loader, None, count, index, **options)
        assert isinstance(prepared, DataLoaderShard)
        got = passes(prepared)
        assert [last for _, _, last in got] == [False] * (len(got) - 1) + [True] * bool(got)
        if not stream:
            assert len(prepared) == len(got)
        lengths.append(len(got))
        seen.append(got)
    if even:
        assert len(set(lengths)) == 1
    real = []
    for index, got in enumerate(seen):
        for samples, note, _ in got:
            if count > 1 and even:
                assert len(samples) == batch  # all processes always have full batches
            if note is not None:
                assert len(samples) == note.sizes[index]
            real += samples[: note.real[index]] if note else samples
    if drop_last:
        assert len(real) == len(set(real))
        assert set(real) <= set(range(length))
        if not workers:
            assert len(real) > length - size * (1 if split else count) - size
    else:
        assert sorted(real) == list(range(length))


@pytest.mark.parametrize(
    "make",
    [
        lambda d: DataLoader(d, 3, shuffle=True),
        lambda d: DataLoader(d, 3, sampler=SubsetRandomSampler(range(20))),
        lambda d: DataLoader(d, 3, sampler=WeightedRandomSampler([1.0] * 20, 20)),
        lambda d: DataLoader(d, 3, sampler=Shuffled(20)),
        lambda d: DataLoader(d, batch_sampler=BatchSampler(Shuffled(20), 3, False)),
        lambda d: DataLoader(d, batch_size=None, sampler=Shuffled(20)),
        lambda d: DataLoader(d, batch_size=None, shuffle=True),
        lambda d: DataLoader(
            d, 3, sampler=RandomSampler(d, generator=torch.Generator().manual_seed(5))
        ),
    ],
)
def test_order_is_a_function_of_seed_and_epoch(make):
    """Whatever was drawn from the global generators between, before and during the epoch."""
    data = list(range(20))

    def epochs(disturb):
        torch.manual_seed(3)
        loaders = [prepare_data_loader(make(data), None, 2, index) for index in range(2)]
        out = []
        for _ in range(2):
            order = []
            for index, loader in enumerate(loaders):
                for batch in loader:
                    if disturb:
                        torch.rand(7 + index)
                        random.random()
                        numpy.random.rand(3)
                    order.append(torch.as_tensor(batch).tolist())
            out.append(order)
        return out

    plain = epochs(disturb=False)
    assert plain == epochs(disturb=True)
    assert plain[0] != plain[1]
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    for _ in prepare_data_loader(make(data), None, 2, 0, data_seed=1):
        pass
    if make(data).batch_size == 3:  # torch's loader itself draws the base seed of its workers
        assert states[1:] == (random.getstate(), numpy.random.get_state()[1].tolist())


def test_seeded_order_is_torchs_own():
    torch.manual_seed(11)
    loader = prepare_data_loader(DataLoader(list(range(9)), 9, shuffle=True))
    orders = []
    for epoch in range(2):
        raw = RandomSampler(range(9), generator=torch.Generator().manual_seed(11 + epoch))
        orders += [b.tolist() for b in loader]
        assert orders[-1] == list(raw)
    assert orders[0] != orders[1]
    assert list(SeedableRandomSampler(range(4), data_seed=2)) == list(
        RandomSampler(range(4), generator=torch.Generator().manual_seed(2))
    )


@settings(max_examples=40, deadline=None)
@given(
    length=st.integers(1, 30),
    batch=st.integers(1, 4),
    before=st.sampled_from([1, 2, 3]),
    after=st.sampled_from([1, 2, 4]),
    stop=st.integers(0, 8),
    custom=st.booleans(),
)
def test_a_resumed_tail_is_the_uninterrupted_one(length, batch, before, after, stop, custom):
    """Also on another number of processes: what was not handed out before is handed out after."""

    def loaders(count):
        order = {"sampler": Shuffled(length)} if custom else {"shuffle": True}
        data = list(range(length))
        return [
            prepare_data_loader(DataLoader(data, batch, **order), None, count, i, data_seed=9)
            for i in range(count)
        ]

    first, states, tails = [], [], []
    for loader in loaders(before):
        tail, iterator = [], iter(loader)
        list(zip(range(stop), iterator, strict=False)) if stop else None
        states.append(loader.state_dict())
        for samples in iterator:
            tail.append(samples.tolist())
        tails.append(tail)
        first.append([b.tolist() for b in loader])
    assert all(state == states[0] for state in states)
    done = states[0]["epoch"] == 1
    for index, loader in enumerate(loaders(before)):
        loader.load_state_dict(states[index])
        if not done:
            assert [b.tolist() for b in loader] == tails[index]
        assert [b.tolist() for b in loader] == first[index]
    resumed = loaders(after)
    real = []
    for index, loader in enumerate(resumed):
        loader.load_state_dict(states[0])
        for samples, note, _ in passes(loader):
            real += samples[: note.real[index]] if note else samples
    plain = loaders(1)[0]
    skipped = skip_first_batches(plain, states[0]["batches"])
    whole = [s for b in skipped for s in b.tolist()]
    assert done or sorted(real) == sorted(whole)


def test_skipping_reads_no_sample():
    class Data(torch.utils.data.Dataset):
        read = 0

        def __len__(self):
            return 40

        def __getitem__(self, index):
            self.read += 1
            return index

    data = Data()
    loader = prepare_data_loader(DataLoader(data, 4), None, 2, 1)
    skipping = skip_first_batches(loader, 3)
    assert len(skipping) == 2
    assert [b.tolist() for b in skipping] == [[28, 29, 30, 31], [36, 37, 38, 39]]
    assert data.read == 8
    assert [b.tolist() for b in skip_first_batches(DataLoader(Stream(9), 2), 3)] == [[6, 7], [8]]
    with pytest.raises(OptionError, match="-1 is negative"):
        skip_first_batches(loader, -1)


def test_skipping_and_its_loader_share_the_epoch():
    torch.manual_seed(0)
    loader = prepare_data_loader(DataLoader(list(range(8)), 2, shuffle=True))
    first, second = [b.tolist() for b in loader], [b.tolist() for b in loader]
    loader.set_epoch(0)
    assert [b.tolist() for b in skip_first_batches(loader, 2)] == first[2:]
    assert [b.tolist() for b in loader] == second
    state = {"seed": 0, "epoch": 0, "batches": 2}
    loader.load_state_dict(state)  # and asking for the same place twice is asking once
    assert [b.tolist() for b in skip_first_batches(loader, 2)] == first[2:]
    assert [b.tolist() for b in loader] == second


def test_an_epoch_left_early_is_one_and_a_look_is_none():
    loader = prepare_data_loader(DataLoader(list(range(20)), 2, shuffle=True))
    orders = [[b.tolist() for b in loader] for _ in range(2)]
    loader.set_epoch(0)
    next(iter(loader))
    got = []
    for batch in loader:
        got.append(batch.tolist())
        if len(got) == 3:
            break
    assert got == orders[0][:3]
    assert [b.tolist() for b in loader] == orders[1]


def test_loops_within_loops_know_their_own_end():
    outer = prepare_data_loader(DataLoader(list(range(3)), 1))
    inner = prepare_data_loader(DataLoader(list(range(2)), 1))
    ends = []
    for _ in outer:
        assert current_iteration().loader is outer
        for _ in inner:
            assert current_iteration().loader is inner
            ends.append(("inner", current_iteration().last))
        for _ in inner:
            break
        assert current_iteration().loader is outer
        ends.append(("outer", current_iteration().last))
        assert outer.end_of_dataloader == current_iteration().last
    inner_ends = [("inner", False), ("inner", True)]
    assert ends == [
        *inner_ends, ("outer", False), *inner_ends, ("outer", False), *inner_ends, ("outer", True),
    ]  # fmt: skip
    assert current_iteration() is None
    left = iter(inner)
    next(left)
    for _ in outer:
        assert current_iteration().loader is outer
    assert current_iteration().loader is inner
    del left
    assert current_iteration() is None


class Own(DataLoader):
    """A user's kind of loader, with settings and an iteration of its own."""

    def __init__(self, *args, twice=False, **kwargs):
        super().__init__(*args, **kwargs)
        self.twice = twice

    def __iter__(self):
        for batch in super().__iter__():
            yield batch * 2 if self.twice else batch


def test_a_loaders_own_class_stays():
    loader = Own(list(range(8)), 2, twice=True, collate_fn=torch.tensor, pin_memory=False)
    made = prepare_data_loader(loader, None, 2, 1)
    assert isinstance(made, Own)
    assert isinstance(made, DataLoaderShard)
    assert made.twice
    assert made.collate_fn is torch.tensor
    assert [b.tolist() for b in made] == [[4, 6], [12, 14]]
    assert [b.tolist() for b in loader] == [[0, 2], [4, 6], [8, 10], [12, 14]]
    assert type(loader) is Own
    assert type(loader.batch_sampler) is BatchSampler
    assert (made.total_batch_size, made.total_dataset_length) == (4, 8)


def test_a_batch_sampler_of_uneven_batches_stays():
    batches = [[0, 1, 2], [3], [4, 5], [6, 7, 8, 9], [10]]
    got = []
    for index in range(2):
        loader = DataLoader(list(range(11)), batch_sampler=batches)
        got.append(passes(prepare_data_loader(loader, None, 2, index)))
    assert [b for b, _, _ in got[0]] == [[0, 1, 2], [4, 5], [10]]
    assert [b for b, _, _ in got[1]] == [[3], [6, 7, 8, 9], [0, 1, 2]]
    assert got[0][2][1].real == (1, 0)


def test_workers_that_persist_and_a_dataset_of_iterables():
    loader = DataLoader(list(range(12)), 2, num_workers=2, persistent_workers=True, shuffle=True)
    made = prepare_data_loader(loader, None, 2, 0, data_seed=4)
    plain = prepare_data_loader(
        DataLoader(list(range(12)), 2, shuffle=True), None, 2, 0, data_seed=4
    )
    for _ in range(2):
        assert [b.tolist() for b in made] == [b.tolist() for b in plain]


def test_what_cannot_be_is_refused():
    data = list(range(8))
    with pytest.raises(OptionError, match="3 is no multiple of 2"):
        prepare_data_loader(DataLoader(data, 3), None, 2, 0, split_batches=True)
    sharded = DataLoader(data, 2, sampler=DistributedSampler(data, 2, 0))
    with pytest.raises(OptionError, match="DistributedSampler"):
        prepare_data_loader(sharded, None, 2, 0)
    with pytest.raises(OptionError, match="in_order"):
        prepare_data_loader(DataLoader(data, 2, num_workers=1, in_order=False), None, 2, 0)
    with pytest.raises(OptionError, match="dispatch_batches=True"):
        prepare_data_loader(DataLoader(data, 2), slice_fn_for_dispatch=lambda *a: a)
    with pytest.raises(OptionError, match="list"):
        prepare_data_loader(data)
    made = prepare_data_loader(DataLoader(data, 2))
    with pytest.raises(OptionError, match="prepared already"):
        prepare_data_loader(made)
    with pytest.raises(OptionError, match="epoch"):
        made.load_state_dict({"batches": 1})


def test_dispatching_in_one_process():
    made = prepare_data_loader(DataLoader(list(range(5)), 2), dispatch_batches=True)
    assert isinstance(made, DataLoaderDispatcher)
    assert [b for b, _, _ in passes(made)] == [[0, 1], [2, 3], [4]]
    assert len(made) == 3
