"""Every name of the reference is here with its parameters, their order and their defaults."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

import anydevice

#: Names to parameters, written off the reference pages; types are left out.
SIGNATURES = json.loads(Path(__file__).with_name("signatures.json").read_text())

#: Where ours differ: core names no vendor's collectives, so the device's backend says which.
OURS = {"utils.InitProcessGroupKwargs": "backend=None, init_method=None, timeout=None"}

#: What the reference offers under several paths: its users import from each of them.
PATHS = {
    "anydevice": [
        "cpu_offload",
        "cpu_offload_with_hook",
        "disk_offload",
        "dispatch_model",
        "infer_auto_device_map",
        "init_empty_weights",
        "init_on_device",
        "load_checkpoint_and_dispatch",
        "load_checkpoint_in_model",
    ],
    "anydevice.big_modeling": [
        "attach_layerwise_casting_hooks",
        "cpu_offload",
        "cpu_offload_with_hook",
        "disk_offload",
        "dispatch_model",
        "init_empty_weights",
        "init_on_device",
        "load_checkpoint_and_dispatch",
    ],
    "anydevice.hooks": [
        "AlignDevicesHook",
        "CpuOffload",
        "LayerwiseCastingHook",
        "ModelHook",
        "SequentialHook",
        "UserCpuOffloadHook",
        "add_hook_to_module",
        "attach_align_device_hook",
        "attach_align_device_hook_on_blocks",
        "attach_execution_device_hook",
        "attach_layerwise_casting_hooks",
        "remove_hook_from_module",
        "remove_hook_from_submodules",
    ],
    "anydevice.utils": [
        name
        for name in (n.removeprefix("utils.") for n in SIGNATURES if n.startswith("utils."))
        if "." not in name
    ],
    "anydevice.utils.modeling": [
        "align_module_device",
        "check_device_map",
        "compute_module_sizes",
        "get_balanced_memory",
        "get_max_memory",
        "get_state_dict_offloaded_model",
        "has_offloaded_params",
        "infer_auto_device_map",
        "load_checkpoint_in_model",
        "set_module_tensor_to_device",
    ],
    "anydevice.utils.offload": ["OffloadedWeightsLoader", "offload_state_dict"],
    "anydevice.utils.operations": ["find_device", "recursively_apply", "send_to_device"],
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_is_the_references(name):
    path, _, leaf = name.rpartition(".")
    owner, place = anydevice, "anydevice"
    for part in filter(None, path.split(".")):
        place = f"{place}.{part}"
        owner = getattr(owner, part, None) or importlib.import_module(place)
    ours = inspect.signature(getattr(owner, leaf)).parameters.values()
    theirs = wanted(OURS.get(name, SIGNATURES[name]))
    got = [shape(p) for p in ours]
    assert got[: len(theirs)] == theirs
    # What is our own comes after, by keyword only.
    assert all(p.kind is p.KEYWORD_ONLY for p in list(ours)[len(theirs) :])


def wanted(parameters):
    scope = {
        "is_torch_tensor": anydevice.utils.is_torch_tensor,
        "FACTORY": dataclasses._HAS_DEFAULT_FACTORY,
    }
    exec(f"def f({parameters}): pass", scope)
    return [shape(p) for p in inspect.signature(scope["f"]).parameters.values()]


def shape(parameter):
    return parameter.name, parameter.kind, parameter.default


@pytest.mark.parametrize(("path", "name"), [(p, n) for p in PATHS for n in PATHS[p]])
def test_importable_from_the_same_places(path, name):
    assert hasattr(importlib.import_module(path), name)


@pytest.mark.parametrize("path", ["anydevice", *PATHS])
def test_all_is_what_is_exported(path):
    module = importlib.import_module(path)
    assert sorted(module.__all__) == sorted(set(module.__all__))
    assert all(hasattr(module, name) for name in module.__all__)


def test_one_object_under_all_paths():
    assert anydevice.dispatch_model is anydevice.big_modeling.dispatch_model
    assert anydevice.infer_auto_device_map is anydevice.utils.infer_auto_device_map


def test_import_is_light():
    code = (
        "import sys, anydevice; "
        "heavy = {'transformers', 'rich', 'typer', 'pytest', 'torch._dynamo', 'accelerate'}; "
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_unknown_name():
    with pytest.raises(AttributeError, match="nothing_such"):
        anydevice.nothing_such  # noqa: B018
