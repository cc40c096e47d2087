import json
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from anydevice.checkpoint import open_checkpoint
from anydevice.checkpoint.find import choose
from anydevice.checkpoint.index_file import read_index
from anydevice.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsafeCheckpointError,
)


def shard(folder, name, **tensors):
    save_file({k: torch.full((2,), float(v)) for k, v in tensors.items()}, folder / name)


def index(folder, weight_map, name="model.safetensors.index.json", **more):
    path = folder / name
    path.write_text(json.dumps({"metadata": {"total_size": 16}, "weight_map": weight_map, **more}))
    return path


@pytest.fixture
def sharded(tmp_path):
    shard(tmp_path, "model-00001-of-00002.safetensors", a=1, b=2)
    shard(tmp_path, "model-00002-of-00002.safetensors", c=3)
    index(
        tmp_path,
        {
            "a": "model-00001-of-00002.safetensors",
            "b": "model-00001-of-00002.safetensors",
            "c": "model-00002-of-00002.safetensors",
        },
    )
    return tmp_path


@pytest.mark.parametrize("path", ["foldr/model.safetensors", "model.safetensors.index.json"])
def test_a_mistyped_path_to_a_file_is_not_looked_for_on_the_hub(path):
    with pytest.raises(CheckpointNotFoundError, match="no such file or folder"):
        open_checkpoint(path)


def values(checkpoint):
    return {name: checkpoint.tensor(name)[0].item() for name in checkpoint}


# ---------------------------------------------------------------------- files, indexes, folders


def test_a_folder_an_index_and_a_file(sharded):
    for path in (sharded, sharded / "model.safetensors.index.json"):
        assert values(open_checkpoint(path)) == {"a": 1, "b": 2, "c": 3}
        assert values(open_checkpoint(str(path))) == {"a": 1, "b": 2, "c": 3}
    one = sharded / "model-00002-of-00002.safetensors"
    assert values(open_checkpoint(one)) == {"c": 3}
    checkpoint = open_checkpoint(sharded)
    assert checkpoint["c"].file == str(one)
    assert checkpoint["c"].nbytes == 8
    assert str(sharded) in repr(checkpoint)


def test_complete_shards_need_no_index(sharded):
    (sharded / "model.safetensors.index.json").unlink()
    assert values(open_checkpoint(sharded)) == {"a": 1, "b": 2, "c": 3}
    (sharded / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(
        CheckpointNotFoundError, match="lacks shards of its weights: model-00001-of-00002"
    ):
        open_checkpoint(sharded)


def test_a_subfolder(tmp_path):
    (tmp_path / "unet").mkdir()
    shard(tmp_path / "unet", "diffusion_pytorch_model.safetensors", a=1)
    assert values(open_checkpoint(tmp_path, subfolder="unet")) == {"a": 1}
    with pytest.raises(CheckpointNotFoundError, match="vae"):
        open_checkpoint(tmp_path, subfolder="vae")


def test_safetensors_come_before_torch_files(tmp_path):
    torch.save({"a": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    assert values(open_checkpoint(tmp_path)) == {"a": 0}
    shard(tmp_path, "model.safetensors", a=1)
    assert values(open_checkpoint(tmp_path)) == {"a": 1}


@pytest.mark.parametrize(
    ("names", "variant", "expected"),
    [
        (["model.safetensors", "config.json"], None, "model.safetensors"),
        (["weights.safetensors"], None, "weights.safetensors"),
        (["a.pt", "optimizer.pt", "scheduler.pt", "training_args.bin"], None, "a.pt"),
        (["model.safetensors", "model.fp16.safetensors"], None, "model.safetensors"),
        (["model.safetensors", "model.fp16.safetensors"], "fp16", "model.fp16.safetensors"),
        (["model.fp16.safetensors"], None, "model.fp16.safetensors"),
        (["model.safetensors", "adapter_model.safetensors"], None, "model.safetensors"),
        (["consolidated.safetensors", "model.safetensors.index.json"], None, "INDEX"),
        (["pytorch_model.bin.index.json", "pytorch_model-00001-of-00001.bin"], None, "INDEX"),
        (["model.safetensors.index.fp16.json", "model.safetensors.index.json"], "fp16", "INDEX"),
        (["pytorch_model.bin.index.json", "model.safetensors"], None, "model.safetensors"),
        (["custom.index.json"], None, "INDEX"),
        (["diffusion_pytorch_model.fp16.bin"], "fp16", "diffusion_pytorch_model.fp16.bin"),
        (["model.safetensors.index.json", "model.fp16.safetensors"], None, "INDEX"),
        (["model.safetensors.index.fp16.json", "pytorch_model.bin"], None, "pytorch_model.bin"),
        (["model.fp16.safetensors.index.json", "model.bin"], None, "model.bin"),
        (["model.fp16.safetensors", "pytorch_model.bin"], None, "pytorch_model.bin"),
        (["model.fp16.safetensors", "other.safetensors"], None, "other.safetensors"),
        (["model.fp16.safetensors", "model.fp16.bin"], None, "model.fp16.safetensors"),
        (["model.safetensors.index.fp16.json", "model.bf16.bin"], "fp16", "INDEX"),
        (["v1.5.safetensors", "model.fp16.safetensors"], None, "v1.5.safetensors"),
        (["unet.fp16.safetensors", "unet.safetensors"], "fp16", "unet.fp16.safetensors"),
    ],
)
def test_which_file_is_chosen(names, variant, expected):
    choice = choose(names, variant, "here")
    if expected == "INDEX":
        wanted = [n for n in names if ".index" in n and (variant is None or variant in n)]
        assert choice.index_name == wanted[0]
    else:
        assert choice == (None, [expected])


@pytest.mark.parametrize(
    ("names", "variant", "words"),
    [
        ([], None, "no file"),
        (["config.json", "tokenizer.model"], None, "no weights"),
        (["a.safetensors", "b.safetensors"], None, "a.safetensors, b.safetensors"),
        (["a.index.json", "b.index.json"], None, "several"),
        (["model.safetensors"], "fp16", "'fp16'"),
        (["model.fp16.safetensors", "model.bf16.safetensors"], "int8", "model.bf16"),
        (["model.fp16.safetensors", "model.bf16.safetensors"], None, "or its variant"),
        (["model.safetensors.index.fp16.json", "model.bf16.bin"], None, "or its variant"),
        (["unet.fp16.safetensors", "unet.safetensors"], None, "unet.fp16"),
        (["model.safetensors"], "el", "'el'"),
    ],
)
def test_no_choice(names, variant, words):
    with pytest.raises(CheckpointNotFoundError, match=words) as caught:
        choose(names, variant, "/some/where")
    assert "/some/where" in str(caught.value)


def test_variants_of_shards(tmp_path):
    shard(tmp_path, "model.fp16-00001-of-00001.safetensors", a=1)
    shard(tmp_path, "model.safetensors", a=2)
    index(
        tmp_path,
        {"a": "model.fp16-00001-of-00001.safetensors"},
        name="model.safetensors.index.fp16.json",
    )
    assert values(open_checkpoint(tmp_path, variant="fp16")) == {"a": 1}
    assert values(open_checkpoint(tmp_path)) == {"a": 2}


def test_shards_of_another_variant_are_not_taken_for_the_weights(tmp_path):
    shard(tmp_path, "model.fp16.safetensors", a=1)
    shard(tmp_path, "model-00001-of-00001.safetensors", a=2)
    assert values(open_checkpoint(tmp_path)) == {"a": 2}
    index(tmp_path, {"a": "model-00001-of-00001.safetensors"})
    assert values(open_checkpoint(tmp_path)) == {"a": 2}
    shard(tmp_path, "model-00001-of-00001.bf16.safetensors", a=3)
    assert values(open_checkpoint(tmp_path, variant="bf16")) == {"a": 3}
    (tmp_path / "model.fp16.safetensors").unlink()
    assert values(open_checkpoint(tmp_path)) == {"a": 2}


def test_names_that_the_index_does_not_list(tmp_path):
    shard(tmp_path, "one.safetensors", a=1, b=2)
    shard(tmp_path, "two.safetensors", b=3, c=4)
    path = index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    assert values(open_checkpoint(path)) == {"a": 1, "b": 3, "c": 4}
    path = index(tmp_path, {"a": "one.safetensors", "c": "two.safetensors"})
    with pytest.raises(CorruptCheckpointError, match="'b'"):
        open_checkpoint(path)


def test_a_name_that_its_shard_lacks(tmp_path):
    shard(tmp_path, "one.safetensors", a=1)
    path = index(tmp_path, {"a": "one.safetensors", "b": "one.safetensors"})
    with pytest.raises(CorruptCheckpointError, match="'b'"):
        open_checkpoint(path)


# ---------------------------------------------------------------------- what is not there


@pytest.mark.parametrize("name", ["nothing.safetensors", "no/such/folder/at/all", "a b", "../x"])
def test_no_such_path(name, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CheckpointNotFoundError, match=os.path.basename(name)):
        open_checkpoint(tmp_path / name)


def test_a_missing_shard(sharded):
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointNotFoundError, match="model-00002-of-00002"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("name", ["m.safetensors", "m.bin", "m.index.json"])
def test_an_empty_file(name, tmp_path):
    (tmp_path / name).touch()
    with pytest.raises(CorruptCheckpointError, match=name):
        open_checkpoint(tmp_path / name)


def test_a_folder_in_a_files_place(tmp_path):
    (tmp_path / "shard.safetensors").mkdir()
    with pytest.raises(CorruptCheckpointError, match="folder"):
        open_checkpoint(index(tmp_path, {"a": "shard.safetensors"}))
    (tmp_path / "model.safetensors").mkdir()
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"no weights.* model\.safetensors/"):
        open_checkpoint(tmp_path)


def test_a_pointer_of_git_lfs(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n")
    with pytest.raises(CorruptCheckpointError, match="git lfs pull"):
        open_checkpoint(path)


# ---------------------------------------------------------------------- what must not be followed


@pytest.mark.parametrize(
    "entry",
    ["../x.safetensors", "/etc/passwd", "a/../../x", "..\\x", "C:\\x", "", "a\0b", "sub/../../x"],
)
def test_an_entry_that_leaves_the_folder(entry, tmp_path):
    (tmp_path / "in").mkdir()
    shard(tmp_path, "x.safetensors", a=1)
    path = index(tmp_path / "in", {"a": entry})
    with pytest.raises(UnsafeCheckpointError, match="outside") as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)


def test_an_entry_in_a_subfolder_is_fine(tmp_path):
    (tmp_path / "sub").mkdir()
    shard(tmp_path / "sub", "x.safetensors", a=1)
    assert values(open_checkpoint(index(tmp_path, {"a": "sub/x.safetensors"}))) == {"a": 1}


def test_a_link_that_leaves_the_folder(tmp_path):
    (tmp_path / "in").mkdir()
    shard(tmp_path, "x.safetensors", a=1)
    (tmp_path / "in" / "link.safetensors").symlink_to(tmp_path / "x.safetensors")
    with pytest.raises(UnsafeCheckpointError, match="link"):
        open_checkpoint(index(tmp_path / "in", {"a": "link.safetensors"}))
    (tmp_path / "in" / "folder").symlink_to(tmp_path)
    with pytest.raises(UnsafeCheckpointError, match="link"):
        open_checkpoint(index(tmp_path / "in", {"a": "folder/x.safetensors"}))
    # The user's own word counts: a link that is named itself, or a folder reached over one.
    assert values(open_checkpoint(tmp_path / "in" / "link.safetensors")) == {"a": 1}
    (tmp_path / "other").symlink_to(tmp_path / "in")
    shard(tmp_path / "in", "model.safetensors", a=2)
    assert values(open_checkpoint(tmp_path / "other")) == {"a": 2}


def test_a_link_within_the_folder_is_fine(tmp_path):
    shard(tmp_path, "x.safetensors", a=1)
    (tmp_path / "link.safetensors").symlink_to("x.safetensors")
    assert values(open_checkpoint(index(tmp_path, {"a": "link.safetensors"}))) == {"a": 1}


def test_the_hubs_own_links_are_followed_and_no_others(tmp_path):
    repo = tmp_path / "models--me--mine"
    snapshot = repo / "snapshots" / ("0" * 40)
    (repo / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    shard(repo / "blobs", "beef", a=1)
    (snapshot / "model.safetensors").symlink_to("../../blobs/beef")
    assert values(open_checkpoint(snapshot)) == {"a": 1}
    shard(tmp_path, "x.safetensors", a=2)
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to("../../../x.safetensors")
    with pytest.raises(UnsafeCheckpointError):
        open_checkpoint(snapshot)


def test_a_snapshot_over_a_link_is_still_the_hubs(tmp_path):
    repo = tmp_path / "models--me--mine"
    (repo / "blobs").mkdir(parents=True)
    (repo / "snapshots" / "x").mkdir(parents=True)
    shard(repo / "blobs", "beef", a=1)
    (repo / "snapshots" / "x" / "model.safetensors").symlink_to("../../blobs/beef")
    (tmp_path / "mine").symlink_to(repo / "snapshots" / "x")
    assert values(open_checkpoint(tmp_path / "mine")) == {"a": 1}


def test_blobs_that_are_a_link_are_not_the_hubs(tmp_path):
    snapshot = tmp_path / "models--evil" / "snapshots" / "x"
    snapshot.mkdir(parents=True)
    (tmp_path / "private").mkdir()
    shard(tmp_path / "private", "model.safetensors", a=1)
    (tmp_path / "models--evil" / "blobs").symlink_to(tmp_path / "private")
    (snapshot / "model.safetensors").symlink_to("../../blobs/model.safetensors")
    with pytest.raises(UnsafeCheckpointError, match="leads out of its folder"):
        open_checkpoint(snapshot)


# ---------------------------------------------------------------------- indexes from strangers


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty|JSON"),
        ("[]", "object"),
        ("{}", "weight_map"),
        ('{"weight_map": {}}', "weight_map"),
        ('{"weight_map": [1]}', "weight_map"),
        ('{"weight_map": {"a": 3}}', "3"),
        ('{"weight_map": {"a": null}}', "None"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "twice"),
        ('{"weight_map": {"a": "x"}, "metadata": {"total_size": NaN}}', "NaN"),
        ('{"weight_map": {"a": "x"}, "metadata": {"total_size": Infinity}}', "Infinity"),
        ('{"weight_map": {"a": "x"}, "metadata": {"total_size": 1e999}}', "total_size"),
        ('{"weight_map": {"a": "x"}, "metadata": {"total_size": -1}}', "total_size"),
        ('{"weight_map": {"a": "x"}, "metadata": {"total_size": "7"}}', "total_size"),
        ('{"weight_map": ' + "[" * 100_000, "JSON"),
    ],
)
def test_a_bad_index_is_refused_with_the_file_named(text, words, tmp_path):
    path = tmp_path / "bad.index.json"
    path.write_text(text)
    with pytest.raises(CorruptCheckpointError, match=words) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)


def test_a_total_that_is_a_whole_float_is_fine(tmp_path):
    shard(tmp_path, "x.safetensors", a=1)
    path = index(tmp_path, {"a": "x.safetensors"}, metadata={"total_size": 8.0})
    assert values(open_checkpoint(path)) == {"a": 1}


def test_an_index_of_ten_million_names_is_not_even_read(tmp_path):
    path = tmp_path / "many.index.json"
    with open(path, "wb") as file:
        file.write(b'{"weight_map":{')
        file.truncate(270_000_000)  # what ten million names take; sparse, so the disk stays empty
    with pytest.raises(CorruptCheckpointError, match=r"many\.index\.json"):
        open_checkpoint(path)


@settings.get_profile("readers")
@given(
    st.one_of(
        st.binary(max_size=60),
        st.dictionaries(
            st.sampled_from(["weight_map", "metadata", "x"]),
            st.recursive(
                st.one_of(
                    st.none(), st.booleans(), st.floats(), st.integers(), st.text(max_size=5)
                ),
                lambda inner: st.dictionaries(
                    st.one_of(st.just("total_size"), st.text(max_size=3)), inner, max_size=3
                ),
                max_leaves=6,
            ),
        ).map(lambda data: json.dumps(data).encode()),
        st.dictionaries(
            st.text(max_size=2),
            st.one_of(st.just("x.safetensors"), st.text("./\\x\0é~", max_size=8)),
            min_size=1,
            max_size=3,
        ).map(lambda weights: json.dumps({"weight_map": weights}).encode()),
    )
)
def test_fuzz_indexes(tmp_path, raw):
    folder = tmp_path / "in"
    folder.mkdir(exist_ok=True)
    path = folder / "fuzz.index.json"
    path.write_bytes(raw)
    try:
        found = read_index(str(path))
    except CheckpointError as error:
        found, refusal = None, str(error)
    if found is None:
        assert str(path) in refusal
    else:
        assert all(os.path.realpath(file).startswith(f"{folder}/") for file in found.values())


def test_an_index_may_be_the_mapping_itself_and_spell_files_from_here(tmp_path):
    one = torch.ones(2)
    save_file({"a": one}, tmp_path / "one.safetensors")
    save_file({"b": one.clone(), "c": one.clone()}, tmp_path / "two.safetensors")
    path = tmp_path / "model.safetensors.index.json"
    for mapping in (
        {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"},
        {"a": "./one.safetensors", "b": "two.safetensors", "c": "././two.safetensors"},
    ):
        for whole in (
            mapping,
            {"weight_map": mapping},
            {"metadata": {"total_size": 24}, **mapping},
        ):
            path.write_text(json.dumps(whole))
            checkpoint = open_checkpoint(tmp_path)
            assert {name: checkpoint.tensor(name).tolist() for name in checkpoint} == {
                name: [1, 1] for name in "abc"
            }


def test_a_missing_shard_is_named(tmp_path):
    one = torch.ones(2)
    for number in (1, 3):
        save_file({f"w{number}": one}, tmp_path / f"model-0000{number}-of-00003.safetensors")
    with pytest.raises(CheckpointNotFoundError) as error:
        open_checkpoint(tmp_path)
    assert "lacks shards of its weights: model-00002-of-00003.safetensors." in str(error.value)
    save_file({"w": one}, tmp_path / "pytorch_model-00001-of-99999999.safetensors")
    with pytest.raises(CheckpointNotFoundError) as error:
        open_checkpoint(tmp_path)
    assert len(str(error.value)) < 1000
