"""The Hub, without it: a cache folder laid out by hand, and a fake of what needs a network."""

import json
import os
import types
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.errors import OfflineModeIsEnabled, RepositoryNotFoundError
from safetensors.torch import save_file

from anydevice.checkpoint import fetch_checkpoint, open_checkpoint
from anydevice.errors import CheckpointNotFoundError, UnsafeCheckpointError

COMMIT = "a" * 40


class FakeHub:
    """A repository, the calls made to it, and its cache in the real layout."""

    def __init__(self, cache, files):
        self.cache = cache
        self.files = files
        self.asked = []
        self.revisions = []
        self.tokens = []

    def list_repo_files(self, repo_id, *, revision=None):
        self.revisions.append(revision)
        return list(self.files)

    def snapshot_download(self, repo_id, *, revision, token, allow_patterns, local_files_only):
        import fnmatch

        assert not local_files_only
        self.asked.append(allow_patterns)
        self.revisions.append(revision)
        self.tokens.append(token)
        for name, write in self.files.items():
            if any(fnmatch.fnmatch(name, pattern) for pattern in allow_patterns):
                put_in_cache(self.cache, repo_id, name, write)
        return str(self.cache / f"models--{repo_id.replace('/', '--')}" / "snapshots" / COMMIT)


def put_in_cache(cache, repo_id, name, write, ref="main"):
    repo = cache / f"models--{repo_id.replace('/', '--')}"
    snapshot = repo / "snapshots" / COMMIT / name
    blob = repo / "blobs" / name.replace("/", "_")
    for folder in (snapshot.parent, blob.parent, repo / "refs"):
        folder.mkdir(parents=True, exist_ok=True)
    (repo / "refs" / ref).write_text(COMMIT)
    write(blob)
    if not snapshot.is_symlink():
        snapshot.symlink_to(os.path.relpath(blob, snapshot.parent))


def weights(**tensors):
    return lambda path: save_file({k: torch.full((1,), float(v)) for k, v in tensors.items()}, path)


def text(content):
    return lambda path: Path(path).write_text(content)


def index(**weight_map):
    return text(json.dumps({"weight_map": weight_map}))


def torch_file(**tensors):
    return lambda path: torch.save(
        {k: torch.full((1,), float(v)) for k, v in tensors.items()}, path
    )


@pytest.fixture
def hub(tmp_path, monkeypatch):
    def make(**files):
        fake = FakeHub(tmp_path, {k.replace("__", "/"): v for k, v in files["files"].items()})
        monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
        monkeypatch.setattr(
            huggingface_hub.HfApi,
            "list_repo_files",
            lambda self, repo_id, revision=None: fake.list_repo_files(repo_id, revision=revision),
        )
        return fake

    return make


def values(checkpoint):
    return {name: checkpoint.tensor(name)[0].item() for name in checkpoint}


def test_only_the_weights_are_fetched(hub):
    fake = hub(
        files={
            "model.safetensors": weights(a=1),
            "model.fp16.safetensors": weights(a=2),
            "pytorch_model.bin": torch_file(a=3),
            "README.md": text("hello"),
            "config.json": text("{}"),
        }
    )
    checkpoint = open_checkpoint("me/mine", revision="v1", token="secret")
    assert values(checkpoint) == {"a": 1}
    assert fake.asked == [["model.safetensors"]]
    assert fake.revisions == ["v1", "v1"]
    assert fake.tokens == ["secret"]
    assert values(open_checkpoint("me/mine", variant="fp16")) == {"a": 2}
    assert fake.asked[-1] == ["model.fp16.safetensors"]


def test_shards_are_fetched_of_the_same_commit_as_their_index(hub):
    fake = hub(
        files={
            "model.safetensors.index.json": index(a="m-1[x].safetensors", b="m-2.safetensors"),
            "m-1[x].safetensors": weights(a=1),
            "m-2.safetensors": weights(b=2),
            "m-3.safetensors": weights(c=3),
        }
    )
    assert values(open_checkpoint("mine")) == {"a": 1, "b": 2}
    assert fake.asked == [
        ["model.safetensors.index.json"],
        ["m-1[[]x].safetensors", "m-2.safetensors"],
    ]
    assert fake.revisions == [None, None, COMMIT]


def test_torch_files_where_there_is_nothing_else(hub):
    fake = hub(files={"pytorch_model.bin": torch_file(a=3), "optimizer.pt": torch_file(a=0)})
    assert values(open_checkpoint("me/mine")) == {"a": 3}
    assert fake.asked == [["pytorch_model.bin"]]


def test_a_subfolder(hub):
    fake = hub(
        files={
            "unet__model.safetensors.index.json": index(a="x.safetensors"),
            "unet__x.safetensors": weights(a=1),
            "model.safetensors": weights(b=1),
        }
    )
    assert values(open_checkpoint("me/mine", subfolder="unet")) == {"a": 1}
    assert fake.asked == [["unet/model.safetensors.index.json"], ["unet/x.safetensors"]]


def test_config_files_come_along_for_from_pretrained(hub):
    hub(files={"model.safetensors": weights(a=1), "config.json": text("{}"), "x.md": text("")})
    folder = fetch_checkpoint("me/mine")
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert values(open_checkpoint(folder)) == {"a": 1}
    assert fetch_checkpoint(folder) == folder


def test_an_index_of_the_hub_may_not_leave_either(hub):
    hub(files={"model.safetensors.index.json": index(a="../../../x.safetensors")})
    with pytest.raises(UnsafeCheckpointError, match="outside"):
        open_checkpoint("me/mine")


def test_no_weights(hub):
    hub(files={"README.md": text("hello")})
    with pytest.raises(CheckpointNotFoundError, match=r"me/mine.*README\.md"):
        open_checkpoint("me/mine")


# ---------------------------------------------------------------------- without a network


@pytest.fixture
def offline(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def test_offline_the_cache_is_used(offline, monkeypatch):
    put_in_cache(offline, "me/mine", "model.safetensors", weights(a=1))
    real = huggingface_hub.snapshot_download
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda *args, **kwargs: real(*args, cache_dir=offline, **kwargs),
    )
    assert values(open_checkpoint("me/mine")) == {"a": 1}
    assert values(open_checkpoint("me/mine", revision=COMMIT)) == {"a": 1}
    with pytest.raises(CheckpointNotFoundError, match="'v9'"):
        open_checkpoint("me/mine", revision="v9")


def test_offline_and_not_in_the_cache(offline, monkeypatch):
    real = huggingface_hub.snapshot_download
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda *args, **kwargs: real(*args, cache_dir=offline, **kwargs),
    )
    with pytest.raises(CheckpointNotFoundError, match="HF_HUB_OFFLINE") as caught:
        open_checkpoint("me/mine")
    assert "'me/mine'" in str(caught.value)
    with pytest.raises(CheckpointNotFoundError, match="me/mine"):
        fetch_checkpoint("me/mine")


def test_a_cut_connection_falls_back_to_the_cache(tmp_path, monkeypatch):
    put_in_cache(tmp_path, "me/mine", "model.safetensors", weights(a=1))

    def cut(self, repo_id, revision=None):
        raise ConnectionError("no route")

    calls = []

    def snapshot(repo_id, *, local_files_only, **kwargs):
        calls.append(local_files_only)
        return str(tmp_path / "models--me--mine" / "snapshots" / COMMIT)

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", cut)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert values(open_checkpoint("me/mine")) == {"a": 1}
    assert calls == [True]


def test_no_such_repository(monkeypatch):
    def missing(self, repo_id, revision=None):
        response = types.SimpleNamespace(status_code=404, headers={}, request=None)
        raise RepositoryNotFoundError("404", response=response)

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", missing)
    with pytest.raises(CheckpointNotFoundError, match=r"me/mine.*token"):
        open_checkpoint("me/mine")


def test_offline_error_of_the_listing(monkeypatch, tmp_path):
    def refuse(self, repo_id, revision=None):
        raise OfflineModeIsEnabled("offline")

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", refuse)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: str(tmp_path))
    with pytest.raises(CheckpointNotFoundError, match="no weights"):
        open_checkpoint("me/mine")
