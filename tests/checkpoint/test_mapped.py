import copy
import gc
import os
import pickle
import sys

import pytest
import torch

from anydevice.checkpoint.file_identity import FileSlice
from anydevice.checkpoint.mapped import backing_of, is_unwritten, map_file
from anydevice.errors import CheckpointNotFoundError, CorruptCheckpointError


@pytest.fixture
def numbers(tmp_path):
    path = tmp_path / "numbers.bin"
    path.write_bytes(torch.arange(4096, dtype=torch.float32).numpy().tobytes())
    return path


def test_a_view_shares_the_mapping_and_has_a_storage_of_its_own(numbers):
    file = map_file(numbers)
    view = file.tensor(16, torch.float32, (2, 3))
    assert view.tolist() == [[4.0, 5.0, 6.0], [7.0, 8.0, 9.0]]
    assert view.untyped_storage().nbytes() == 24
    again = map_file(numbers).tensor(16, torch.float32, (2, 3))
    assert again.data_ptr() == view.data_ptr()
    assert len(pickle.dumps(view)) < 2000
    assert backing_of(copy.deepcopy(view)) is None


def test_a_write_stays_in_the_process(numbers):
    before = numbers.read_bytes()
    view = map_file(numbers).tensor(0, torch.float32, (4096,))
    assert is_unwritten(view)
    view[2000] = 1.0
    assert not is_unwritten(view)
    assert numbers.read_bytes() == before
    neighbour = map_file(numbers).tensor(2001 * 4, torch.float32, (10,))
    assert is_unwritten(neighbour)  # it shares the page, and is itself unchanged
    view[2000] = 2000.0
    assert is_unwritten(view)


def test_backing_names_the_slice(numbers):
    file = map_file(numbers)
    view = file.tensor(64, torch.bfloat16, (8, 4))
    slice_ = FileSlice(str(numbers), 64, 64)
    assert backing_of(view) == slice_
    assert backing_of(torch.nn.Parameter(view)) == slice_
    assert backing_of(view[1:]) == FileSlice(str(numbers), 72, 56)
    assert backing_of(view.t()) is None
    assert backing_of(torch.zeros(3)) is None
    assert backing_of(torch.zeros(3, device="meta")) is None
    assert not is_unwritten(torch.zeros(3))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_mapping_goes_with_its_last_view(numbers):
    view = map_file(numbers).tensor(0, torch.float32, (4,))
    with open("/proc/self/maps") as maps:
        assert str(numbers) in maps.read()
    del view
    gc.collect()
    with open("/proc/self/maps") as maps:
        assert str(numbers) not in maps.read()


def test_an_odd_offset_gives_a_copy(numbers):
    file = map_file(numbers)
    raw = numbers.read_bytes()
    odd = file.tensor(3, torch.float32, (5,))
    assert odd.numpy().tobytes() == raw[3:23]
    assert backing_of(odd) is None


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint64, torch.complex64],
)
def test_every_dtype(numbers, dtype):
    assert map_file(numbers).tensor(16, dtype, (2, 2)).dtype is dtype


def test_empty_tensors_and_files(numbers, tmp_path):
    assert map_file(numbers).tensor(0, torch.int8, (3, 0)).shape == (3, 0)
    empty = tmp_path / "empty"
    empty.touch()
    file = map_file(empty)
    assert file.nbytes == 0
    assert file.read(0, 8) == b""
    with pytest.raises(CorruptCheckpointError, match="empty"):
        file.tensor(0, torch.int8, (1,))


@pytest.mark.parametrize("offset", [-1, 16381, 1 << 62])
def test_a_view_beyond_the_end_is_refused(numbers, offset):
    with pytest.raises(CorruptCheckpointError, match=r"numbers\.bin"):
        map_file(numbers).tensor(offset, torch.float32, (1,))


def test_what_is_no_file_is_refused(tmp_path):
    with pytest.raises(CheckpointNotFoundError, match="nothing"):
        map_file(tmp_path / "nothing")
    with pytest.raises(CorruptCheckpointError, match="folder"):
        map_file(tmp_path)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(CorruptCheckpointError, match="regular"):
        map_file(pipe)


def test_a_changed_file_is_noticed_and_mapped_anew(numbers):
    old = map_file(numbers)
    view = old.tensor(0, torch.float32, (4,))
    replacement = numbers.with_name("new")
    replacement.write_bytes(bytes(32))
    os.replace(replacement, numbers)
    with pytest.raises(CorruptCheckpointError, match="changed"):
        old.check()
    assert not is_unwritten(view)
    assert map_file(numbers).tensor(0, torch.float32, (4,)).tolist() == [0.0] * 4
    assert view.tolist() == [0.0, 1.0, 2.0, 3.0]  # the old file lives on under its views
    numbers.unlink()
    with pytest.raises(CheckpointNotFoundError):
        old.check()


def test_reading_ahead_keeps_what_is_there(numbers):
    file = map_file(numbers)
    file.will_need(100, 9000)
    assert is_unwritten(file.tensor(0, torch.float32, (4096,)))


def test_a_mapping_of_ones_own_sees_no_other_views_writes(numbers):
    shared = map_file(numbers).tensor(0, torch.float32, (4,))
    own = map_file(numbers, own=True).tensor(0, torch.float32, (4,))
    another = map_file(numbers, own=True).tensor(0, torch.float32, (4,))
    own.fill_(9.0)
    assert shared.tolist() == another.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert map_file(numbers).tensor(0, torch.float32, (4,)).data_ptr() == shared.data_ptr()
    assert {backing_of(t).offset for t in (shared, own, another)} == {0}
    assert not is_unwritten(own)
    assert is_unwritten(another)


def test_a_default_device_of_the_caller_is_no_matter(numbers):
    with torch.device("meta"):
        file = map_file(numbers)
        assert not file.tensor(0, torch.float32, (4,)).is_meta
        assert not file.tensor(0, torch.float32, (0,)).is_meta
        assert is_unwritten(file.tensor(0, torch.float32, (4,)))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no pipes with names")
def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CorruptCheckpointError, match="not a regular file"):
        map_file(tmp_path / "pipe", own=True)
