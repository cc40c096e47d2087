import collections
import os
import pickle
import struct
import sys
import zipfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing._internal.two_tensor import TwoTensor

from anydevice.checkpoint import open_checkpoint
from anydevice.checkpoint.mapped import backing_of
from anydevice.errors import CheckpointError, CorruptCheckpointError, UnsafeCheckpointError
from anydevice.loading.state_dicts import load_state_dict


class Code:
    """What a hostile file carries: unpickling it runs a command."""

    def __reduce__(self):
        return (os.system, ("touch pwned",))


class Config:
    """What a careless file carries: an object of some class."""


@pytest.fixture
def state():
    base = torch.arange(12.0).view(3, 4)
    return collections.OrderedDict(
        {
            "a": base,
            "rows": base[1:],
            "turned": base.t(),
            "ints": torch.tensor([1, 2, 3]),
            "half": torch.ones(3, dtype=torch.bfloat16),
            "scalar": torch.tensor(2.0),
            "empty": torch.zeros(0, 3),
            "parameter": torch.nn.Parameter(torch.ones(2)),
        }
    )


@pytest.mark.parametrize("new_format", [True, False], ids=["zip", "legacy"])
def test_both_formats(new_format, state, tmp_path):
    path = tmp_path / "m.bin"
    torch.save(state, path, _use_new_zipfile_serialization=new_format)
    checkpoint = open_checkpoint(path)
    assert list(checkpoint) == list(state)
    for name, tensor in state.items():
        found = checkpoint.tensor(name)
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)
        assert not found.requires_grad
        assert checkpoint[name].shape == tuple(tensor.shape)
        assert checkpoint[name].file == str(path)


def test_zip_tensors_are_mapped_and_legacy_ones_are_not(state, tmp_path):
    torch.save(state, tmp_path / "m.bin")
    checkpoint = open_checkpoint(tmp_path / "m.bin")
    mapped = {n for n in checkpoint if backing_of(checkpoint.tensor(n)) is not None}
    assert mapped == set(state) - {"empty", "turned"}
    offset = checkpoint["a"].offset
    assert checkpoint["rows"].offset == offset + 16
    raw = (tmp_path / "m.bin").read_bytes()
    assert raw[offset : offset + 48] == state["a"].numpy().tobytes()
    torch.save(state, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    old = open_checkpoint(tmp_path / "old.bin")
    assert all(info.offset is None for info in old.values())


def test_nothing_is_read_at_opening(tmp_path):
    path = tmp_path / "m.bin"
    torch.save({"w": torch.ones(4 << 20)}, path)
    checkpoint = open_checkpoint(path)
    assert backing_of(checkpoint.tensor("w")).nbytes == 16 << 20
    assert checkpoint.tensor("w").untyped_storage().nbytes() == 16 << 20


def test_saving_beside_the_loaded_file_and_renaming(tmp_path):
    """To torch.save over it would end the process: docs/checkpoints.md says so, and shows this."""
    path, new = tmp_path / "m.bin", tmp_path / "m.bin.new"
    torch.save({"w": torch.arange(100_000.0)}, path)
    state = load_state_dict(path)
    state["w"][0] = 5
    torch.save(state, new)
    os.replace(new, path)
    assert state["w"][0] == 5
    assert state["w"].sum() == torch.arange(100_000.0).sum() + 5
    assert torch.equal(load_state_dict(path)["w"], state["w"])


def test_other_entries_are_kept_apart(tmp_path):
    torch.save({"w": torch.ones(2), "norm._extra_state": {"scale": 3}}, tmp_path / "m.pt")
    checkpoint = open_checkpoint(tmp_path / "m.pt")
    assert list(checkpoint) == ["w"]
    assert checkpoint.extras == {"norm._extra_state": {"scale": 3}}


def test_a_state_dict_inside(tmp_path):
    torch.save({"epoch": 3, "state_dict": {"w": torch.ones(2)}}, tmp_path / "m.ckpt")
    assert list(open_checkpoint(tmp_path / "m.ckpt")) == ["w"]
    torch.save({"epoch": 3, "net": {"w": torch.ones(2)}, "opt": {"lr": 1.0}}, tmp_path / "m.ckpt")
    with pytest.raises(CorruptCheckpointError, match=r"'net'.*torch\.save"):
        open_checkpoint(tmp_path / "m.ckpt")


@pytest.mark.parametrize("content", [torch.ones(2), [torch.ones(2)], 3, {1: torch.ones(2)}])
def test_what_is_no_state_dict(content, tmp_path):
    torch.save(content, tmp_path / "m.pt")
    with pytest.raises(CorruptCheckpointError, match=r"m\.pt holds"):
        open_checkpoint(tmp_path / "m.pt")


@pytest.mark.parametrize("new_format", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("payload", [Code(), Config()], ids=["code", "object"])
def test_code_is_refused_and_not_run(payload, new_format, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(
        {"w": torch.ones(2), "x": payload}, "m.bin", _use_new_zipfile_serialization=new_format
    )
    with pytest.raises(UnsafeCheckpointError, match=r"m\.bin.*weights_only=False") as caught:
        open_checkpoint("m.bin")
    assert "safetensors" in str(caught.value)
    assert not os.path.exists("pwned")


def test_a_plain_pickle_of_code_is_refused_and_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with open("m.bin", "wb") as file:
        pickle.dump(Code(), file)
    with pytest.raises(CheckpointError, match=r"m\.bin"):
        open_checkpoint("m.bin")
    assert not os.path.exists("pwned")


def test_a_torchscript_archive_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "m.pt", "w") as archive:
        archive.writestr("m/data.pkl", pickle.dumps({}))
        archive.writestr("m/constants.pkl", pickle.dumps(()))
        archive.writestr("m/version", "3\n")
    with pytest.raises(CheckpointError, match=r"m\.pt"):
        open_checkpoint(tmp_path / "m.pt")


def test_a_compressed_archive_is_refused(tmp_path):
    torch.save({"w": torch.ones(100)}, tmp_path / "m.bin")
    with (
        zipfile.ZipFile(tmp_path / "m.bin") as plain,
        zipfile.ZipFile(tmp_path / "z.bin", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for entry in plain.namelist():
            packed.writestr(entry, plain.read(entry))
    with pytest.raises(CorruptCheckpointError, match=r"z\.bin.*compress"):
        open_checkpoint(tmp_path / "z.bin")


def test_a_file_of_the_other_byte_order_is_read_right(tmp_path):
    other = "big" if sys.byteorder == "little" else "little"
    torch.save({"w": torch.arange(4, dtype=torch.int32)}, tmp_path / "m.bin")
    with (
        zipfile.ZipFile(tmp_path / "m.bin") as native,
        zipfile.ZipFile(tmp_path / "o.bin", "w") as swapped,
    ):
        for entry in native.namelist():
            content = native.read(entry)
            if entry.endswith("/byteorder"):
                content = other.encode()
            elif "/data/" in entry:
                content = struct.pack(">4i", *struct.unpack("<4i", content))
            swapped.writestr(entry, content)
    assert open_checkpoint(tmp_path / "o.bin").tensor("w").tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("new_format", [True, False], ids=["zip", "legacy"])
def test_truncations_are_refused(new_format, tmp_path):
    whole = tmp_path / "m.bin"
    torch.save({"w": torch.arange(20.0)}, whole, _use_new_zipfile_serialization=new_format)
    raw = whole.read_bytes()
    for size in [0, 1, 2, 4, 10, 63, 64, 100, *range(128, len(raw) - 1, 97), len(raw) - 1]:
        path = tmp_path / "cut.bin"
        path.write_bytes(raw[:size])
        with pytest.raises(CheckpointError, match=r"cut\.bin"):
            open_checkpoint(path)


# ---------------------------------------------------------------------- archives that lie


def rewrite(source, target, change):
    """Copy an archive, each record through ``change(name, content)``; None leaves it out."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            content = change(name, old.read(name))
            if content is not None:
                new.writestr(name, content)


@pytest.mark.parametrize("order", ["little", "big"])
@pytest.mark.parametrize(("numel", "nbytes"), [(64, 16), (4, 400), (5, 16)])
def test_a_storage_that_is_not_its_record(numel, nbytes, order, tmp_path):
    """Else the bytes of the neighbour would be taken for weights."""
    torch.save({"a": torch.ones(4), "b": torch.full((100,), 2.0)}, tmp_path / "m.bin")

    def lie(name, content):
        if name.endswith("/data.pkl"):  # the number of elements is an 8-bit integer, K
            return content.replace(b"K\x04tq", b"K" + bytes([numel]) + b"tq")
        if name.endswith("/byteorder"):
            return order.encode()
        return bytes(nbytes) if name.endswith("/data/0") else content

    rewrite(tmp_path / "m.bin", tmp_path / "lie.bin", lie)
    with pytest.raises(CorruptCheckpointError, match=r"lie\.bin has a tensor of \d+ bytes in a"):
        open_checkpoint(tmp_path / "lie.bin")


def test_an_entry_that_is_cut_in_the_table(tmp_path):
    path = tmp_path / "m.bin"
    torch.save({"a": torch.ones(100), "b": torch.ones(8)}, path)
    raw = path.read_bytes()
    entry = raw.rindex(b"PK\1\2", 0, raw.rindex(b"m/data/0"))  # in the table at the end
    path.write_bytes(raw[: entry + 20] + struct.pack("<II", 40, 40) + raw[entry + 28 :])
    with pytest.raises(CorruptCheckpointError, match=r"a tensor of 400 bytes in a record of 40"):
        open_checkpoint(path)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:TypedStorage")
@pytest.mark.parametrize("first", ["sparse", "quantized", "wrapper"])
def test_what_cannot_be_mapped_does_not_shift_what_is_behind_it(first, tmp_path):
    """Records of one size: each tensor could be taken for its neighbour, and nobody would see."""
    values = torch.tensor([5.0, 6.0], dtype=torch.float64)
    other = {
        "sparse": lambda: torch.cat([values, values * 0]).to_sparse(),
        "quantized": lambda: torch.quantize_per_tensor(torch.ones(16), 0.1, 0, torch.qint8),
        "wrapper": lambda: TwoTensor(values, values + 2),
    }[first]()
    state = {"first": other, "a": values - 4, "b": values - 2}
    torch.save(state, tmp_path / "m.bin")
    with torch.serialization.safe_globals([TwoTensor]):
        checkpoint = open_checkpoint(tmp_path / "m.bin")
    assert checkpoint.tensor("a").tolist() == [1, 2]
    assert checkpoint.tensor("b").tolist() == [3, 4]
    assert backing_of(checkpoint.tensor("b")) is not None
    found = checkpoint.tensor("first")
    if first == "wrapper":
        assert (found.a.tolist(), found.b.tolist()) == ([5, 6], [7, 8])
    else:
        dense = "to_dense" if first == "sparse" else "dequantize"
        assert torch.equal(getattr(found, dense)(), getattr(other, dense)())


def test_other_loads_of_torch_are_left_alone(tmp_path):
    """To note what is loaded, torch is given a callback for good."""
    torch.save({"w": torch.ones(2)}, tmp_path / "m.bin")
    open_checkpoint(tmp_path / "m.bin")
    assert torch.load(tmp_path / "m.bin")["w"].tolist() == [1, 1]
    assert torch.load(tmp_path / "m.bin", map_location="meta")["w"].is_meta


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_refused_by_name(tmp_path):
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    torch.save({"w": torch.ones(2), "ragged": nested}, tmp_path / "m.bin")
    with pytest.raises(CorruptCheckpointError, match=r"m\.bin has the nested tensor 'ragged'"):
        open_checkpoint(tmp_path / "m.bin")


def test_a_pickle_that_is_too_large(tmp_path, monkeypatch):
    monkeypatch.setattr("anydevice.checkpoint.torch_archive._LARGEST_PICKLE", 1000)
    torch.save({f"w{n}": torch.ones(2) for n in range(3)}, tmp_path / "m.bin")
    assert len(open_checkpoint(tmp_path / "m.bin")) == 3
    torch.save({f"w{n}": torch.ones(2) for n in range(30)}, tmp_path / "m.bin")
    with pytest.raises(CorruptCheckpointError, match=r"m\.bin has a pickle of"):
        open_checkpoint(tmp_path / "m.bin")


@pytest.mark.parametrize(
    ("pickled", "reason"),
    [
        (b"\x80\x02cposix\nsystem\n.", "asks for posix.system)"),
        (b"\x80\x02c__main__\nConfig\n.", "asks for __main__.Config)"),
        (b"\x80\x02]K\x01R.", "calls what makes no tensor)"),
        (b"\x80\x02X\x01\x00\x00\x00aK\x01b.", "calls what makes no tensor)"),
        (b"\x80\x02\xff.", "UnpicklingError: Unsupported operand 255. Fetch"),
        (b"\x80\x02}", "EOFError: it ends too early. Fetch"),
    ],
)
def test_the_reason_is_told_in_our_words_and_whole(pickled, reason, tmp_path):
    torch.save({"w": torch.ones(2)}, tmp_path / "m.bin")
    rewrite(
        tmp_path / "m.bin",
        tmp_path / "bad.bin",
        lambda name, content: pickled if name.endswith("/data.pkl") else content,
    )
    with pytest.raises(CheckpointError, match=r"bad\.bin") as caught:
        open_checkpoint(tmp_path / "bad.bin")
    message = str(caught.value)
    assert reason in message
    assert "we changed the default" not in message
    assert "file an issue" not in message


# ---------------------------------------------------------------------- fuzzing


@settings.get_profile("readers")
@given(
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), min_size=1, max_size=5),
)
def test_fuzz_bytes_of_a_good_file(tmp_path, new_format, changes):
    path = tmp_path / "fuzz.bin"
    torch.save(
        {"w": torch.arange(6.0), "v": torch.ones(2, dtype=torch.int8)},
        path,
        _use_new_zipfile_serialization=new_format,
    )
    raw = bytearray(path.read_bytes())
    for at, value in changes:
        raw[at % len(raw)] = value
    path.write_bytes(bytes(raw))
    judge(path)


def judge(path):
    """It is refused with the file named, or each tensor can be used."""
    refusal = None
    try:
        checkpoint = open_checkpoint(path)
    except CheckpointError as error:
        refusal = str(error)
    if refusal is not None:
        assert str(path) in refusal
    else:
        for name, info in checkpoint.items():
            assert checkpoint.tensor(name).shape == info.shape
            if info.form is None and info.nbytes < 1 << 20:
                checkpoint.tensor(name).sum()


@settings.get_profile("readers")
@given(
    st.lists(
        st.tuples(st.integers(0, 600), st.one_of(st.integers(0, 255), st.sampled_from(b"K(.)QtR"))),
        min_size=1,
        max_size=4,
    )
)
def test_fuzz_the_pickle_of_a_good_archive(tmp_path, changes):
    """Changed within an archive whose checksums are right, so that torch reads it."""
    torch.save({"w": torch.arange(6.0).view(2, 3), "t": torch.ones(3, 2).t()}, tmp_path / "m.bin")

    def change(name, content):
        if not name.endswith("/data.pkl"):
            return content
        raw = bytearray(content)
        for at, value in changes:
            raw[at % len(raw)] = value
        return bytes(raw)

    rewrite(tmp_path / "m.bin", tmp_path / "fuzz.bin", change)
    judge(tmp_path / "fuzz.bin")
