"""Models of transformers with containers and odd structures, divided by "auto"."""

from __future__ import annotations

import copy

import pytest
import torch

import anydevice

transformers = pytest.importorskip("transformers")

IDS = torch.arange(1, 8)[None]
IMAGE = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
STAGES = {
    "depths": [1, 1, 1, 1],
    "num_attention_heads": [1, 2, 2, 2],
    "mlp_ratios": [2, 2, 2, 2],
    "hidden_sizes": [8, 16, 16, 16],
}
SEQUENCES = {
    "vocab_size": 64,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
}


def bart():
    config = transformers.BartConfig(**SEQUENCES, max_position_embeddings=32)
    return transformers.BartForConditionalGeneration(config), {
        "input_ids": IDS,
        "decoder_input_ids": IDS,
    }


def t5():
    config = transformers.T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2
    )
    model = transformers.T5ForConditionalGeneration(config)
    return model, {"input_ids": IDS, "decoder_input_ids": IDS}


def pvt():
    config = transformers.PvtConfig(
        image_size=32, sequence_reduction_ratios=[4, 2, 1, 1], num_labels=3, **STAGES
    )
    return transformers.PvtForImageClassification(config), {"pixel_values": IMAGE}


def glpn():
    config = transformers.GLPNConfig(sr_ratios=[4, 2, 1, 1], decoder_hidden_size=8, **STAGES)
    return transformers.GLPNForDepthEstimation(config), {"pixel_values": IMAGE}


def wav2vec2():
    config = transformers.Wav2Vec2Config(
        vocab_size=20,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        conv_dim=(8, 8),
        conv_stride=(5, 2),
        conv_kernel=(10, 3),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
    )
    return transformers.Wav2Vec2ForCTC(config), {"input_values": IMAGE.flatten()[None, :400]}


def perceiver():
    config = transformers.PerceiverConfig(
        num_latents=4,
        d_latents=16,
        d_model=16,
        num_blocks=1,
        num_self_attends_per_block=2,
        num_self_attention_heads=2,
        num_cross_attention_heads=2,
        vocab_size=32,
        max_position_embeddings=16,
    )
    return transformers.PerceiverForMaskedLM(config), {"inputs": torch.arange(16)[None]}


def answer(output):
    return next(t for t in output.to_tuple() if isinstance(t, torch.Tensor)).cpu()


@pytest.mark.parametrize("make", [bart, t5, pvt, glpn, wav2vec2, perceiver])
@pytest.mark.filterwarnings("ignore")
def test_divided_models_give_what_they_do_undivided(sim, make):
    torch.manual_seed(0)
    model, inputs = make()
    model.eval()
    size = sum(tensor.nbytes for tensor in model.state_dict().values())
    with torch.no_grad():
        want = answer(model(**inputs))
        for first, second in ((0.3, 1.2), (0.6, 1.2), (0.4, 0.4)):
            divided = copy.deepcopy(model)
            budgets = {0: int(size * first), 1: int(size * second), "cpu": 4 * size}
            anydevice.dispatch_model(divided, "auto", max_memory=budgets)
            for _ in range(2):
                sim.reset_counters()
                torch.testing.assert_close(answer(divided(**inputs)), want, rtol=1e-4, atol=1e-4)
            if second > 1:  # all resident: activations travel, and weights do not
                moved = sum(sim.counters(i)["p2p_bytes"] for i in (0, 1))
                assert moved < size / 5, f"{moved} of {size} bytes"
