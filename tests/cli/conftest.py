"""A small config and checkpoints on disk; no accelerator of an earlier test."""

import pytest

from anydevice_conformance.simulator.backend import SimulatorBackend


@pytest.fixture(autouse=True)
def _no_accelerator(request, monkeypatch, tmp_path):
    if not {"sim", "simulator"} & set(request.fixturenames):
        monkeypatch.setattr(SimulatorBackend, "is_available", lambda backend: False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


@pytest.fixture(scope="session")
def config_only(tmp_path_factory):
    """The config of a large Llama: 6.7 billion parameters, and no weights."""
    from transformers import LlamaConfig

    folder = tmp_path_factory.mktemp("config")
    LlamaConfig(
        num_hidden_layers=32,
        hidden_size=4096,
        intermediate_size=11008,
        num_attention_heads=32,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    ).save_pretrained(folder)
    return folder
