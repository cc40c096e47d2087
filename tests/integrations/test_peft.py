"""PEFT's adapters on a model whose base is divided over devices, the host and the disk."""

from __future__ import annotations

import copy

import pytest
import torch
import zoo

from anydevice.integrations.stand_in import standing_in

pytestmark = [
    pytest.mark.xdist_group("integrations"),
    # transformers warns of its own attribute, which PEFT reads.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]


def lora(**options):
    import peft

    settings = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    return peft.LoraConfig(**settings | options)


def add(model, seed, name="default"):
    """Add an adapter with random weights that do not depend on the devices."""
    import peft

    if isinstance(model, peft.PeftModel):
        model.add_adapter(name, lora())
    else:
        model = peft.get_peft_model(model, lora(), adapter_name=name)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if f".{name}." in key:
                generator = torch.Generator().manual_seed(seed + len(key))
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
    return model


def logits(model):
    with torch.no_grad():
        return model(input_ids=zoo.IDS).logits.cpu()


def close(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def adapted(saved, tmp_path_factory):
    """The plain model with two adapters, and the folders of both."""
    folder = tmp_path_factory.mktemp("adapters")
    model = add(copy.deepcopy(saved("llama").plain), 0)
    add(model, 1, "other")
    model.save_pretrained(folder)
    model.eval()
    return model, str(folder), str(folder / "other")


def test_several_adapters_merged_and_unmerged(adapted, saved, sim, enabled, tmp_path):
    plain, _, _ = adapted
    base = saved("llama").spread(tmp_path / "offload")
    model = add(base, 0)
    add(model, 1, "other")
    model.eval()
    for name in ("other", "default"):
        plain.set_adapter(name)
        model.set_adapter(name)
        close(logits(model), logits(plain))
    expected = logits(plain)
    model.merge_adapter()
    close(logits(model), expected)
    model.unmerge_adapter()
    close(logits(model), expected)
    with model.disable_adapter():
        close(logits(model), saved("llama").logits)
    merged = model.merge_and_unload()
    assert merged is base
    close(logits(merged), expected)
    assert {p.device.type for p in merged.parameters()} == {"sim", "cpu"}


@pytest.mark.parametrize("options", [{}, {"max_memory": {0: "80KiB", "cpu": "1GiB"}}])
def test_peft_model_from_pretrained(options, adapted, saved, sim, enabled, tmp_path):
    import peft

    plain, first, second = adapted
    base = saved("llama").spread(tmp_path / "offload")
    before = dict(base.hf_device_map)
    model = peft.PeftModel.from_pretrained(base, first, **options)
    plain.set_adapter("default")
    close(logits(model), logits(plain))
    if options:  # placed anew
        assert set(model.hf_device_map.values()) == {0, "cpu"}
    else:
        assert model.hf_device_map == before
    model.load_adapter(second, "other")
    model.set_adapter("other")
    plain.set_adapter("other")
    close(logits(model), logits(plain))


def test_load_adapter_of_transformers(adapted, saved, sim, enabled, tmp_path):
    plain, first, _ = adapted
    model = saved("llama").spread(tmp_path / "offload")
    model.load_adapter(first)
    plain.set_adapter("default")
    close(logits(model), logits(plain))


@pytest.mark.parametrize("where", ["cpu", "disk", "spread"])
def test_training_an_adapter_on_an_offloaded_base(where, saved, sim, enabled, tmp_path):
    def train(model):
        model = add(model, 0).train()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)
        losses = []
        for _ in range(3):
            loss = model(input_ids=zoo.IDS, labels=zoo.IDS).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    expected = train(copy.deepcopy(saved("llama").plain))
    folder = tmp_path / "offload"
    if where == "spread":
        base = saved("llama").spread(folder)
    else:
        base = saved("llama").load({"": 0, "model.layers.0": where, "model.layers.2": where})
    found = train(base)
    assert found == pytest.approx(expected, rel=1e-3)
    assert found[-1] < found[0]


def test_a_model_on_one_device_is_left_to_peft(adapted, saved, sim, enabled):
    import peft

    plain, first, _ = adapted
    plain.set_adapter("default")
    model = peft.PeftModel.from_pretrained(saved("llama").load("cpu"), first)
    assert torch.equal(logits(model), logits(plain))


def test_the_stand_in_is_there_for_a_moment():
    import sys

    import accelerate as installed

    with standing_in():
        import accelerate
        from accelerate.utils.imports import is_bf16_available

        assert accelerate.dispatch_model.__module__.startswith("anydevice")
        assert is_bf16_available.__module__.startswith("anydevice")
    assert sys.modules["accelerate"] is installed
    assert sys.modules["accelerate.hooks"].__name__ == "accelerate.hooks"
