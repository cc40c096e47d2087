"""Enabling and disabling: complete, repeatable, and refused for versions that are not known."""

from __future__ import annotations

import doctest
import json
import os
import subprocess
import sys
import textwrap

import pytest
from warm import run_python

from anydevice.errors import MissingDependencyError
from anydevice.integrations import transformers as integration

pytestmark = pytest.mark.xdist_group("integrations")


@pytest.fixture(scope="module")
def replaced():
    """The owner and name of every attribute that is replaced."""
    return [(patch.owner, patch.name) for patch in integration._patches()]


@pytest.fixture
def unchanged(replaced):
    """Nothing is replaced before and after a test; gives a function that lists what is there."""

    def look():
        return [vars(owner).get(name) for owner, name in replaced]

    before = look()
    yield look
    assert look() == before


def test_disable_puts_everything_back(unchanged):
    before = unchanged()
    with integration.enable():
        assert all(now is not old for now, old in zip(unchanged(), before, strict=True))
    assert unchanged() == before


def test_the_examples_run(unchanged):
    found = doctest.testmod(integration)
    assert found.attempted
    assert not found.failed


def test_enabling_twice_is_enabling_once(unchanged):
    with integration.enable():
        with integration.enable():
            pass
        assert integration.integration.is_enabled  # the inner end is not the outer one's
    assert not integration.integration.is_enabled
    integration.enable()
    integration.enable()
    integration.disable()
    integration.disable()  # nothing to do


def test_what_somebody_else_replaced_since_is_left(monkeypatch):
    import transformers.modeling_utils as modeling

    def theirs():
        pass

    original = modeling.accelerate_dispatch
    integration.enable()
    modeling.accelerate_dispatch = theirs
    integration.disable()
    assert modeling.accelerate_dispatch is theirs
    modeling.accelerate_dispatch = original


@pytest.mark.parametrize("version", ["4.57.6", "5.3.0", "6.0.0", "unknown"])
def test_another_version_is_refused_before_anything_changes(version, monkeypatch, unchanged):
    import transformers

    monkeypatch.setattr(transformers, "__version__", version)
    with pytest.raises(MissingDependencyError, match=rf"transformers>=5.24,<6.0.*{version}"):
        integration.enable()


@pytest.mark.parametrize(
    "name",
    [
        "check_and_set_device_map",
        "_get_device_map",
        "accelerate_disk_offload",
        "accelerate_dispatch",
    ],
)
def test_a_function_that_changed_is_refused_by_name(name, monkeypatch):
    import transformers.modeling_utils as modeling

    def changed(other):
        pass

    monkeypatch.setattr(modeling, name, changed)
    with pytest.raises(MissingDependencyError, match=rf"{name} takes .*other"):
        integration.enable()
    monkeypatch.delattr(modeling, name)
    with pytest.raises(MissingDependencyError, match=f"{name} is gone"):
        integration.enable()
    assert not integration.integration.is_enabled


def run(script, **environment):
    """Run a script in a process that cannot import accelerate, with a simulated accelerator."""
    hidden = "import sys; sys.modules['accelerate'] = None\n"
    environment = os.environ | {"ANYDEVICE_SIMULATOR": "devices=2"} | environment
    done = run_python("-c", hidden + textwrap.dedent(script), env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_without_accelerate_and_enabled_by_the_environment(saved, tmp_path):
    found = run(
        f"""
        import json
        import anydevice
        assert "transformers" in sys.modules
        import torch
        from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
        def load(auto, folder):
            return auto.from_pretrained(
                folder, device_map="auto", max_memory={{0: "60KiB", "cpu": "30KiB"}},
                offload_folder={str(tmp_path)!r},
            )
        llama = load(AutoModelForCausalLM, {saved("llama").folder!r})
        ids = torch.tensor([[1, 5, 7, 9, 3]], device=llama.device)
        tokens = llama.generate(ids, max_new_tokens=4, do_sample=False)
        t5 = load(AutoModelForSeq2SeqLM, {saved("t5").folder!r})
        answer = t5.generate(ids, max_new_tokens=4, do_sample=False)
        devices = sorted(map(str, {{*llama.hf_device_map.values()}}))
        from peft import LoraConfig, PeftModel, get_peft_model
        adapted = get_peft_model(llama, LoraConfig(target_modules=["q_proj"]))
        adapted.save_pretrained({str(tmp_path / "adapter")!r})
        again = load(AutoModelForCausalLM, {saved("llama").folder!r})
        again = PeftModel.from_pretrained(again, {str(tmp_path / "adapter")!r})
        with torch.no_grad():
            same = torch.allclose(again(ids).logits, adapted(ids).logits, atol=1e-5)
        from diffusers import UNet2DModel, DDPMPipeline, DDPMScheduler
        unet = UNet2DModel(
            sample_size=8, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4,
            down_block_types=("DownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "UpBlock2D"),
        )
        pipe = DDPMPipeline(unet, DDPMScheduler())
        pipe.enable_model_cpu_offload()
        made = pipe(num_inference_steps=1, output_type="np").images
        assert made.shape == (1, 8, 8, 3) and unet.device.type == "cpu", made.shape
        assert sys.modules["accelerate"] is None
        print(json.dumps([devices, tokens.tolist(), answer.tolist(), same]))
        """,
        ANYDEVICE_TRANSFORMERS="1",
        ANYDEVICE_DIFFUSERS="1",
    )
    import torch

    ids = torch.tensor([[1, 5, 7, 9, 3]])
    options = {"max_new_tokens": 4, "do_sample": False}
    assert found == [
        ["0", "cpu", "disk"],
        saved("llama").plain.generate(ids, **options).tolist(),
        saved("t5").plain.generate(ids, **options).tolist(),
        True,
    ]


def test_a_variable_that_is_neither_yes_nor_no_is_refused():
    done = subprocess.run(
        [sys.executable, "-c", "import anydevice"],
        env=os.environ | {"ANYDEVICE_TRANSFORMERS": "maybe"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "ANYDEVICE_TRANSFORMERS='maybe'" in done.stderr
    assert "use 1 or 0" in done.stderr
