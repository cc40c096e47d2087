import gc
import logging
import os
import threading

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from anydevice.backend import DeviceBackend
from anydevice.checkpoint import open_checkpoint
from anydevice.checkpoint.mapped import backing_of
from anydevice.errors import (
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DeviceMapError,
    DoesNotFitError,
    ModelError,
    OffloadStoreError,
    UnknownDeviceError,
    UnsafeCheckpointError,
)
from anydevice.loading import applying, load_checkpoint_in_model


class Net(nn.Module):
    """Tied weights, buffers of all kinds, integers, a scalar, no elements."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.norm = nn.BatchNorm1d(8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("ids", torch.arange(5))
        self.register_buffer("nothing", torch.zeros(0, 3))
        self.register_buffer("table", torch.ones(4), persistent=False)


class WithState(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.state = None

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        self.state = state


def on_meta(make=Net):
    with torch.device("meta"):
        return make()


@pytest.fixture
def truth():
    torch.manual_seed(1)
    model = Net()
    model.norm.running_mean.uniform_(2, 3)
    model.scale.fill_(5.0)
    model.ids.add_(7)
    return model


@pytest.fixture
def path(truth, tmp_path):
    state = {k: v for k, v in truth.state_dict().items() if k != "head.weight"}
    save_file(state, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def saved_as(kind, truth, folder):
    state = truth.state_dict()
    if kind == "safetensors":
        del state["head.weight"]
        save_file(state, folder / "m.safetensors")
        return folder / "m.safetensors"
    torch.save(state, folder / "m.bin", _use_new_zipfile_serialization=kind == "zip")
    return folder / "m.bin"


def require_equal(model, truth, dtype=None):
    found = model.state_dict()
    for name, value in truth.state_dict().items():
        want = value.to(dtype) if dtype is not None and value.is_floating_point() else value
        assert found[name].dtype == want.dtype, name
        assert torch.equal(found[name].cpu(), want), name
    assert model.head.weight is model.embed.weight


# ---------------------------------------------------------------------- places and dtypes


@pytest.mark.parametrize("kind", ["safetensors", "zip", "legacy"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, "float16", "auto"])
@pytest.mark.parametrize("empty", [True, False], ids=["empty", "real"])
@pytest.mark.parametrize(
    "device_map",
    [
        None,
        "cpu",
        {"": "sim:0"},
        {"": "disk"},
        {
            "embed": "disk",
            "head": "disk",
            "norm": 1,
            "layers": "sim:0",
            "layers.1": "cpu",
            "": "cpu",
        },
    ],
    ids=["none", "cpu", "sim", "disk", "mixed"],
)
def test_everywhere(sim, kind, dtype, empty, device_map, truth, tmp_path):
    path = saved_as(kind, truth, tmp_path)
    model = on_meta() if empty else Net()
    parameters = dict(model.named_parameters())
    model.embed.weight.note = "kept"
    load_checkpoint_in_model(
        model, path, device_map, dtype=dtype, offload_folder=tmp_path / "offload"
    )
    wanted = {"float16": torch.float16, "auto": None}.get(dtype, dtype)
    require_equal(model, truth, wanted)
    for name, parameter in model.named_parameters():
        assert parameter is parameters[name]
        assert parameter.requires_grad
    assert model.embed.weight.note == "kept"
    places = {"none": "cpu", "cpu": "cpu", "disk": "cpu", "sim:0": "sim:0"}
    if isinstance(device_map, dict) and len(device_map) > 1:
        assert str(model.layers[0].weight.device) == "sim:0"
        assert str(model.layers[1].weight.device) == "cpu"
        assert str(model.norm.running_mean.device) == "sim:1"
    else:
        place = device_map if not isinstance(device_map, dict) else device_map[""]
        assert str(model.layers[0].weight.device) == places[str(place or "none")]
    if device_map is not None and "disk" in str(device_map):
        assert backing_of(model.embed.weight) is not None


def test_on_the_host_nothing_is_read_or_copied(path):
    model = on_meta()
    report = load_checkpoint_in_model(model, path, {"": "disk"})
    assert report.read_bytes == report.written_bytes == 0
    assert report.mapped_bytes == open_checkpoint(path).nbytes
    assert backing_of(model.layers[0].weight).path == str(path)
    assert backing_of(model.norm.running_mean).path == str(path)


def test_a_cast_for_the_disk_is_written_once_and_found_again(path, truth, tmp_path):
    folder = tmp_path / "offload"
    first = load_checkpoint_in_model(
        on_meta(), path, {"": "disk"}, folder, torch.float16, offload_buffers=True
    )
    assert first.written_bytes > 0
    written = {f: f.stat().st_mtime_ns for f in folder.glob("*.safetensors")}
    model = on_meta()
    load_checkpoint_in_model(model, path, {"": "disk"}, folder, torch.float16, offload_buffers=True)
    assert {f: f.stat().st_mtime_ns for f in folder.glob("*.safetensors")} == written
    require_equal(model, truth, torch.float16)
    assert str(folder) in backing_of(model.norm.running_mean).path


def test_buffers_of_modules_on_disk_rest_in_memory_unless_asked(path, tmp_path):
    model = on_meta()
    load_checkpoint_in_model(model, path, {"": "disk"}, tmp_path / "off", torch.float16)
    assert backing_of(model.norm.running_mean) is None
    assert backing_of(model.norm.weight) is not None


def test_writing_needs_a_folder_and_says_so_first(path, truth, tmp_path):
    model = on_meta()
    with pytest.raises(OffloadStoreError, match=r"embed\.weight.*offload_folder"):
        load_checkpoint_in_model(model, path, {"": "disk"}, dtype=torch.float16)
    with pytest.raises(OffloadStoreError, match="plain bytes"):
        load_checkpoint_in_model(model, saved_as("legacy", truth, tmp_path), {"": "disk"})
    assert all(p.is_meta for p in model.parameters())


def test_none_keeps_the_models_dtype_and_auto_the_files(path, truth):
    model = Net().half()
    load_checkpoint_in_model(model, path)
    require_equal(model, truth, torch.float16)
    model = on_meta().half()
    load_checkpoint_in_model(model, path, dtype="auto")
    require_equal(model, truth)


def test_modules_kept_in_float32(path, truth):
    model = on_meta()
    load_checkpoint_in_model(
        model, path, dtype=torch.float16, keep_in_fp32_modules=["norm", "layers.1"]
    )
    assert model.norm.weight.dtype is torch.float32
    assert model.norm.running_mean.dtype is torch.float32
    assert model.layers[1].weight.dtype is torch.float32
    assert model.layers[0].weight.dtype is torch.float16
    assert model.embed.weight.dtype is torch.float16
    half = on_meta().half()
    load_checkpoint_in_model(half, path, keep_in_fp32_modules=["norm"])
    assert half.norm.weight.dtype is torch.float32


def test_integers_are_never_cast(path):
    model = on_meta()
    load_checkpoint_in_model(model, path, dtype=torch.float16)
    assert model.ids.dtype is torch.int64
    assert model.norm.num_batches_tracked.dtype is torch.int64
    with pytest.raises(ModelError, match="floating point"):
        load_checkpoint_in_model(model, path, dtype=torch.int8)
    with pytest.raises(ModelError, match="float17"):
        load_checkpoint_in_model(model, path, dtype="float17")


def test_narrow_integers_widen_to_the_models_and_wide_ones_are_refused(tmp_path):
    model = nn.Module()
    model.register_buffer("ids", torch.zeros(3, dtype=torch.int64))
    save_file({"ids": torch.arange(3, dtype=torch.int32)}, tmp_path / "m.safetensors")
    load_checkpoint_in_model(model, tmp_path / "m.safetensors")
    assert model.ids.dtype is torch.int64
    assert model.ids.tolist() == [0, 1, 2]
    model.ids = torch.zeros(3, dtype=torch.int8)
    with pytest.raises(CheckpointMismatchError, match="int32"):
        load_checkpoint_in_model(model, tmp_path / "m.safetensors")


def test_eight_bit_floats_of_the_model_are_not_cast(tmp_path):
    raw = torch.arange(4.0).to(torch.float8_e4m3fn)
    save_file({"w": raw}, tmp_path / "m.safetensors")
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(4, dtype=torch.float8_e4m3fn), requires_grad=False)
    load_checkpoint_in_model(model, tmp_path / "m.safetensors", dtype=torch.bfloat16)
    assert model.w.dtype is torch.float8_e4m3fn


def test_a_dtype_that_the_device_lacks_is_refused_before_anything_moves(sim, path, monkeypatch):
    monkeypatch.setattr(
        DeviceBackend, "supports_dtype", lambda self, dtype: dtype is not torch.float32
    )
    model = on_meta()
    with pytest.raises(ModelError, match=r"scale.*float32.*sim:0.*dtype="):
        load_checkpoint_in_model(model, path, {"": "sim:0"})
    assert all(p.is_meta for p in model.parameters())
    # The file's dtype need not be supported: the cast is then made on the host.
    ids = model.ids
    load_checkpoint_in_model(model, path, {"": "sim:0"}, dtype=torch.float16)
    assert model.embed.weight.dtype is torch.float16
    assert model.ids is not ids


# ---------------------------------------------------------------------- what belongs to what


def test_tied_weights_under_either_name(truth, tmp_path):
    for kept in ("embed.weight", "head.weight"):
        state = truth.state_dict()
        del state["head.weight" if kept == "embed.weight" else "embed.weight"]
        save_file(state, tmp_path / "m.safetensors")
        for model in (Net(), on_meta()):
            load_checkpoint_in_model(
                model, tmp_path / "m.safetensors", strict=True, allow_missing=model.table.is_meta
            )
            require_equal(model, truth)


def test_parameters_that_share_a_storage_go_on_sharing(tmp_path):
    class Twins(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.zeros(3))
            self.b = nn.Parameter(self.a.detach())

    save_file({"a": torch.ones(3)}, tmp_path / "m.safetensors")
    model = Twins()
    load_checkpoint_in_model(model, tmp_path / "m.safetensors", dtype=torch.float16)
    assert model.b.tolist() == [1.0] * 3
    assert model.a.data_ptr() == model.b.data_ptr()


def test_two_models_of_one_file_do_not_see_each_others_changes(path, truth):
    shared = open_checkpoint(path)
    models = [on_meta() for _ in range(4)]
    for model in models[:2]:
        load_checkpoint_in_model(model, path)
    for model in models[2:]:
        load_checkpoint_in_model(model, shared)
    with torch.no_grad():
        models[0].embed.weight.zero_()
        models[2].embed.weight.zero_()
    require_equal(models[1], truth)
    require_equal(models[3], truth)
    require_equal_again = on_meta()
    load_checkpoint_in_model(require_equal_again, path)
    require_equal(require_equal_again, truth)


@pytest.mark.parametrize("kind", ["safetensors", "pickle"])
def test_extra_state(kind, tmp_path):
    model = nn.Sequential(WithState(), WithState())
    state = {"0.weight": torch.ones(2), "1.weight": torch.ones(2)}
    state["0._extra_state"] = torch.tensor([4]) if kind == "safetensors" else {"a": 4}
    state["1._extra_state"] = torch.tensor([5]) if kind == "safetensors" else [5]
    file = tmp_path / ("m.safetensors" if kind == "safetensors" else "m.bin")
    (save_file if kind == "safetensors" else torch.save)(state, file)
    load_checkpoint_in_model(model, file, strict=True)
    if kind == "safetensors":
        assert [m.state.tolist() for m in model] == [[4], [5]]
    else:
        assert [m.state for m in model] == [{"a": 4}, [5]]


def test_missing_extra_state_is_a_fault_only_when_strict(tmp_path):
    save_file({"weight": torch.ones(2)}, tmp_path / "m.safetensors")
    model = WithState()
    load_checkpoint_in_model(model, tmp_path / "m.safetensors")
    assert model.weight.tolist() == [1.0, 1.0]
    with pytest.raises(CheckpointMismatchError, match="_extra_state"):
        load_checkpoint_in_model(model, tmp_path / "m.safetensors", strict=True)


def test_buffers_that_are_not_persistent(truth, tmp_path):
    state = truth.state_dict()
    del state["head.weight"]
    state["table"] = torch.full((4,), 9.0)  # as old checkpoints have it
    save_file(state, tmp_path / "m.safetensors")
    model = Net()
    load_checkpoint_in_model(model, tmp_path / "m.safetensors")
    assert model.table.tolist() == [1.0] * 4  # the model knows better
    model = on_meta()
    load_checkpoint_in_model(model, tmp_path / "m.safetensors", strict=True)
    assert model.table.tolist() == [9.0] * 4


def test_a_counter_that_old_checkpoints_lack(tmp_path):
    state = nn.BatchNorm1d(3).state_dict()
    del state["num_batches_tracked"]
    save_file(state, tmp_path / "m.safetensors")
    model = on_meta(lambda: nn.BatchNorm1d(3))
    load_checkpoint_in_model(model, tmp_path / "m.safetensors", strict=True)
    assert model.num_batches_tracked.item() == 0


def test_a_scalar_saved_with_one_element(tmp_path):
    save_file({"s": torch.ones(1)}, tmp_path / "m.safetensors")
    model = nn.Module()
    model.s = nn.Parameter(torch.tensor(0.0))
    load_checkpoint_in_model(model, tmp_path / "m.safetensors")
    assert model.s.shape == ()
    assert model.s.item() == 1.0


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_lazy_modules_take_the_files_shape(tmp_path):
    save_file(nn.Linear(3, 2).state_dict(), tmp_path / "m.safetensors")
    model = nn.LazyLinear(2)
    load_checkpoint_in_model(model, tmp_path / "m.safetensors")
    assert model.weight.shape == (2, 3)
    assert model(torch.ones(1, 3)).shape == (1, 2)


def test_an_lstm_created_empty(tmp_path):
    truth = nn.LSTM(4, 4, batch_first=True)
    save_file(truth.state_dict(), tmp_path / "m.safetensors")
    model = on_meta(lambda: nn.LSTM(4, 4, batch_first=True))
    load_checkpoint_in_model(model, tmp_path / "m.safetensors", {"": "cpu"})
    x = torch.randn(1, 3, 4)
    assert torch.equal(model(x)[0], truth(x)[0])


def test_the_scale_of_an_eight_bit_weight(tmp_path):
    state = {"weight": torch.ones(2, 2, dtype=torch.int8), "SCB": torch.tensor([1.0, 2.0])}
    save_file({f"0.{k}": v for k, v in state.items()}, tmp_path / "m.safetensors")
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    with pytest.raises(CheckpointMismatchError, match=r"int8.*float32"):
        load_checkpoint_in_model(model, tmp_path / "m.safetensors")
    load_checkpoint_in_model(
        model, tmp_path / "m.safetensors", offload_8bit_bnb=True, dtype=torch.float16, strict=True
    )
    assert model[0].weight.dtype is torch.int8
    assert model[0].weight.SCB.tolist() == [1.0, 2.0]


def test_gradients_and_training_go_on(path, truth):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    load_checkpoint_in_model(model, path)
    model.layers[0](torch.ones(2, 8)).sum().backward()
    before = model.layers[0].weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model.layers[0].weight, before)
    again = Net()
    load_checkpoint_in_model(again, path)  # the file is as it was
    require_equal(again, truth)


# ---------------------------------------------------------------------- what does not fit


def test_all_that_is_wrong_in_one_message(path, tmp_path):
    class Other(Net):
        def __init__(self):
            super().__init__()
            self.extra = nn.Linear(2, 2)
            self.layers[1] = nn.Linear(8, 9)
            del self.scale

    model = on_meta(Other)
    with pytest.raises(CheckpointMismatchError) as caught:
        load_checkpoint_in_model(model, path, strict=True)
    said = str(caught.value)
    for words in (
        "extra.weight",
        "extra.bias",
        "layers.1.weight has shape (8, 8) in the checkpoint and (9, 8) in the model",
        "layers.1.bias",
        "unexpected: scale",
        str(path),
        "Other",
    ):
        assert words in said
    assert all(p.is_meta for p in model.parameters())


def test_a_missing_weight_raises_unless_it_is_allowed(path, truth):
    model = nn.Sequential(Net(), nn.Linear(2, 2))
    model = Net()
    model.added = nn.Linear(2, 2)
    was = model.added.weight.detach().clone()
    with pytest.raises(CheckpointMismatchError, match=r"added\.weight.*allow_missing"):
        load_checkpoint_in_model(model, path)
    assert not torch.equal(model.embed.weight, truth.embed.weight)
    report = load_checkpoint_in_model(model, path, allow_missing=True)
    assert report.missing == ["added.weight", "added.bias"]
    assert torch.equal(model.added.weight, was)
    assert torch.equal(model.embed.weight, truth.embed.weight)


def test_a_missing_tied_weight_names_all_its_names(path, truth, tmp_path):
    state = {k: v for k, v in truth.state_dict().items() if "head" not in k and "embed" not in k}
    save_file(state, tmp_path / "m.safetensors")
    with pytest.raises(CheckpointMismatchError, match=r"embed\.weight \(tied to head\.weight\)"):
        load_checkpoint_in_model(Net(), tmp_path / "m.safetensors")


def test_a_wrong_shape_raises_whatever_is_allowed(path):
    model = Net()
    model.layers[2] = nn.Linear(8, 4)
    with pytest.raises(CheckpointMismatchError, match=r"layers\.2\.weight"):
        load_checkpoint_in_model(model, path, allow_missing=True)


def test_an_unexpected_name_is_logged_once(path, caplog):
    model = Net()
    del model.scale
    with caplog.at_level(logging.WARNING, "anydevice"):
        report = load_checkpoint_in_model(model, path)
    assert report.unexpected == ["scale"]
    assert [r.getMessage() for r in caplog.records] == [f"Net has no place for scale of {path}"]


@pytest.mark.parametrize("prefix", ["module.", "model."])
def test_a_prefix_on_either_side_is_pointed_out(prefix, truth, tmp_path):
    state = {k: v for k, v in truth.state_dict().items() if k != "head.weight"}
    save_file({prefix + k: v for k, v in state.items()}, tmp_path / "m.safetensors")
    with pytest.raises(
        CheckpointMismatchError, match=f"Names in the checkpoint begin with '{prefix}'"
    ):
        load_checkpoint_in_model(Net(), tmp_path / "m.safetensors")
    save_file(state, tmp_path / "n.safetensors")
    wrapped = nn.Module()
    setattr(wrapped, prefix[:-1], Net())
    with pytest.raises(CheckpointMismatchError, match=f"Names in the model begin with '{prefix}'"):
        load_checkpoint_in_model(wrapped, tmp_path / "n.safetensors")


def test_a_word_may_stand_for_a_map(sim, path):
    model = on_meta()
    load_checkpoint_in_model(model, path, device_map="auto")
    assert {p.device.type for p in model.parameters()} == {"sim"}


@pytest.mark.parametrize(
    ("device_map", "error", "words"),
    [
        ({"embed": "cpu"}, DeviceMapError, "'scale'"),
        ({"": "nonsense:0"}, UnknownDeviceError, "nonsense"),
        ({"": "sim:7"}, UnknownDeviceError, "sim:7"),
        ({"": "meta"}, DeviceMapError, "meta"),
        ({3: "cpu"}, DeviceMapError, "3"),
        ("automatic", UnknownDeviceError, "automatic"),
    ],
)
def test_a_device_map_that_does_not_fit(sim, device_map, error, words, path):
    model = on_meta()
    with pytest.raises(error, match=words):
        load_checkpoint_in_model(model, path, device_map)
    assert all(p.is_meta for p in model.parameters())


# ---------------------------------------------------------------------- failures on the way


def snapshot(model):
    return {k: (v.device, v.dtype, v.cpu().clone()) for k, v in model.state_dict().items()}


def require_unchanged(model, before):
    after = snapshot(model)
    for name, (device, dtype, value) in before.items():
        assert after[name][:2] == (device, dtype)
        assert torch.equal(after[name][2], value), name


def test_no_room_on_the_device(sim, path):
    sim.configure(devices=2, memory=["1KiB", "64MiB"], mode="lazy")
    model = Net()
    before = snapshot(model)
    with pytest.raises(DoesNotFitError, match=r"sim:0.*unchanged"):
        load_checkpoint_in_model(model, path, {"": "sim:0"})
    require_unchanged(model, before)


def test_a_file_that_shrinks_while_it_is_read(path, monkeypatch):
    model = Net()
    before = snapshot(model)
    real = applying.stream

    def shrink(requests, **kwargs):
        if requests:
            os.truncate(path, path.stat().st_size - 64)
        real(requests, **kwargs)

    monkeypatch.setattr(applying, "stream", shrink)
    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors"):
        load_checkpoint_in_model(model, path, dtype=torch.float16)
    require_unchanged(model, before)


def test_a_file_that_changes_or_goes_while_it_is_read(path, monkeypatch):
    real = applying.stream
    for act, error in (
        (lambda: path.write_bytes(path.read_bytes() + b"x"), CorruptCheckpointError),
        (path.unlink, CheckpointNotFoundError),
    ):
        model = Net()
        before = snapshot(model)
        once = threading.Lock()

        def change(requests, *, _act=act, _once=once, **kwargs):
            real(requests, **kwargs)
            if _once.acquire(blocking=False):
                _act()

        monkeypatch.setattr(applying, "stream", change)
        with pytest.raises(error, match=r"model\.safetensors"):
            load_checkpoint_in_model(model, path, dtype=torch.float16)
        require_unchanged(model, before)
        monkeypatch.setattr(applying, "stream", real)
        if path.exists():
            path.write_bytes(path.read_bytes()[:-1])


def test_another_file_of_the_same_size_and_time_is_noticed(path, tmp_path):
    source = open_checkpoint(path)
    stat = os.stat(path)
    other = tmp_path / "other"
    other.write_bytes(bytes(stat.st_size))
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    os.replace(other, path)
    with pytest.raises(CorruptCheckpointError, match="changed since it was opened"):
        source.check()


def test_a_changed_file_is_noticed_when_an_open_checkpoint_is_used(path):
    checkpoint = open_checkpoint(path)
    os.utime(path, ns=(1, 1))
    with pytest.raises(CorruptCheckpointError, match="changed"):
        load_checkpoint_in_model(Net(), checkpoint)


def test_half_loaded_is_said_when_memory_of_the_model_was_being_filled(sim, path, monkeypatch):
    model = Net().to("sim:0")
    model.head.weight = model.embed.weight
    real = applying.stream

    def fail(requests, **kwargs):
        real(requests[:2], **kwargs)
        if requests:
            raise OSError("the disk is gone")

    monkeypatch.setattr(applying, "stream", fail)
    with pytest.raises(CheckpointError, match=r"half-loaded.*the disk is gone"):
        load_checkpoint_in_model(model, path)
    monkeypatch.setattr(applying, "stream", real)
    load_checkpoint_in_model(model, path)
    assert str(model.embed.weight.device) == "sim:0"


def test_an_interrupt_says_whether_the_model_is_half_loaded(path, monkeypatch):
    def interrupt(requests, **kwargs):
        if requests:
            raise KeyboardInterrupt

    monkeypatch.setattr(applying, "stream", interrupt)
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        load_checkpoint_in_model(on_meta(), path, dtype=torch.float16)
    with pytest.raises(KeyboardInterrupt, match=r"Net is half-loaded.*Load it again"):
        load_checkpoint_in_model(Net().half(), path)


def test_memory_of_the_model_is_filled_when_nothing_else_can_fail(path, tmp_path, monkeypatch):
    model = Net().half()
    before = snapshot(model)

    def full(folder, tensors):
        raise OffloadStoreError("the disk is full")

    monkeypatch.setattr(applying, "write_store", full)
    with pytest.raises(OffloadStoreError, match=r"^the disk is full$"):
        load_checkpoint_in_model(model, path, {"": "cpu", "layers.1": "disk"}, tmp_path / "off")
    require_unchanged(model, before)


def test_memory_that_the_model_has_on_a_device_is_filled_not_doubled(sim, truth, path):
    sim.configure(devices=1, memory="1MiB", mode="lazy")
    big = nn.Linear(300, 500, bias=False)  # 600 kB: two of them have no room
    save_file(big.state_dict(), path)
    model = nn.Linear(300, 500, bias=False).to("sim:0")
    place = model.weight.data_ptr()
    load_checkpoint_in_model(model, path)
    assert model.weight.data_ptr() == place
    assert torch.equal(model.weight.cpu(), big.weight)


def test_the_collector_is_on_again_after_an_error(path):
    with pytest.raises(CheckpointMismatchError):
        load_checkpoint_in_model(nn.Linear(2, 2), path)
    assert gc.isenabled()


def test_unsafe_files_leave_the_model_alone(tmp_path):
    torch.save({"w": Net()}, tmp_path / "m.bin")
    model = Net()
    before = snapshot(model)
    with pytest.raises(UnsafeCheckpointError):
        load_checkpoint_in_model(model, tmp_path / "m.bin")
    require_unchanged(model, before)


# ---------------------------------------------------------------------- options


def test_preload_brings_the_pages_in(path, truth, capsys):
    model = on_meta()
    load_checkpoint_in_model(model, path, preload=True, progress=True)
    require_equal(model, truth)
    assert backing_of(model.embed.weight) is not None
    assert "Reading" in capsys.readouterr().err


def test_a_progress_bar_over_bytes(path, capsys):
    load_checkpoint_in_model(on_meta(), path, dtype=torch.float16, progress=True)
    assert "Loading" in capsys.readouterr().err
    load_checkpoint_in_model(on_meta(), path, dtype=torch.float16)
    assert capsys.readouterr().err == ""


def test_a_default_device_of_the_caller_is_no_matter(path, truth):
    with torch.device("meta"):
        model = Net()
        load_checkpoint_in_model(model, path)
        cast = Net()
        load_checkpoint_in_model(cast, path, dtype=torch.float16)
    require_equal(model, truth)
    require_equal(cast, truth, torch.float16)


def test_many_threads_at_once(path, truth):
    models = [on_meta() for _ in range(6)]
    failures = []

    def load(model):
        try:
            load_checkpoint_in_model(model, path, dtype=torch.float16)
        except Exception as error:  # noqa: BLE001 - reported below
            failures.append(error)

    threads = [threading.Thread(target=load, args=(m,)) for m in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    for model in models:
        require_equal(model, truth, torch.float16)


def test_names_are_handled_in_linear_time(tmp_path):
    """Counted, not timed: how often a name is compared with another."""

    class Name(str):
        compared = 0
        __slots__ = ()

        def __eq__(self, other):
            Name.compared += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    def comparisons(count):
        model = nn.Module()
        for number in range(count):
            model.register_buffer(f"b{number}", torch.zeros(1))
        state = {f"b{number}": torch.ones(1) for number in range(count)}
        save_file(state, tmp_path / "m.safetensors")
        checkpoint = open_checkpoint(tmp_path / "m.safetensors")
        checkpoint._infos = {Name(k): v for k, v in checkpoint._infos.items()}
        Name.compared = 0
        load_checkpoint_in_model(model, checkpoint)
        return Name.compared

    assert comparisons(800) <= 2.2 * comparisons(400)


@settings(
    max_examples=60,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.dictionaries(
        st.sampled_from(
            ["embed", "head", "norm", "layers.0", "layers.1.weight", "layers", "scale"]
        ),
        st.sampled_from(["cpu", "disk", "sim:0", 1]),
    ),
    st.sampled_from(["cpu", "disk", "sim:0", "sim:1"]),
    st.sampled_from([None, torch.float16, torch.bfloat16, torch.float64]),
    st.sampled_from([1 << 10, 1 << 20]),
    st.booleans(),
)
def test_any_map_gives_the_same_weights(
    sim, truth, path, tmp_path_factory, entries, rest, dtype, buffer_bytes, empty
):
    model = on_meta() if empty else Net()
    load_checkpoint_in_model(
        model,
        path,
        {"": rest, **entries},
        dtype=dtype,
        offload_folder=tmp_path_factory.mktemp("offload"),
        buffer_bytes=buffer_bytes,
    )
    require_equal(model, truth, dtype)
