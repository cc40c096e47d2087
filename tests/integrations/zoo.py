"""Small random models of transformers, one of each kind, with inputs."""

from __future__ import annotations

import functools

import torch

TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
IDS = torch.tensor([[1, 5, 7, 9, 3], [1, 4, 6, 8, 10]])
#: The second text is shorter, and padded on its left.
PADDED = {
    "input_ids": torch.tensor([[1, 5, 7, 9, 3], [0, 0, 1, 8, 10]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]]),
}


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**TEXT, num_key_value_heads=2)), {"input_ids": IDS}


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=64,
        n_embd=32,
        n_layer=3,
        n_head=4,
        n_positions=128,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return GPT2LMHeadModel(config), {"input_ids": IDS}


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, pad_token_id=0
    )
    config.decoder_start_token_id = 0
    return T5ForConditionalGeneration(config), {"input_ids": IDS, "decoder_input_ids": IDS}


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**TEXT, num_key_value_heads=2, num_local_experts=4)
    return MixtralForCausalLM(config), {"input_ids": IDS}


def bert():
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**TEXT)), {"input_ids": IDS}


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
        max_source_positions=20,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    features = torch.rand(2, 8, 40, generator=torch.Generator().manual_seed(0))
    return WhisperForConditionalGeneration(config), {
        "input_features": features,
        "decoder_input_ids": IDS,
    }


def llava():
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
    )

    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=8,
        patch_size=4,
        projection_dim=32,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=LlamaConfig(**TEXT, num_key_value_heads=2),
        image_token_id=63,
        vision_feature_layer=-1,
    )
    pixels = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[1, 63, 63, 63, 63, 7, 9], [1, 63, 63, 63, 63, 8, 10]])
    return LlavaForConditionalGeneration(config), {"input_ids": ids, "pixel_values": pixels}


def mamba():
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(
        vocab_size=64,
        hidden_size=32,
        state_size=4,
        num_hidden_layers=3,
        conv_kernel=4,
        expand=2,
        time_step_rank=2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return MambaForCausalLM(config), {"input_ids": IDS}


def word_tokenizer():
    """A tokenizer of 64 words, made here: nothing is downloaded."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", *(f"w{number}" for number in range(3, 64))]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


FAMILIES = (llama, gpt2, t5, mixtral, bert, whisper, llava, mamba)
GENERATING = ("llama", "gpt2", "t5", "mixtral", "whisper", "llava", "mamba")


class Saved:
    """A model that was saved once: its folder, its class, inputs, and the plain model itself."""

    def __init__(self, family, folder):
        torch.manual_seed(0)
        model, self.inputs = family()
        self.plain = model.eval()
        self.folder = str(folder)
        self.model_class = type(model)
        model.save_pretrained(folder)
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        self.kilobytes = weights // 1024

    def load(self, device_map="auto", **options):
        return self.model_class.from_pretrained(self.folder, device_map=device_map, **options)

    def spread(self, folder, **options):
        """Load it with a part on each accelerator, on the host and on the disk."""
        part = self.kilobytes // 5
        budgets = {0: f"{2 * part}KiB", 1: f"{2 * part}KiB", "cpu": f"{part}KiB"}
        return self.load(max_memory=budgets, offload_folder=str(folder), **options)

    @functools.cached_property
    def prompt(self):
        """The inputs to generate from."""
        return {k: v for k, v in self.inputs.items() if k != "decoder_input_ids"}

    @functools.cached_property
    @torch.no_grad()
    def logits(self):
        """What the plain model gives."""
        return self.plain(**self.inputs).logits
