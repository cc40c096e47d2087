"""from_pretrained: transformers' models over the simulator, the host and the disk."""

from __future__ import annotations

import pytest
import torch
import transformers as tf

import anydevice
from anydevice.errors import (
    BudgetError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    ModelError,
    OptionError,
)

TINY = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 128}


def save(model_class, config, folder):
    torch.manual_seed(0)
    model = model_class(config).eval()
    model.save_pretrained(folder)
    return model


def ids():
    return torch.arange(1, 9).view(1, 8)


def test_equals_the_plain_model(tiny_llama, sim):
    plain = tf.LlamaForCausalLM.from_pretrained(tiny_llama).eval()
    model = anydevice.from_pretrained(
        tf.AutoModelForCausalLM, tiny_llama, max_memory={0: "120KiB", 1: "90KiB", "cpu": "50KiB"}
    )
    assert {"disk", "cpu"} & set(map(str, model.hf_device_map.values()))
    assert not model.training
    with torch.no_grad():
        want = plain.generate(ids(), max_new_tokens=8, do_sample=False)
        got = model.generate(ids().to("sim:0"), max_new_tokens=8, do_sample=False)
    assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"prefetch_depth": -1}, OptionError),
        ({"max_memory": {0: 10.5}}, BudgetError),
        ({"headroom": 1.5}, BudgetError),
        ({"disk": -1}, BudgetError),
    ],
)
def test_a_wrong_number_is_refused_before_anything_is_fetched(options, error):
    with pytest.raises(error):
        anydevice.from_pretrained(None, "nobody/nothing", **options)


def test_the_class_comes_from_the_config(tiny_llama):
    model = anydevice.from_pretrained(None, tiny_llama, device_map="cpu")
    assert type(model) is tf.LlamaForCausalLM


def test_a_base_model_takes_the_weights_of_a_model_with_a_head(tiny_llama):
    plain = tf.AutoModelForCausalLM.from_pretrained(tiny_llama)
    base = anydevice.from_pretrained(tf.AutoModel, tiny_llama, device_map="cpu")
    want = plain.model.state_dict()
    assert all(torch.equal(value, want[name]) for name, value in base.state_dict().items())


def test_a_head_without_weights_is_an_error_that_names_it(tmp_path):
    config = tf.BertConfig(**TINY, intermediate_size=64)
    save(tf.BertModel, config, tmp_path)
    with pytest.raises(CheckpointMismatchError, match=r"classifier\.weight"):
        anydevice.from_pretrained(tf.BertForSequenceClassification, tmp_path, device_map="cpu")


def test_a_head_without_weights_is_initialised_when_allowed(tmp_path):
    config = tf.BertConfig(**TINY, intermediate_size=64)
    save(tf.BertModel, config, tmp_path)
    with pytest.warns(UserWarning, match=r"classifier\.weight"):
        model = anydevice.from_pretrained(
            tf.BertForSequenceClassification, tmp_path, device_map="cpu", allow_missing=True
        )
    assert not any(p.is_meta for p in model.parameters())
    assert model.classifier.weight.std() > 0
    assert torch.equal(model.classifier.bias, torch.zeros(2))


def test_experts_stored_one_by_one_are_joined(tmp_path, sim):
    config = tf.MixtralConfig(
        **TINY, intermediate_size=64, num_key_value_heads=2, num_local_experts=4, eos_token_id=None
    )
    plain = save(tf.MixtralForCausalLM, config, tmp_path)
    model = anydevice.from_pretrained(
        tf.MixtralForCausalLM,
        tmp_path,
        max_memory={0: "220KiB", 1: "150KiB", "cpu": "90KiB"},
        offload_folder=tmp_path / "offload",
    )
    with torch.no_grad():
        assert torch.allclose(model(ids()).logits.cpu(), plain(ids()).logits, atol=1e-5)


def test_dtype_is_cast_on_the_way(tiny_llama):
    model = anydevice.from_pretrained(None, tiny_llama, device_map="cpu", dtype="bfloat16")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_a_folder_without_a_config_is_named(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointNotFoundError, match="config"):
        anydevice.from_pretrained(tf.AutoModel, tmp_path)


def test_a_class_that_is_not_transformers_is_refused(tiny_llama):
    with pytest.raises(ModelError, match="load_checkpoint_and_dispatch"):
        anydevice.from_pretrained(torch.nn.Linear, tiny_llama, device_map="cpu")


def test_a_hub_repo_comes_through_its_cache(tiny_llama, tmp_path, monkeypatch):
    """The Hub's own cache layout, offline: the real download code runs, and asks nobody."""
    commit = "0" * 40
    repo = tmp_path / "models--someone--tiny"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    (repo / "snapshots" / commit).mkdir(parents=True)
    (repo / "blobs").mkdir()
    for file in tiny_llama.iterdir():
        blob = repo / "blobs" / file.name
        blob.write_bytes(file.read_bytes())
        (repo / "snapshots" / commit / file.name).symlink_to(blob)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    model = anydevice.from_pretrained(None, "someone/tiny", device_map="cpu")
    assert type(model) is tf.LlamaForCausalLM
    with pytest.raises(CheckpointNotFoundError, match="someone/other"):
        anydevice.from_pretrained(None, "someone/other", device_map="cpu")


def test_inputs_may_come_from_the_host_though_the_whole_model_is_elsewhere(tiny_llama, sim):
    model = anydevice.from_pretrained(None, tiny_llama, device_map="sim:1")
    assert {p.device for p in model.parameters()} == {torch.device("sim:1")}
    with torch.no_grad():
        assert model(ids()).logits.device == torch.device("cpu")
