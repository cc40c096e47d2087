"""The settings of Megatron-LM, by the fields of its plugin."""

from __future__ import annotations

from typing import Final

from anydevice.launch.settings import Kind, Setting

__all__ = ["MEGATRON"]


def _megatron(name: str, kind: Kind, text: str, choices: tuple[str, ...] = ()) -> Setting:
    return Setting(
        f"megatron_lm_{name}",
        kind,
        text,
        "megatron-lm",
        keys=(f"megatron_lm_config.megatron_lm_{name}",),
        variable=f"MEGATRON_LM_{name.upper()}",
        choices=choices,
        least=1 if kind == "int" else 0.0 if kind == "float" else None,
        needs="use_megatron_lm",
    )


MEGATRON: Final = (
    _megatron("tp_degree", "int", "processes that divide each layer"),
    _megatron("pp_degree", "int", "processes that each have a part of the layers"),
    _megatron("num_micro_batches", "int", "parts of a batch that go one after another"),
    _megatron("gradient_clipping", "float", "the largest norm of the gradient"),
    _megatron("sequence_parallelism", "bool", "divide norms along the sequence too"),
    _megatron("recompute_activations", "bool", "compute attention again in backward"),
    _megatron("recompute_granularity", "choice", "what is computed again", ("selective", "full")),
    _megatron("recompute_method", "choice", "which whole layers are", ("uniform", "block")),
    _megatron("recompute_num_layers", "int", "how many layers are, or in one unit"),
    _megatron("use_distributed_optimizer", "bool", "divide the optimizer's state"),
    _megatron("decoder_last_pipeline_num_layers", "int", "layers of the last stage"),
    _megatron("attention_dropout", "float", "instead of the model's own"),
    _megatron("hidden_dropout", "float", "instead of the model's own"),
    _megatron("attention_softmax_in_fp32", "bool", "compute the softmax in float32"),
    _megatron("calculate_per_token_loss", "bool", "weigh losses by their counted tokens"),
    _megatron("use_rotary_position_embeddings", "bool", "checked against the model"),
    _megatron("eod_mask_loss", "bool", "do not count the loss at ends of documents"),
    _megatron("no_save_optim", "bool", "leave the optimizer out of checkpoints"),
    _megatron("no_load_optim", "bool", "load the weights of a checkpoint only"),
)
