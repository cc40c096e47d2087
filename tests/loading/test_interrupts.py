"""Loading that is interrupted at any instruction: the model is as it was, or loaded."""

import contextlib
import gc
import os
import random
import struct
import sys
import tempfile
import threading
import time
import warnings

import pytest
import torch
from safetensors.torch import save, save_file
from torch import nn

from anydevice.loading import load_checkpoint_in_model

if sys.platform == "win32":
    pytest.skip("signals", allow_module_level=True)


def net(value):
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(20)), nn.BatchNorm1d(16))
    model.requires_grad_(False)
    for tensor in model.state_dict().values():
        tensor.fill_(value)
    return model.requires_grad_(True)


@pytest.fixture
def files(tmp_path):
    state = net(2).state_dict()
    save_file(state, tmp_path / "model.safetensors")
    torch.save(state, tmp_path / "model.bin")
    return [tmp_path / "model.safetensors", tmp_path / "model.bin"]


def values(model):
    return {float(t.flatten()[0]) for t in model.state_dict().values() for t in (t.cpu(),)}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"device_map": "disk", "dtype": torch.float16},
        {"device_map": {"": "sim:0"}},
        {"dtype": torch.float64, "preload": True},
    ],
)
def test_at_random_moments(files, sim, interrupted, options, tmp_path):
    def load(model, number):
        load_checkpoint_in_model(
            model, files[number % 2], offload_folder=tmp_path / str(number), **options
        )

    load(net(1), 0)
    start = time.perf_counter()
    load(net(1), 1)
    usual = time.perf_counter() - start
    chance = random.Random(7)
    threads, descriptors = threading.enumerate(), len(os.listdir("/dev/fd"))
    filters = list(warnings.filters)
    stopped = 0
    for number in range(2, 32):
        model = net(1)
        objects = [id(parameter) for parameter in model.parameters()]
        error = interrupted(lambda m=model, n=number: load(m, n), 2 * usual * chance.random())
        stopped += error is not None
        assert values(model) == {2.0} or (error is not None and values(model) == {1.0})
        assert error is None or error.args == ()
        assert [id(parameter) for parameter in model.parameters()] == objects
        assert threading.enumerate() == threads
        assert len(os.listdir("/dev/fd")) == descriptors
        assert warnings.filters == filters
        assert gc.isenabled()
        load(model, number)
        assert values(model) == {2.0}
    assert stopped


def test_what_is_loaded_under_inference_mode_can_be_trained(tmp_path, sim):
    save_file(net(2).state_dict(), tmp_path / "model.safetensors")
    for device_map in (None, "disk", "sim:0"):
        for dtype in (None, torch.float64):
            with torch.inference_mode():
                model = net(1)
                load_checkpoint_in_model(
                    model,
                    tmp_path / "model.safetensors",
                    None if device_map is None else {"": device_map},
                    dtype=dtype,
                    offload_folder=tempfile.mkdtemp(dir=tmp_path),
                )
            assert not any(t.is_inference() for t in model.state_dict().values())
            sum(p.sum() for p in model.parameters()).backward()
            assert all(p.grad is not None for p in model.parameters())


def test_more_shards_than_files_may_be_open(tmp_path):
    resource = pytest.importorskip("resource")
    index = {}
    shard = save({"w0000": torch.zeros(2, dtype=torch.int64)})
    for number in range(2000):
        content = shard.replace(b"w0000", b"w%04d" % number)[:-16] + struct.pack("<2q", number, 7)
        (tmp_path / f"{number}.safetensors").write_bytes(content)
        index[f"w{number:04}"] = f"{number}.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(
        f'{{"weight_map": {index}}}'.replace("'", '"')
    )
    model = nn.Module()
    for name in index:
        model.register_buffer(name, torch.zeros(2, dtype=torch.int64))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (max(256, len(os.listdir("/dev/fd")) + 40), before[1])
        )
        load_checkpoint_in_model(model, tmp_path)
        assert all(model.get_buffer(f"w{n:04}").tolist() == [n, 7] for n in range(2000))
        opened = []
        with contextlib.suppress(OSError):
            while True:
                opened.append(open(os.devnull))  # noqa: SIM115
        with pytest.raises(ValueError, match=r"Too many open files.*ulimit -n"):
            load_checkpoint_in_model(model, tmp_path / "0.safetensors")
        for file in opened:
            file.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
