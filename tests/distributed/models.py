"""Small random models of several families, saved as their users save them."""

from __future__ import annotations

import torch

#: Sizes that most configs of transformers know.
SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
MODULES = tuple(
    f"transformers.models.{name}.modeling_{name}"
    for name in ("llama", "gpt2", "opt", "mixtral", "gemma3", "bert")
)


def without(*names):
    return {name: value for name, value in SMALL.items() if name not in names}


def makers():
    """A function for each model, by name; a large vocabulary's embedding is tied in "tied"."""
    import transformers as tf

    heads = without("num_key_value_heads")
    return {
        "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**SMALL)),
        "tied": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**SMALL, tie_word_embeddings=True)),
        "gpt2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**without("num_key_value_heads"))),
        # Its last norm stands before the layers, and learned positions come from the mask.
        "opt": lambda: tf.OPTForCausalLM(tf.OPTConfig(**heads, ffn_dim=48, word_embed_proj_dim=32)),
        "mixtral": lambda: tf.MixtralForCausalLM(
            tf.MixtralConfig(**SMALL, num_local_experts=3, num_experts_per_tok=2)
        ),
        # Layers of two kinds, each with a mask and a cache of its own.
        "gemma3": lambda: tf.Gemma3ForCausalLM(
            tf.Gemma3TextConfig(
                **SMALL,
                head_dim=8,
                sliding_window=4,
                layer_types=["sliding_attention", "full_attention"] * 2,
            )
        ),
    }


def save(name, folder):
    """Save one model, and return what it answers: see `answers`."""
    torch.manual_seed(len(name))
    model = makers()[name]().eval()
    model.save_pretrained(folder, max_shard_size="30KB")
    return answers(model)


def batch(device="cpu"):
    """Three prompts of different lengths, padded on the left."""
    ids = torch.tensor([[5, 6, 7, 8, 9], [0, 0, 11, 12, 13], [0, 3, 2, 4, 21]])
    return {"input_ids": ids.to(device), "attention_mask": (ids != 0).long().to(device)}


def answers(model, device="cpu", *, few=False):
    """Logits, and tokens greedy, sampled and by beams; on the host."""
    inputs = batch(device)
    found = {"logits": model(**inputs).logits}
    greedy = {"max_new_tokens": 4, "do_sample": False}
    if few:
        found["greedy"] = model.generate(**inputs, **greedy)
        return {name: tensor.detach().cpu() for name, tensor in found.items()}
    found["greedy"] = model.generate(**inputs, **greedy)
    found["alone"] = model.generate(inputs["input_ids"][:1], **greedy)
    found["beams"] = model.generate(**inputs, **greedy, num_beams=2)
    torch.manual_seed(7)
    found["sampled"] = model.generate(**inputs, max_new_tokens=4, do_sample=True)
    found["uncached"] = model.generate(**inputs, **greedy, use_cache=False)
    found["static"] = model.generate(
        **inputs, **greedy, cache_implementation="static", disable_compile=True
    )
    return {name: tensor.detach().cpu() for name, tensor in found.items()}
