"""Small random models of transformers, spread under tight budgets, give what plain ones give."""

from __future__ import annotations

import pytest
import torch

import anydevice

IDS = torch.tensor([[1, 5, 7, 9, 3], [2, 4, 6, 8, 10]])
LLAMA = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**LLAMA))


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**LLAMA, num_local_experts=4))


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=64,
        n_embd=32,
        n_layer=4,
        n_head=4,
        n_positions=64,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    return GPT2LMHeadModel(config)


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=3,
        num_heads=4,
        decoder_start_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
    )
    return T5ForConditionalGeneration(config)


def bert():
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=64,
    )
    return BertModel(config)


def whisper():
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=64,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_mel_bins=8,
        max_source_positions=50,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    return WhisperForConditionalGeneration(config)


def run(model):
    name = type(model).__name__
    features = torch.linspace(-1, 1, 800).reshape(1, 8, 100)
    with torch.no_grad():
        if name == "BertModel":
            output = model(input_ids=IDS)
            return [output.last_hidden_state, output.pooler_output]
        if name.startswith("Whisper"):
            return [model(input_features=features, decoder_input_ids=IDS[:1]).logits]
        more = {"decoder_input_ids": IDS} if name.startswith("T5") else {}
        logits = model(input_ids=IDS, attention_mask=torch.ones_like(IDS), **more).logits
        tokens = model.generate(
            IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=6, do_sample=False
        )
        return [logits, tokens]


@pytest.mark.filterwarnings("ignore")  # transformers' own, about its generation options
@pytest.mark.parametrize("make", [llama, gpt2, t5, mixtral, bert, whisper])
@pytest.mark.parametrize("share", [0.6, 0.3])
def test_auto_map_under_tight_caps(sim, make, share):
    torch.manual_seed(0)
    plain = make().eval()
    want = run(plain)
    torch.manual_seed(0)
    model = make().eval()
    size = sum(p.nbytes for p in model.parameters())
    caps = {0: int(size * share), "sim:1": int(size * share / 2), "cpu": "1GiB"}
    anydevice.dispatch_model(model, "auto", max_memory=caps)
    ties = {n for n, _ in plain.named_parameters()}
    assert {n for n, _ in model.named_parameters()} == ties
    assert len(set(map(str, model.hf_device_map.values()))) > 1
    for got, expected in zip(run(model), want, strict=True):
        torch.testing.assert_close(got.cpu(), expected, rtol=1e-5, atol=1e-5)
    anydevice.undispatch(model)
    for got, expected in zip(run(model), want, strict=True):
        assert torch.equal(got, expected)
