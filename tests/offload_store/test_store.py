"""The offload store: what is written is read back, and nothing else is."""

import errno
import json
import os
import shutil

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from anydevice.checkpoint.mapped import backing_of, map_file
from anydevice.errors import DiskFullError, OffloadStoreError, OptionError
from anydevice.offload_store import tensor_bytes, writing
from anydevice.offload_store.manifest import LOCK_NAME, MANIFEST_NAME, _digest
from anydevice.offload_store.store import WeightSource, open_store, write_store

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
    *(torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    *(torch.bool, torch.complex128, torch.complex64, torch.complex32),
]


def raw(tensor):
    """A tensor's bytes: equal also where values are NaN, and for dtypes that cannot be compared."""
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1)
    return tensor.view(torch.uint8).tolist() if tensor.numel() else []


def assert_same(store, tensors):
    assert list(store) == list(tensors)
    for name, tensor in tensors.items():
        got = store[name]
        assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape), name
        assert raw(got) == raw(tensor), name


def some(dtype=torch.float32, *shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = shape or (3, 5)
    count = torch.Size(shape).numel() * dtype.itemsize
    low = 2 if dtype is torch.bool else 256
    data = torch.randint(0, low, (count,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).view(shape)


def weights(seed=0):
    return {"a.weight": some(seed=seed), "a.bias": some(torch.bfloat16, 7, seed=seed)}


def data_files(folder):
    return sorted(p.name for p in folder.iterdir() if p.name not in (MANIFEST_NAME, LOCK_NAME))


# ---------------------------------------------------------------------- there and back


def test_every_dtype_shape_and_stride_comes_back(tmp_path):
    tensors = {str(dtype): some(dtype, 2, 3) for dtype in DTYPES}
    tensors |= {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "empty int8": torch.empty(3, 0, dtype=torch.int8),
        "transposed": some(torch.float32, 4, 6).t(),
        "strided": some(torch.int16, 8, 8)[::2, 1::3],
        "expanded": some(torch.float32, 1, 3).expand(4, 3),
        "conjugate": some(torch.complex64, 4).conj(),
        "negative": some(torch.complex64, 4).conj().imag,
        "": torch.ones(1),
        "__metadata__": torch.ones(2),
        "../ü/\n": torch.ones(3),
    }
    store = write_store(tmp_path / "deep" / "store", tensors)
    assert_same(store, tensors)
    assert_same(open_store(store.folder), tensors)
    assert "nothing" not in store
    with pytest.raises(KeyError):
        store["nothing"]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.dictionaries(
        st.text(max_size=6),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)),
        max_size=6,
    ),
    st.integers(1, 200),
    st.integers(16, 100),
    st.randoms(use_true_random=False),
)
def test_any_weights_come_back_however_files_and_pieces_are_cut(
    tmp_path_factory, spec, largest, piece, random
):
    tensors = {}
    for name, (dtype, shape) in spec.items():
        order = random.sample(range(len(shape)), len(shape))
        whole = some(dtype, *shape) if shape else some(dtype, 1).view(())
        tensors[name] = whole.permute(order) if shape else whole
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "LARGEST_FILE", largest)
        patch.setattr(tensor_bytes, "PIECE", piece)
        store = write_store(tmp_path_factory.mktemp("store"), tensors)
    assert_same(store, tensors)


def test_files_are_large_ordinary_safetensors(tmp_path, monkeypatch):
    tensors = {f"layer.{i}": some(torch.float32, 10, seed=i) for i in range(10)}
    write_store(tmp_path / "one", tensors)
    assert data_files(tmp_path / "one") == ["anydevice-offload-00001.safetensors"]
    monkeypatch.setattr(writing, "LARGEST_FILE", 120)
    write_store(tmp_path / "four", tensors)
    assert len(data_files(tmp_path / "four")) == 4
    read = {}
    for name in data_files(tmp_path / "four"):
        read |= load_file(tmp_path / "four" / name)
    assert read.keys() == tensors.keys()
    assert all(
        torch.equal(read[name].view(torch.int32), t.view(torch.int32))
        for name, t in tensors.items()
    )


def test_tied_tensors_are_written_once_and_read_as_one(tmp_path):
    shared = torch.randn(1000)
    tensors = {"a": shared, "b": shared, "view": shared.view(1000), "part": shared[:10]}
    store = write_store(tmp_path, tensors)
    assert_same(store, tensors)
    assert store.place_of("a") == store.place_of("b") == store.place_of("view")
    assert store.nbytes == 4000 + 40
    assert store["a"].data_ptr() == store["b"].data_ptr()


def test_reading_is_lazy_and_never_writes_the_file(tmp_path):
    store = write_store(tmp_path, weights())
    first = store["a.weight"]
    assert backing_of(first) == store.place_of("a.weight")
    first.zero_()
    assert raw(open_store(tmp_path)["a.bias"]) == raw(weights()["a.bias"])
    del first
    assert_same(open_store(tmp_path), weights())


def test_a_device_tensor_is_moved_in_pieces(tmp_path, sim, monkeypatch):
    monkeypatch.setattr(tensor_bytes, "PIECE", 4096)
    tensors = {"a": torch.randn(5000, device="sim:1"), "b": torch.randn(70, 90, device="sim:0").t()}
    assert_same(write_store(tmp_path, tensors), tensors)


def test_a_source_is_made_when_it_is_written(tmp_path):
    made = []

    def source(name, seed, identity=None):
        def load():
            made.append(name)
            return some(seed=seed)

        return WeightSource(torch.float32, (3, 5), load, identity)

    store = write_store(tmp_path, {"a": source("a", 1, "ckpt@1"), "b": source("b", 2)})
    assert made == ["a", "b"]
    assert_same(store, {"a": some(seed=1), "b": some(seed=2)})
    # Known by its identity, `a` is not made again; `b` must be, to be compared.
    write_store(tmp_path, {"a": source("a", 1, "ckpt@1"), "b": source("b", 2)})
    assert made == ["a", "b", "b"]
    # Another identity, and plain tensors: their bytes decide.
    write_store(tmp_path, {"a": source("a", 1, "ckpt@2"), "b": some(seed=2)})
    with pytest.raises(OffloadStoreError, match="'a' has other values"):
        write_store(tmp_path, {"a": source("a", 3, "ckpt@3"), "b": some(seed=2)})


def test_a_source_that_breaks_its_word_is_refused(tmp_path):
    source = WeightSource(torch.float32, (2,), lambda: torch.ones(3))
    with pytest.raises(OffloadStoreError, match="announced"):
        write_store(tmp_path, {"a": source})
    assert data_files(tmp_path) == []


# ---------------------------------------------------------------------- weights that are in a file


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.arange(6.0), "v": torch.ones(4)}, path)
    file = map_file(path)
    size = file.nbytes
    return path, {"w": file.tensor(size - 24, torch.float32, [6]), "new": torch.zeros(2)}


def test_an_unchanged_view_of_a_checkpoint_is_not_copied(tmp_path, checkpoint):
    path, tensors = checkpoint
    store = write_store(tmp_path / "store", tensors)
    assert store.place_of("w").path == str(path)
    assert_same(store, tensors)
    written = tmp_path / "store" / data_files(tmp_path / "store")[0]
    assert list(load_file(written)) == ["new"]
    assert_same(write_store(tmp_path / "store", tensors), tensors)
    assert_same(
        write_store(tmp_path / "store", {n: t.clone() for n, t in tensors.items()}), tensors
    )
    with pytest.raises(OffloadStoreError, match="'w' has other values"):
        write_store(tmp_path / "store", {**tensors, "w": tensors["w"] + 1})


def test_a_view_that_was_written_to_is_copied(tmp_path, checkpoint):
    path, tensors = checkpoint
    tensors["w"][3] = 7
    store = write_store(tmp_path / "store", tensors)
    assert store.place_of("w").path != str(path)
    assert_same(store, {"w": torch.tensor([0.0, 1, 2, 7, 4, 5]), "new": torch.zeros(2)})


def test_a_store_that_points_nowhere_is_whole_by_itself(tmp_path, checkpoint):
    path, tensors = checkpoint
    store = write_store(tmp_path / "store", tensors, point=False)
    path.unlink()
    assert_same(open_store(store.folder), tensors)


@pytest.mark.parametrize("harm", ["remove", "truncate", "rewrite"])
def test_a_file_that_changes_under_the_store_is_noticed(tmp_path, checkpoint, harm):
    path, tensors = checkpoint
    store = write_store(tmp_path / "store", tensors)
    del tensors
    if harm == "remove":
        path.unlink()
    elif harm == "truncate":
        os.truncate(path, 20)
    else:
        os.utime(path, ns=(1, 1))
    with pytest.raises(OffloadStoreError, match=r"model\.safetensors"):
        store["w"]
    with pytest.raises(OffloadStoreError, match=r"model\.safetensors"):
        open_store(store.folder)


# ---------------------------------------------------------------------- a folder that is there


def test_a_complete_store_of_the_same_weights_is_reused(tmp_path):
    first = write_store(tmp_path, weights())
    before = {p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir()}
    again = write_store(tmp_path, weights())
    assert {p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir()} == before
    assert again.manifest == first.manifest
    assert_same(write_store(tmp_path, dict(first)), weights())  # resting in this very store


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"b": some(), "c": some()}, "it has no 'b', nor any other weight"),
        ({**weights(), "a.bias": some(torch.float16, 7)}, "torch.bfloat16 .* torch.float16"),
        ({**weights(), "a.weight": some(torch.float32, 5, 3)}, r"\(3, 5\) .* \(5, 3\)"),
        ({**weights(), "a.weight": some(seed=9)}, "'a.weight' has other values"),
    ],
)
def test_a_store_of_other_weights_is_refused_and_left_alone(tmp_path, other, message):
    store = write_store(tmp_path, weights())
    with pytest.raises(OffloadStoreError, match=message) as caught:
        write_store(tmp_path, other)
    assert str(tmp_path) in str(caught.value)
    assert "another folder" in str(caught.value)
    assert_same(store, weights())
    assert_same(open_store(tmp_path), weights())


def test_another_part_of_the_same_model_is_added(tmp_path):
    """A device map that depends on free memory sends other layers to disk in every run."""
    part, whole = {"a.weight": some()}, {**weights(), "b": some(seed=4)}
    first = write_store(tmp_path, part)
    files = {name: (tmp_path / name).stat().st_mtime_ns for name in data_files(tmp_path)}
    assert_same(write_store(tmp_path, whole), whole)
    for name, mtime in files.items():
        assert (tmp_path / name).stat().st_mtime_ns == mtime  # kept, not written again
    assert len(data_files(tmp_path)) == 2
    assert_same(open_store(tmp_path), whole)
    assert_same(first, part)
    before = (tmp_path / MANIFEST_NAME).stat().st_mtime_ns
    assert_same(write_store(tmp_path, part), part)
    assert (tmp_path / MANIFEST_NAME).stat().st_mtime_ns == before


def test_an_addition_that_fails_leaves_the_store_as_it_was(tmp_path, monkeypatch):
    write_store(tmp_path, weights())
    before = sorted(p.name for p in tmp_path.iterdir())
    source = WeightSource(torch.float32, (2,), lambda: torch.ones(3))
    with pytest.raises(OffloadStoreError, match="announced"):
        write_store(tmp_path, {**weights(), "b": some(), "bad": source})
    assert sorted(p.name for p in tmp_path.iterdir()) == before
    assert_same(open_store(tmp_path), weights())


def test_no_weights_are_a_store_too(tmp_path):
    assert_same(write_store(tmp_path, {}), {})
    assert_same(open_store(tmp_path), {})


def test_a_damaged_store_of_the_same_weights_is_written_anew(tmp_path):
    store = write_store(tmp_path, weights())
    resting = dict(store)
    (tmp_path / data_files(tmp_path)[0]).unlink()
    with pytest.raises(OffloadStoreError):
        open_store(tmp_path)
    with pytest.raises(OffloadStoreError, match="another model"):
        write_store(tmp_path, weights(seed=5))
    assert_same(write_store(tmp_path, resting), weights())


def test_other_files_in_the_folder_stay(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"mine")
    (tmp_path / "index.json").write_text("{}")
    write_store(tmp_path, weights())
    assert (tmp_path / "model.safetensors").read_bytes() == b"mine"
    assert (tmp_path / "index.json").read_text() == "{}"


def test_a_folder_without_a_manifest_is_not_a_store(tmp_path):
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(OffloadStoreError, match="not a complete offload store"):
            open_store(folder)


def test_a_file_where_the_folder_should_be(tmp_path):
    (tmp_path / "store").write_text("")
    with pytest.raises(OffloadStoreError, match="cannot write"):
        write_store(tmp_path / "store", weights())


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("format",), "something"),
        (("version",), 1),
        (("files",), None),
        (("files", 0, "path"), "../outside"),
        (("files", 0, "path"), "model.safetensors"),
        (("files", 0, "nbytes"), -1),
        (("files", 0, "nbytes"), 3),
        (("files", 0, "mtime_ns"), 1.5),
        (("tensors",), [1]),
        (("tensors", "a.bias", "file"), 1),
        (("tensors", "a.bias", "file"), True),
        (("tensors", "a.bias", "offset"), -8),
        (("tensors", "a.bias", "offset"), 10**30),
        (("tensors", "a.bias", "offset"), 1),
        (("tensors", "a.bias", "dtype"), "nn"),
        (("tensors", "a.bias", "shape"), [10**12]),
        (("tensors", "a.bias", "shape"), [-7]),
        (("tensors", "a.bias", "checksum"), None),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(tmp_path, where, value):
    write_store(tmp_path, weights())
    path = tmp_path / MANIFEST_NAME
    data = json.loads(path.read_text())
    target = data
    for key in where[:-1]:
        target = target[key]
    target[where[-1]] = value
    path.write_text(json.dumps(data))
    with pytest.raises(OffloadStoreError, match=MANIFEST_NAME):
        open_store(tmp_path)
    # Whoever changes the digest too meets the checks behind it.
    del data["digest"]
    path.write_text(json.dumps({**data, "digest": _digest(data)}))
    for call in (open_store, lambda folder: write_store(folder, weights())):
        with pytest.raises(OffloadStoreError, match=MANIFEST_NAME):
            call(tmp_path)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    write_store(folder, weights())
    return folder, (folder / MANIFEST_NAME).read_bytes()


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_bytes_for_a_manifest_are_refused_or_right(written, data):
    folder, good = written
    at = data.draw(st.integers(0, len(good)))
    cut = data.draw(st.integers(0, 12))
    (folder / MANIFEST_NAME).write_bytes(
        good[:at] + data.draw(st.binary(max_size=12)) + good[at + cut :]
    )
    try:
        store = open_store(folder)
    except OffloadStoreError:
        return
    assert_same(store, weights())


# ---------------------------------------------------------------------- what cannot be written


@pytest.mark.parametrize(
    ("tensor", "message"),
    [(torch.empty(2, device="meta"), "bad is on meta"), (torch.eye(2).to_sparse(), "bad is a")],
)
def test_a_tensor_that_is_no_plain_bytes_is_named(tmp_path, tensor, message):
    with pytest.raises(OffloadStoreError, match=message):
        write_store(tmp_path / "store", {"good": some(), "bad": tensor})
    assert not (tmp_path / "store").exists()


def test_a_full_disk_is_seen_before_writing(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=50)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(DiskFullError, match=r"it is full\. 74 bytes are needed, 50 are") as caught:
        write_store(tmp_path, weights())
    assert caught.value.errno == errno.ENOSPC
    assert data_files(tmp_path) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_write_that_fails_at_any_step_leaves_nothing(tmp_path, monkeypatch, code):
    monkeypatch.setattr(writing, "LARGEST_FILE", 64)
    monkeypatch.setattr(tensor_bytes, "PIECE", 32)
    real, left = os.write, [0]

    def failing(descriptor, data):
        left[0] -= 1
        if left[0] == 0:
            raise OSError(code, os.strerror(code))
        return real(descriptor, data[: max(1, len(data) // 2)])  # short writes are allowed

    monkeypatch.setattr(os, "write", failing)
    errors = []
    for step in range(1, 1000):
        left[0] = step
        try:
            store = write_store(tmp_path, weights())
            break
        except OffloadStoreError as error:
            errors.append(error)
        assert [p.name for p in tmp_path.iterdir()] in ([], [LOCK_NAME])
    assert_same(store, weights())
    assert len(errors) > 10
    assert {isinstance(e, DiskFullError) for e in errors} == {code != errno.EIO}


@pytest.mark.parametrize("use", [open_store, lambda folder: write_store(folder, weights())])
def test_an_empty_name_is_not_the_working_directory(tmp_path, monkeypatch, use):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError, match="empty string"):
        use("")
    with pytest.raises(OptionError, match="3 is not a path"):
        use(3)
    assert list(tmp_path.iterdir()) == []
