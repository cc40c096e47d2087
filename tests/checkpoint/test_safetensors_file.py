import json
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from anydevice.checkpoint import open_checkpoint
from anydevice.checkpoint.mapped import backing_of, map_file
from anydevice.checkpoint.safetensors_file import read_header
from anydevice.errors import CheckpointError, CorruptCheckpointError

ENTRY = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32),
    *(torch.uint64, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
    *(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float4_e2m1fn_x2),
]


def as_bytes(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def write(path, header, data=bytes(16)):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_reads_as_it_was_written(dtype, tmp_path):
    raw = torch.arange(6 * dtype.itemsize, dtype=torch.uint8) % 2
    tensor = raw.view(dtype).reshape(2, 3)
    save_file({"t": tensor}, tmp_path / "m.safetensors")
    checkpoint = open_checkpoint(tmp_path / "m.safetensors")
    assert checkpoint["t"].dtype is dtype
    assert checkpoint["t"].shape == (2, 3)
    assert checkpoint["t"].nbytes == tensor.nbytes
    found = checkpoint.tensor("t")
    assert found.dtype is dtype
    assert found.shape == (2, 3)
    assert as_bytes(found) == as_bytes(tensor)


def test_tensors_are_views_and_returned_without_reading(tmp_path):
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.arange(10.0), "b": torch.ones(3, 4)}, path)
    checkpoint = open_checkpoint(path)
    assert list(checkpoint) == ["a", "b"]
    assert checkpoint.nbytes == 88
    place = backing_of(checkpoint.tensor("b"))
    assert (place.path, place.offset, place.nbytes) == (str(path), checkpoint["b"].offset, 48)


def test_an_unaligned_tensor_is_copied(tmp_path):
    data = bytes([7]) + torch.arange(3.0).numpy().tobytes()
    header = {
        "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "b": {"dtype": "F32", "shape": [3], "data_offsets": [1, 13]},
    }
    text = json.dumps(header).encode()
    path = write(tmp_path / "m.safetensors", text + b" " * (-(len(text)) % 8), data)
    checkpoint = open_checkpoint(path)
    assert checkpoint.tensor("b").tolist() == [0.0, 1.0, 2.0]
    assert backing_of(checkpoint.tensor("b")) is None
    assert backing_of(checkpoint.tensor("a")) is not None


def test_what_the_library_accepts_beyond_the_usual(tmp_path):
    path = tmp_path / "m.safetensors"
    for header, data in [
        ({"__metadata__": {"format": "pt"}}, b""),
        ({"__metadata__": None, "a": ENTRY}, bytes(16)),
        (json.dumps({"a": ENTRY}).encode() + b"   ", bytes(16)),
        ({"a": {**ENTRY, "note": 1}}, bytes(16)),
        ({"a": ENTRY, "z": {"dtype": "F32", "shape": [0, 5], "data_offsets": [16, 16]}}, bytes(16)),
        ({"a": {"dtype": "F64", "shape": [], "data_offsets": [0, 8]}}, bytes(8)),
        ({"": ENTRY}, bytes(16)),
    ]:
        write(path, header, data)
        ours = open_checkpoint(path)
        assert {n: (i.dtype, i.shape) for n, i in ours.items()} == {
            n: (t.dtype, tuple(t.shape)) for n, t in load_file(path).items()
        }


BAD_HEADERS = {
    "not JSON": (b"{", "JSON"),
    "cut in a string": (b'{"a', "JSON"),
    "not UTF-8": (b'{"\xff\xfe": 1}', "JSON"),
    "an array": (b"[]", "begin"),
    "a space first": (b' {"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}', "begin"),
    "NUL behind": (b"{}\0", "JSON"),
    "empty": (b"", "begin"),
    "nested deeply": (b'{"a":' + b"[" * 200_000, "JSON"),
    "NaN": (b'{"a":NaN}', "NaN"),
    "a huge number": (b'{"a":' + b"9" * 10_000 + b"}", "JSON"),
    "a repeated name": (
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
        b'"a":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}',
        "twice",
    ),
    "a repeated field": (
        b'{"a":{"dtype":"F32","dtype":"F32","shape":[4],"data_offsets":[0,16]}}',
        "twice",
    ),
    "metadata of numbers": ({"__metadata__": {"a": 1}, "a": ENTRY}, "__metadata__"),
    "an entry that is none": ({"a": 3}, "no dtype"),
    "a field missing": ({"a": {"dtype": "F32", "shape": [4]}}, "no dtype"),
    "an unknown dtype": ({"a": {**ENTRY, "dtype": "F33"}}, "F33"),
    "a dtype that is no text": ({"a": {**ENTRY, "dtype": 5}}, "dtype"),
    "a dtype that torch lacks": (
        {"a": {"dtype": "F6_E2M3", "shape": [16], "data_offsets": [0, 12]}},
        "F6_E2M3",
    ),
    "a negative size": ({"a": {**ENTRY, "shape": [-4]}}, "shape"),
    "a size that is no integer": ({"a": {**ENTRY, "shape": [4.0]}}, "shape"),
    "a size that is true": ({"a": {**ENTRY, "shape": [4, True]}}, "shape"),
    "a shape that is no list": ({"a": {**ENTRY, "shape": 4}}, "shape"),
    "sizes that overflow": (
        {
            "a": ENTRY,
            "b": {"dtype": "F32", "shape": [2**40, 2**40, 0], "data_offsets": [16, 16]},
        },
        "large",
    ),
    "a size that overflows": (
        {"a": ENTRY, "b": {"dtype": "F32", "shape": [2**63, 0], "data_offsets": [16, 16]}},
        "shape",
    ),
    "a size of minus zero": (b'{"a":{"dtype":"F32","shape":[-0],"data_offsets":[0,0]}}', "-0"),
    "half a character": (b'{"\\ud800":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}', "JSON"),
    "a shape of very many sizes": ({"a": {**ENTRY, "shape": [1] * 100_000}}, "needs"),
    "an offset of very many digits": ({"a": {**ENTRY, "data_offsets": [0, 10**4000]}}, "needs"),
    "offsets of very many digits": (
        {"a": {**ENTRY, "data_offsets": [10**4000, 10**4000 + 16]}},
        "data_offsets",
    ),
    "offsets backwards": ({"a": {**ENTRY, "data_offsets": [16, 0]}}, "bytes"),
    "three offsets": ({"a": {**ENTRY, "data_offsets": [0, 16, 16]}}, "data_offsets"),
    "a negative offset": ({"a": {**ENTRY, "data_offsets": [-16, 0]}}, "data_offsets"),
    "shape and bytes disagree": ({"a": {**ENTRY, "shape": [3]}}, "needs"),
    "beyond the end": (
        {"a": {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]}},
        "ends",
    ),
    "far beyond the end": (
        {"a": {"dtype": "U8", "shape": [2**62], "data_offsets": [0, 2**62]}},
        "ends",
    ),
    "an overlap": (
        {
            "a": ENTRY,
            "b": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]},
        },
        "overlaps",
    ),
    "one place twice": ({"a": ENTRY, "b": ENTRY}, "overlaps"),
    "a gap": (
        {
            "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
            "b": {"dtype": "F32", "shape": [1], "data_offsets": [12, 16]},
        },
        "gap",
    ),
    "a gap at the start": ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [12, 16]}}, "gap"),
    "bytes left over": ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, "end at"),
    "an odd row of 4-bit numbers": (
        {"a": {"dtype": "F4", "shape": [4, 8, 1], "data_offsets": [0, 16]}},
        "odd",
    ),
}


@pytest.mark.parametrize("what", BAD_HEADERS)
def test_a_bad_header_is_refused_with_the_file_named(what, tmp_path):
    header, words = BAD_HEADERS[what]
    path = write(tmp_path / "bad.safetensors", header)
    with pytest.raises(CorruptCheckpointError, match=words) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("length", [17, 1 << 20, 100_000_001, 2**63, 2**64 - 1])
def test_a_header_length_that_lies(length, tmp_path):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b'{"a": 1}' + bytes(8))
    with pytest.raises(CorruptCheckpointError, match=r"bad\.safetensors"):
        open_checkpoint(path)


def test_every_truncation_is_refused(tmp_path):
    whole = tmp_path / "m.safetensors"
    save_file({"a": torch.arange(4.0), "b": torch.ones(2, dtype=torch.int8)}, whole)
    raw = whole.read_bytes()
    for size in range(len(raw)):
        cut = tmp_path / "cut.safetensors"
        cut.write_bytes(raw[:size])
        with pytest.raises(CorruptCheckpointError, match=r"cut\.safetensors"):
            open_checkpoint(cut)
    (tmp_path / "longer.safetensors").write_bytes(raw + b"\0")
    with pytest.raises(CorruptCheckpointError):
        open_checkpoint(tmp_path / "longer.safetensors")


PAGE = b"\n<!DOCTYPE html><html><head><title>Log in</title></head><body></body></html>"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n", "git lfs pull"),
        (PAGE, "web page"),
        (b"\xef\xbb\xbf" + PAGE, "web page"),
    ],
)
def test_a_text_in_place_of_the_file_is_told_as_such(content, words, tmp_path):
    (tmp_path / "m.safetensors").write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match=words) as caught:
        open_checkpoint(tmp_path / "m.safetensors")
    assert str(tmp_path / "m.safetensors") in str(caught.value)


# ---------------------------------------------------------------------- fuzzing

NAMES = st.sampled_from(["a", "b", "c", "__metadata__", ""])
NUMBERS = st.one_of(
    st.integers(0, 20),
    st.sampled_from([-1, 2**31, 2**32, 2**62, 2**63, 2**64, 1.5, True, None, "4", 1e400]),
)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(
            ["F32", "U8", "BF16", "F4", "F8_E4M3", "BOOL", "C64", "X", 3, None]
        ),
        "shape": st.one_of(st.lists(NUMBERS, max_size=3), NUMBERS),
        "data_offsets": st.one_of(
            st.tuples(NUMBERS, NUMBERS).map(list), st.lists(NUMBERS, max_size=3)
        ),
    }
)
GARBAGE = st.recursive(
    st.one_of(NUMBERS, st.text(max_size=3)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=3)),
    max_leaves=5,
)


def judge(path):
    """Ours must refuse what the library refuses, in our own words, and else agree with it."""
    try:
        theirs = load_file(path)
    except (SafetensorError, RuntimeError, TypeError, ValueError, OSError, KeyError, OverflowError):
        theirs = None
    try:
        ours = open_checkpoint(path)
    except CheckpointError as error:
        refusal = str(error)
        ours = None
    if ours is None:
        assert str(path) in refusal
        return
    tensors = {name: ours.tensor(name) for name in ours}
    assert theirs is not None, "the library refuses this, and we do not"
    assert tensors.keys() == theirs.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == theirs[name].dtype
        assert tensor.shape == theirs[name].shape
        assert as_bytes(tensor) == as_bytes(theirs[name])


FUZZ = settings.get_profile("readers")


@FUZZ
@given(
    st.dictionaries(NAMES, st.one_of(ENTRIES, ENTRIES, GARBAGE), max_size=4),
    st.binary(max_size=40),
)
def test_fuzz_headers(tmp_path, header, data):
    judge(write(tmp_path / "fuzz.safetensors", header, data))


@FUZZ
@given(
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=4),
    st.integers(-30, 5),
)
def test_fuzz_bytes_of_a_good_file(tmp_path, changes, more):
    path = tmp_path / "fuzz.safetensors"
    save_file(
        {"w": torch.arange(6.0).view(2, 3), "v": torch.ones(5, dtype=torch.int8)},
        path,
        metadata={"format": "pt"},
    )
    raw = bytearray(path.read_bytes())
    for at, value in changes:
        raw[at % len(raw)] = value
    path.write_bytes(bytes(raw[:more]) if more < 0 else bytes(raw) + bytes(more))
    judge(path)


@FUZZ
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["F32", "U8", "BF16", "F64", "BOOL"]),
            st.lists(st.integers(0, 3), max_size=3),
        ),
        max_size=5,
    ),
    st.randoms(use_true_random=False),
)
def test_fuzz_good_layouts_in_any_order(tmp_path, tensors, random):
    sizes = {"F32": 4, "U8": 1, "BF16": 2, "F64": 8, "BOOL": 1}
    header, position = {}, 0
    for number, (dtype, shape) in enumerate(tensors):
        nbytes = sizes[dtype]
        for size in shape:
            nbytes *= size
        header[f"t{number}"] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [position, position + nbytes],
        }
        position += nbytes
    items = list(header.items())
    random.shuffle(items)
    path = write(tmp_path / "fuzz.safetensors", dict(items), bytes(i % 2 for i in range(position)))
    judge(path)
    assert len(read_header(map_file(path))) == len(tensors)
