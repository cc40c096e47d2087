"""Small functions that other libraries import under the reference's paths."""

from __future__ import annotations

import json

import pytest
import torch
from launching import fork_launches
from torch import nn

from anydevice import Accelerator, cpu_offload
from anydevice.commands import config as config_module
from anydevice.commands.config import load_config_from_file
from anydevice.commands.launch import launch_command, launch_command_parser
from anydevice.errors import OptionError
from anydevice.utils import (
    CustomDtype,
    DummyOptim,
    DummyScheduler,
    FP8RecipeKwargs,
    HfDeepSpeedConfig,
    dtype_byte_size,
    has_compiled_regions,
    infer_auto_device_map,
    is_peft_model,
    model_has_dtensor,
    tqdm,
    write_basic_config,
)
from anydevice.utils.dataclasses import get_module_class_from_name
from anydevice.utils.fsdp_utils import get_parameters_from_modules
from anydevice.utils.modeling import (
    check_tied_parameters_on_same_device,
    get_state_dict_from_offload,
)


def model():
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 2)))


def test_dtypes_of_quantizers_are_planned_with():
    assert [dtype_byte_size(dtype) for dtype in CustomDtype] == [1, 0.5, 0.25]
    assert CustomDtype("int4") is CustomDtype.INT4
    one = nn.Linear(64, 64, bias=False)
    assert infer_auto_device_map(one, {"cpu": 64 * 32}, dtype=CustomDtype.INT4) == {"": "cpu"}


def test_what_a_model_is_made_of():
    one = model()
    assert get_module_class_from_name(one, "Linear") is nn.Linear
    assert get_module_class_from_name(one, "Conv2d") is None
    assert get_parameters_from_modules(r"1\..*", one) == {*one[1].parameters()}
    assert get_parameters_from_modules([one[0]], one, "cpu") == {*one[0].parameters()}
    assert get_parameters_from_modules(None, one) == set()
    assert not model_has_dtensor(one)
    assert not has_compiled_regions(one)
    one[0]._compiled_call_impl = one[0].forward  # as compile() leaves it
    assert has_compiled_regions(one)


def test_a_peft_model_is_known_by_its_class():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["0"])
    assert is_peft_model(peft.get_peft_model(model(), config))
    assert not is_peft_model(model())


def test_the_values_of_an_offloaded_module(sim):
    one = model()
    values = {name: value.clone() for name, value in one.state_dict().items()}
    cpu_offload(one, "sim:0")
    state = {"1.0.weight": "", "0.weight": ""}
    found = get_state_dict_from_offload(one[1][0], "1.0.weight", state)
    assert found is state
    assert torch.equal(found["1.0.weight"], values["1.0.weight"])
    assert found["0.weight"] == ""


def test_tied_parameters_on_two_devices_are_told():
    tied = [["a.weight", "b.weight"]]
    check_tied_parameters_on_same_device(tied, {"": 0})
    check_tied_parameters_on_same_device(tied, {"a": 0, "b": 0})
    with pytest.warns(UserWarning, match=r"'a\.weight': 0, 'b\.weight': 'cpu'.*one device"):
        check_tied_parameters_on_same_device(tied, {"a": 0, "b": "cpu"})


def test_the_progress_bar_is_shown_by_one(capsys):
    assert list(tqdm(range(2), main_process_only=False)) == [0, 1]
    assert "2/2" in capsys.readouterr().err


def test_a_deepspeed_configuration(tmp_path):
    data = {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "optimizer": {"params": {"lr": "auto"}},
        "bf16": {"enabled": False},
    }
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(data))
    config = HfDeepSpeedConfig(path)
    assert config.config == data
    assert config.find_config_node("optimizer.params.lr") == ({"lr": "auto"}, "lr")
    assert config.find_config_node("scheduler.params.lr") == (None, "lr")
    assert config.get_value("optimizer.params.eps", 3) == 3
    assert (config.is_zero2(), config.is_zero3(), config.is_offload()) == (True, False, True)
    assert config.is_false("bf16.enabled")
    assert not config.is_false("fp16.enabled")
    assert not config.is_true("bf16.enabled")
    config.del_config_sub_tree("optimizer.params")
    assert config.config["optimizer"] == {}
    assert HfDeepSpeedConfig(data).config is not data
    with pytest.raises(OptionError, match=r"no 'optimizer\.params'"):
        config.del_config_sub_tree("optimizer.params", must_exist=True)
    path.write_text("[1")
    with pytest.raises(OptionError, match=r"ds\.json.*is no JSON"):
        HfDeepSpeedConfig(path)
    with pytest.raises(OptionError, match="not a int"):
        HfDeepSpeedConfig(3)


def test_stand_ins_of_deepspeed_are_refused_without_it():
    accelerator = Accelerator(cpu=True)
    one = model()
    optimizer = DummyOptim(one.parameters())
    with pytest.raises(OptionError, match="DummyOptim is for DeepSpeed"):
        accelerator.prepare(one, optimizer)
    with pytest.raises(OptionError, match="DummyScheduler is for DeepSpeed"):
        accelerator.prepare(one, DummyScheduler(optimizer))


def test_names_without_a_meaning_refuse_when_they_are_called():
    with pytest.raises(OptionError, match=r"FP8RecipeKwargs is not there.*torchao"):
        FP8RecipeKwargs(backend="TE")


def test_a_configuration_file_is_read(tmp_path, monkeypatch):
    path = tmp_path / "config.yaml"
    write_basic_config(mixed_precision="bf16", save_location=path)
    assert load_config_from_file(path).to_dict()["mixed_precision"] == "bf16"
    monkeypatch.setenv("ANYDEVICE_CONFIG_FILE", str(path))
    assert config_module.default_config_file == str(path)
    assert load_config_from_file(None).path == path
    monkeypatch.delenv("ANYDEVICE_CONFIG_FILE")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "none"))
    with pytest.raises(OptionError, match="there is no such file; write it"):
        load_config_from_file()


@pytest.mark.xdist_group("distributed")
def test_a_program_launches(tmp_path, capfd, monkeypatch):
    fork_launches(monkeypatch)
    script = tmp_path / "script.py"
    script.write_text("import sys; sys.exit(len(sys.argv) - 1)")
    words = ["--cpu", "--num_processes", "1", str(script)]
    launch_command(launch_command_parser().parse_args(words))
    with pytest.raises(SystemExit) as ended:
        launch_command(launch_command_parser().parse_args([*words, "a", "b"]))
    assert ended.value.code not in (0, None)
    capfd.readouterr()
