"""JSON of strangers: each file that the readers parse is bounded in the same way."""

import json
import os
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anydevice.checkpoint import open_checkpoint
from anydevice.checkpoint.strict_json import LARGEST_JSON, parse_json
from anydevice.errors import CheckpointError, CorruptCheckpointError, OffloadStoreError
from anydevice.offload_store import OffloadedWeightsLoader, open_store
from anydevice.offload_store.manifest import MANIFEST_NAME

# ---------------------------------------------------------------------- what it refuses

#: Made when they are used: they are large.
TOO_MUCH = {
    "keys": lambda: b'{"a":0' + b',"b":0' * 2_000_001 + b"}",
    "keys with spaces": lambda: b'{"a":0' + b',"b" \n:0' * 2_000_001 + b"}",
    "lists": lambda: b'{"a":[' + b"[]," * 2_000_001 + b"[]]}",
    "objects": lambda: b'{"a":[' + b"{}," * 2_000_001 + b"{}]}",
    "numbers": lambda: b'{"a":[' + b"1," * 5_000_001 + b"1]}",
    "depth": lambda: b'{"a":' + b"[" * 2_000_001,
    "bytes": lambda: b'{"a":"' + b"x" * LARGEST_JSON + b'"}',
}


@pytest.mark.parametrize("what", TOO_MUCH)
def test_it_is_bounded_before_it_is_parsed(what, monkeypatch):
    def parse(*args, **kwargs):
        raise AssertionError("it was parsed")

    monkeypatch.setattr(json, "loads", parse)
    with pytest.raises(CorruptCheckpointError, match="the header of x is too large"):
        parse_json(TOO_MUCH[what](), "the header of x")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b'{"a": -0}', "-0"),
        (b'{"a": [1, -0 ]}', "-0"),
        (b'{"a": NaN}', "NaN"),
        (b'{"\\ud800": 1}', "JSON"),
        (b'{"a": "\\udc80"}', "JSON"),
        (b'{"a": ["\\ud83d", "\\ude00"]}', "JSON"),
        (b'{"a": 1, "\\u0061": 2}', "twice"),
    ],
)
def test_what_is_no_number_and_no_text(text, words):
    with pytest.raises(CorruptCheckpointError, match=words):
        parse_json(text, "x")


def test_what_only_looks_like_it():
    assert parse_json(b'{"m-00": -0.0, "n": -10, "-0": "-0"}', "x") == {
        "m-00": 0.0,
        "n": -10,
        "-0": "-0",
    }
    assert parse_json(b'{"\\ud83d\\ude00": "\\\\ud800"}', "x") == {"\N{GRINNING FACE}": "\\ud800"}


def test_a_file_name_that_is_not_utf_8_is_read_where_file_names_are_expected():
    name = os.fsdecode(b"\xff")
    raw = json.dumps({"path": name}).encode()
    assert parse_json(raw, "x", file_names=True) == {"path": name}
    with pytest.raises(CorruptCheckpointError):
        parse_json(b'{"path": "\\ud800"}', "x", file_names=True)


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5),
)


@settings.get_profile("readers")
@given(
    st.dictionaries(
        st.text(max_size=5),
        st.recursive(
            VALUES,
            lambda inner: st.one_of(
                st.lists(inner, max_size=3),
                st.dictionaries(st.text(max_size=5), inner, max_size=3),
            ),
            max_leaves=5,
        ),
        max_size=4,
    )
)
def test_fuzz_what_json_writes_is_read(data):
    assert parse_json(json.dumps(data).encode(), "x") == data
    assert parse_json(json.dumps(data, ensure_ascii=False).encode(), "x") == data


# ---------------------------------------------------------------------- every reader uses it


def read_index_file(folder):
    return folder / "model.safetensors.index.json", lambda: open_checkpoint(folder)


def read_manifest(folder):
    return folder / MANIFEST_NAME, lambda: open_store(folder)


def read_manifest_for_weights(folder):
    return folder / MANIFEST_NAME, lambda: OffloadedWeightsLoader(save_folder=folder)


def read_peers_index(folder):
    return folder / "index.json", lambda: OffloadedWeightsLoader(save_folder=folder)


READERS = [read_index_file, read_manifest, read_manifest_for_weights, read_peers_index]
each_reader = pytest.mark.parametrize("reader", READERS)


def refusal(read):
    with pytest.raises((CheckpointError, OffloadStoreError)) as caught:
        read()
    return str(caught.value)


@each_reader
def test_a_huge_file_is_not_read(reader, tmp_path):
    path, read = reader(tmp_path)
    with open(path, "wb") as file:
        file.write(b'{"a":{')
        file.truncate(1 << 40)  # sparse
    message = refusal(read)
    assert "too large" in message
    assert str(path) in message


@each_reader
def test_keys_spelled_with_spaces(reader, tmp_path):
    path, read = reader(tmp_path)
    path.write_bytes(TOO_MUCH["keys with spaces"]())
    assert "too large" in refusal(read)


@each_reader
def test_a_pipe_is_not_waited_for(reader, tmp_path):
    path, read = reader(tmp_path)
    os.mkfifo(path)
    assert "not a regular file" in refusal(read)


@each_reader
def test_a_folder_in_its_place(reader, tmp_path):
    path, read = reader(tmp_path)
    path.mkdir()
    assert str(tmp_path) in refusal(read)


@each_reader
def test_a_link_to_a_device(reader, tmp_path):
    path, read = reader(tmp_path)
    path.symlink_to("/dev/zero")
    message = refusal(read)
    assert str(tmp_path) in message
    assert path.name in message


@each_reader
def test_a_file_that_may_not_be_read(reader, tmp_path, monkeypatch):
    path, read = reader(tmp_path)
    path.write_text("{}")

    def refuse(file, *args, **kwargs):  # the tests may run as root, who may read all
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr("builtins.open", refuse)
    message = refusal(read)
    assert "Permission denied" in message
    assert str(path) in message


def test_a_header(tmp_path):
    header = TOO_MUCH["keys with spaces"]()
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    assert f"the header of {path} is too large" in refusal(lambda: open_checkpoint(path))
