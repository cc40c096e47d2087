"""A transformers model's configuration as Megatron's, and Megatron's model of it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import nn

from anydevice.engines.megatron.options import MegatronLMPlugin
from anydevice.errors import ModelError, OptionError

__all__ = ["TorchNorm", "build_model", "join_arguments", "read_model"]

_FAMILIES: Final = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "llama",
    "GPT2LMHeadModel": "gpt2",
}
#: Settings of a model that Megatron's layers have no counterpart for, and the value they must have.
_PLAIN: Final[Mapping[str, Mapping[str, tuple[Any, ...]]]] = {
    "llama": {
        "attention_bias": (False, None),
        "mlp_bias": (False, None),
        "use_sliding_window": (False, None),
    },
    "gpt2": {
        "add_cross_attention": (False,),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "reorder_and_upcast_attn": (False,),
    },
}


def read_model(model: nn.Module, plugin: MegatronLMPlugin, dtype: torch.dtype) -> dict[str, Any]:
    """The arguments of Megatron's `TransformerConfig` that follow from a transformers model.

    Raises:
        ModelError: a model that Megatron's layers cannot compute.
        OptionError: degrees that do not divide it, or a choice that contradicts it.
    """
    family = _FAMILIES.get(type(model).__name__)
    if family is None:
        raise ModelError(
            f"MegatronLMPlugin: {type(model).__name__} is none of {', '.join(_FAMILIES)}, whose "
            "weights are converted to Megatron's. Train it with FullyShardedDataParallelPlugin() "
            "or ParallelismConfig(tp_size=...)"
        )
    config: Any = model.config
    for name, allowed in _PLAIN[family].items():
        if getattr(config, name, allowed[0]) not in allowed:
            raise ModelError(
                f"MegatronLMPlugin: the model's {name}={getattr(config, name)!r} has no "
                "counterpart in Megatron's layers. Train it with FullyShardedDataParallelPlugin()"
            )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ModelError(
            f"MegatronLMPlugin: {type(model).__name__} has no weights (they are on the meta "
            "device): load it whole, or prepare it once only"
        )
    made = _llama(model) if family == "llama" else _gpt2(model)
    _check_degrees(model, plugin)
    rotary = plugin.use_rotary_position_embeddings
    if rotary is not None and rotary != (family == "llama"):
        raise OptionError(
            f"MegatronLMPlugin(use_rotary_position_embeddings={rotary}): {type(model).__name__} "
            f"has {'rotary' if family == 'llama' else 'learned'} positions. Leave it out"
        )
    if dtype == torch.bfloat16:
        made |= {"bf16": True}
    return made | {"params_dtype": dtype, "pipeline_dtype": dtype} | plugin.model_arguments()


def _check_degrees(model: nn.Module, plugin: MegatronLMPlugin) -> None:
    config: Any = model.config
    tensor = plugin.tp_degree or 1
    heads = config.num_attention_heads
    for name, size in (
        ("vocab_size", config.vocab_size),
        ("num_attention_heads", heads),
        ("num_key_value_heads", getattr(config, "num_key_value_heads", heads)),
    ):
        if size % tensor:
            more = (
                f": model.resize_token_embeddings(pad_to_multiple_of={tensor})"
                if name == "vocab_size"
                else ""
            )
            raise OptionError(
                f"MegatronLMPlugin(tp_degree={tensor}) does not divide the model's "
                f"{name}={size}: give a degree that does{more}"
            )
    stages, last = plugin.pp_degree or 1, plugin.decoder_last_pipeline_num_layers
    layers, rest = config.num_hidden_layers, stages
    if last is not None:
        if stages == 1:
            raise OptionError(
                f"MegatronLMPlugin(decoder_last_pipeline_num_layers={last}) needs pp_degree=2 or "
                "more: leave it out"
            )
        layers, rest = layers - last, stages - 1
    if layers < rest or layers % rest:
        raise OptionError(
            f"MegatronLMPlugin(pp_degree={stages}) does not divide the model's "
            f"{config.num_hidden_layers} layers: give a degree that does, or "
            "decoder_last_pipeline_num_layers"
        )


def _llama(model: nn.Module) -> dict[str, Any]:
    config: Any = model.config
    rotary: Any = model.get_submodule("model.rotary_emb")
    if getattr(config, "sliding_window", None) is not None and getattr(
        config, "use_sliding_window", True
    ):
        raise ModelError(
            f"MegatronLMPlugin: the model's sliding_window={config.sliding_window} has no "
            "counterpart here: set config.sliding_window = None, or use "
            "FullyShardedDataParallelPlugin()"
        )
    if rotary.attention_scaling != 1.0 or "dynamic" in rotary.rope_type:
        raise ModelError(
            f"MegatronLMPlugin: rotary positions of type {rotary.rope_type!r} have no counterpart "
            "in Megatron's layers. Train it with FullyShardedDataParallelPlugin()"
        )
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": head,
        "ffn_hidden_size": config.intermediate_size,
        "layernorm_epsilon": config.rms_norm_eps,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": _activation(config.hidden_act),
        "add_bias_linear": False,
        "add_qkv_bias": hasattr(model.get_submodule("model.layers.0.self_attn.q_proj"), "bias")
        and model.get_submodule("model.layers.0.self_attn.q_proj").bias is not None,
        "attention_dropout": config.attention_dropout,
        "hidden_dropout": 0.0,
    }


def _gpt2(model: nn.Module) -> dict[str, Any]:
    config: Any = model.config
    if config.embd_pdrop != config.resid_pdrop:
        raise ModelError(
            f"MegatronLMPlugin: the model's embd_pdrop={config.embd_pdrop} and resid_pdrop="
            f"{config.resid_pdrop} differ, and Megatron has one hidden_dropout: set them equal"
        )
    return {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "ffn_hidden_size": config.n_inner or 4 * config.hidden_size,
        "layernorm_epsilon": config.layer_norm_epsilon,
        "normalization": "LayerNorm",
        "activation_func": _activation(config.activation_function),
        "attention_dropout": config.attn_pdrop,
        "hidden_dropout": config.resid_pdrop,
    }


def _activation(name: str) -> Callable[..., Any]:
    from transformers.activations import ACT2FN

    made: Callable[..., Any] = ACT2FN[name]
    return made


class TorchNorm:
    """Torch's norm of Megatron's ``config``, also where sequences are divided.

    Megatron's own refuses that; it needs only that the gradient of the weights is summed over the
    tensor-parallel processes, which it does for parameters so marked.
    """

    def __new__(  # type: ignore[misc]
        cls, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any
    ) -> nn.Module:
        """A module of torch."""
        kind = nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm
        norm: nn.Module = kind(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


def build_model(model: Any, config: Any) -> Any:
    """Make this process's stage of Megatron's `GPTModel`, its weights not yet set.

    Args:
        model: the transformers model.
        config: Megatron's.
    """
    gpt: Any = importlib.import_module("megatron.core.models.gpt")
    specs: Any = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    block: Any = importlib.import_module("megatron.core.transformer.transformer_block")
    state: Any = importlib.import_module("megatron.core.parallel_state")
    spec = specs.get_gpt_layer_local_spec(normalization=config.normalization)
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = TorchNorm
    count = block.get_num_layers_to_build(config)
    rotary = config.normalization == "RMSNorm"
    made = gpt.GPTModel(
        config,
        block.TransformerBlockSubmodules(layer_specs=[spec] * count, layer_norm=TorchNorm),
        vocab_size=model.config.vocab_size,
        max_sequence_length=model.config.max_position_embeddings,
        pre_process=state.is_pipeline_first_stage(),
        post_process=state.is_pipeline_last_stage(),
        position_embedding_type="rope" if rotary else "learned_absolute",
        share_embeddings_and_output_weights=model.config.tie_word_embeddings,
    )
    if rotary:
        frequencies = model.get_submodule("model.rotary_emb").inv_freq
        made.rotary_pos_emb.inv_freq.copy_(frequencies)
    return made


def join_arguments(ours: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of one of Megatron's configurations.

    Args:
        ours: what follows from the model and the plugin's fields.
        others: of ``other_megatron_args``.

    Raises:
        OptionError: both say the same field.
    """
    twice = sorted(ours.keys() & others.keys())
    if twice:
        raise OptionError(
            f"MegatronLMPlugin(other_megatron_args={{{twice[0]!r}: ...}}): it follows from the "
            "model, the precision, or the plugin's field of that meaning. Say it there"
        )
    return {**ours, **others}
