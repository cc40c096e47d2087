"""Megatron-LM: asked for by its plugin, and refused with what to do instead."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from anydevice.arguments import names_unknown_arguments
from anydevice.engines.base import Setup
from anydevice.engines.single import SingleEngine
from anydevice.errors import MissingDependencyError, OptionError

__all__ = ["MegatronLMEngine", "MegatronLMPlugin"]


@names_unknown_arguments
@dataclass
class MegatronLMPlugin:
    """Choices for Megatron-LM, by the names of the reference.

    None of them has an effect: an `Accelerator` with this plugin is refused, and the message says
    what to use instead.

    Example:
        >>> from anydevice import MegatronLMPlugin
        >>> MegatronLMPlugin(tp_degree=2).tp_degree
        2
    """

    tp_degree: int | None = None
    pp_degree: int | None = None
    use_custom_fsdp: bool | None = None
    overlap_cpu_optimizer_d2h_h2d: bool | None = None
    no_load_optim: bool | None = None
    eod_mask_loss: bool | None = None
    no_save_optim: bool | None = None
    optimizer_cpu_offload: bool | None = None
    use_precision_aware_optimizer: bool | None = None
    decoder_last_pipeline_num_layers: int | None = None
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    attention_backend: bool | None = None
    expert_model_parallel_size: int | None = None
    context_parallel_size: int | None = None
    attention_dropout: float | None = None
    hidden_dropout: float | None = None
    attention_softmax_in_fp32: bool | None = None
    expert_tensor_parallel_size: int | None = None
    calculate_per_token_loss: bool | None = None
    use_rotary_position_embeddings: bool | None = None
    num_micro_batches: int | None = None
    gradient_clipping: float | None = None
    sequence_parallelism: bool | None = None
    recompute_activations: bool | None = None
    use_distributed_optimizer: bool | None = None
    pipeline_model_parallel_split_rank: int | None = None
    num_layers_per_virtual_pipeline_stage: int | None = None
    is_train_batch_min: bool = True
    train_iters: int | None = None
    train_samples: int | None = None
    weight_decay_incr_style: str = "constant"
    start_weight_decay: float | None = None
    end_weight_decay: float | None = None
    lr_decay_style: str = "linear"
    lr_decay_iters: int | None = None
    lr_decay_samples: int | None = None
    lr_warmup_iters: int | None = None
    lr_warmup_samples: int | None = None
    lr_warmup_fraction: float | None = None
    min_lr: float = 0
    consumed_samples: list[int] | None = None
    no_wd_decay_cond: Callable[..., Any] | None = None
    scale_lr_cond: Callable[..., Any] | None = None
    lr_mult: float = 1.0
    megatron_dataset_flag: bool = False
    seq_length: int | None = None
    encoder_seq_length: int | None = None
    decoder_seq_length: int | None = None
    tensorboard_dir: str | None = None
    set_all_logging_options: bool = False
    eval_iters: int = 100
    eval_interval: int = 1000
    return_logits: bool = False
    custom_train_step_class: Any = None
    custom_train_step_kwargs: dict[str, Any] | None = None
    custom_model_provider_function: Callable[..., Any] | None = None
    custom_prepare_model_function: Callable[..., Any] | None = None
    custom_megatron_datasets_provider_function: Callable[..., Any] | None = None
    custom_get_batch_function: Callable[..., Any] | None = None
    custom_loss_function: Callable[..., Any] | None = None
    other_megatron_args: dict[str, Any] | None = None


class MegatronLMEngine(SingleEngine):
    """Refuses: Megatron-LM builds the model, its optimizer and its data by itself.

    Raises:
        MissingDependencyError: Megatron-LM is not installed.
        OptionError: it is.
    """

    name = "megatron_lm"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        instead = (
            "For tensor parallelism of an ordinary model: "
            "Accelerator(parallelism_config=ParallelismConfig(tp_size=..., dp_shard_size=...))"
        )
        if importlib.util.find_spec("megatron") is None:
            raise MissingDependencyError(
                f"MegatronLMPlugin needs Megatron-LM: pip install megatron-core. {instead}"
            )
        raise OptionError(
            "MegatronLMPlugin: Megatron-LM trains models that it builds itself, with its own "
            f"pretrain(), and no engine here runs them. {instead}"
        )
