"""Data sets of the package `datasets`: rows, streams, and streams that the user has divided."""

from __future__ import annotations

import itertools

import pytest
from torch.utils.data import DataLoader

from anydevice.data import DataLoaderConfiguration, prepare_data_loader, skip_first_batches
from anydevice.data_loader import DataLoaderShard
from anydevice.errors import OptionError
from anydevice.training import Accelerator

ROWS = 10


def rows():
    import datasets

    return datasets.Dataset.from_dict({"x": list(range(ROWS))}).with_format("torch")


def stream(shards=4):
    return rows().to_iterable_dataset(num_shards=shards).with_format("torch")


def read(made):
    return [batch["x"].tolist() for batch in made]


def of_all(loader, count=2, **options):
    return [
        read(prepare_data_loader(loader(), num_processes=count, process_index=rank, **options))
        for rank in range(count)
    ]


@pytest.mark.parametrize("source", [rows, stream])
@pytest.mark.parametrize("count", [2, 3])
def test_each_sample_is_of_one_process(source, count):
    found = of_all(lambda: DataLoader(source(), batch_size=2), count, even_batches=True)
    assert len({len(batches) for batches in found}) == 1
    given = [x for batches in found for batch in batches for x in batch]
    assert set(given) == set(range(ROWS))
    uneven = of_all(lambda: DataLoader(source(), batch_size=2), count, even_batches=False)
    assert sorted(x for each in uneven for batch in each for x in batch) == [*range(ROWS)]


def test_a_stream_that_is_divided_already_is_left_so():
    from datasets.distributed import split_dataset_by_node

    for rank in range(2):
        mine = split_dataset_by_node(stream(), rank=rank, world_size=2)
        loader = prepare_data_loader(
            DataLoader(mine, batch_size=2), num_processes=2, process_index=rank
        )
        assert isinstance(loader, DataLoaderShard)
        assert read(loader) == read(DataLoader(mine, batch_size=2))


def test_a_shuffled_stream_is_another_in_each_epoch_and_the_same_on_each_process():
    def loader():
        return DataLoader(stream().shuffle(seed=3, buffer_size=4), batch_size=5)

    epochs = []
    for epoch in range(2):
        both = []
        for rank in range(2):
            made = prepare_data_loader(loader(), num_processes=2, process_index=rank)
            made.set_epoch(epoch)
            both.append(read(made))
        epochs.append(both)
        assert sorted(itertools.chain(*both[0], *both[1])) == [*range(ROWS)]
    assert epochs[0] != epochs[1]


def test_skipping_the_first_batches():
    made = prepare_data_loader(DataLoader(stream(), batch_size=2), num_processes=1, process_index=0)
    assert read(skip_first_batches(made, 2)) == read(made)[2:]


@pytest.mark.filterwarnings("ignore:'set_vital'")
@pytest.mark.parametrize("source", [rows, stream])
def test_a_stateful_loader_goes_on(source, tmp_path):
    def start():
        config = DataLoaderConfiguration(use_stateful_dataloader=True)
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        return accelerator, accelerator.prepare(DataLoader(source(), batch_size=2))

    accelerator, loader = start()
    whole = read(loader)
    iterator = iter(loader)
    assert [next(iterator)["x"].tolist() for _ in range(2)] == whole[:2]
    accelerator.save_state(tmp_path)
    accelerator, loader = start()
    accelerator.load_state(tmp_path)
    assert read(loader) == whole[2:]
    assert read(loader) == whole


def test_rows_are_split_between_processes():
    with Accelerator(cpu=True).split_between_processes(rows()) as mine:
        assert [row["x"].item() for row in mine] == [*range(ROWS)]


def test_what_a_stream_cannot_do_is_told():
    with pytest.raises(OptionError, match="split_batches"):
        prepare_data_loader(
            DataLoader(stream(), batch_size=3),
            num_processes=2,
            process_index=0,
            split_batches=True,
        )
