"""What a user can choose about Megatron-LM."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from anydevice.arguments import names_unknown_arguments
from anydevice.errors import OptionError

__all__ = ["MegatronLMPlugin"]

_GROUPS: Final = "give the optimizer parameter groups with rates and decays of their own"
_SCHEDULER: Final = "prepare a scheduler of torch or transformers"
_LOADER: Final = "prepare a DataLoader: it says how much data there is, and of which shape"
_LOOP: Final = "the script's own loop says it"
_TRACKER: Final = "use Accelerator(log_with='tensorboard')"
_DENSE: Final = "models of several experts are not converted: leave it out"
_ENCODER: Final = "models with an encoder are not converted: leave it out"
_OWN: Final = "write it into the script's loop, around model(**batch)"
_TP: Final = "use tp_degree, or sequence_parallelism with it"
_SHARD: Final = "use FullyShardedDataParallelPlugin(cpu_offload=True) instead of Megatron-LM"

#: What is not there, and what to do instead.
_REFUSED: Final = {
    "use_custom_fsdp": "use FullyShardedDataParallelPlugin() instead of Megatron-LM",
    "optimizer_cpu_offload": _SHARD,
    "overlap_cpu_optimizer_d2h_h2d": _SHARD,
    "use_precision_aware_optimizer": "it needs Transformer Engine: leave it out",
    "attention_backend": "attention is computed by Megatron's own layers: leave it out",
    "expert_model_parallel_size": _DENSE,
    "expert_tensor_parallel_size": _DENSE,
    "context_parallel_size": _TP,
    "pipeline_model_parallel_split_rank": _ENCODER,
    "num_layers_per_virtual_pipeline_stage": "use pp_degree alone: each process has one stage",
    "is_train_batch_min": _LOADER,
    "train_iters": _LOOP,
    "train_samples": _LOOP,
    "weight_decay_incr_style": _GROUPS,
    "start_weight_decay": _GROUPS,
    "end_weight_decay": _GROUPS,
    "lr_decay_style": _SCHEDULER,
    "lr_decay_iters": _SCHEDULER,
    "lr_decay_samples": _SCHEDULER,
    "lr_warmup_iters": _SCHEDULER,
    "lr_warmup_samples": _SCHEDULER,
    "lr_warmup_fraction": _SCHEDULER,
    "min_lr": _SCHEDULER,
    "consumed_samples": "use accelerator.skip_first_batches(loader, batches)",
    "no_wd_decay_cond": _GROUPS,
    "scale_lr_cond": _GROUPS,
    "lr_mult": _GROUPS,
    "megatron_dataset_flag": _LOADER,
    "encoder_seq_length": _ENCODER,
    "decoder_seq_length": "use seq_length",
    "tensorboard_dir": _TRACKER,
    "set_all_logging_options": _TRACKER,
    "eval_iters": _LOOP,
    "eval_interval": _LOOP,
    "custom_train_step_class": _OWN,
    "custom_train_step_kwargs": _OWN,
    "custom_model_provider_function": "prepare the model",
    "custom_prepare_model_function": "prepare the model",
    "custom_megatron_datasets_provider_function": _LOADER,
    "custom_get_batch_function": _LOADER,
    "custom_loss_function": "the loss is the model's own, over its labels",
}
#: One process each: these sizes say what is the case anyway.
_ONE: Final = frozenset(
    ("expert_model_parallel_size", "expert_tensor_parallel_size", "context_parallel_size")
)


@names_unknown_arguments
@dataclass
class MegatronLMPlugin:
    """Choices for Megatron-LM, by the names of the reference.

    What is not listed below is refused with what to use instead: the script's loop, loaders,
    schedulers and parameter groups say it.

    Args:
        tp_degree: processes that divide each layer.
        pp_degree: processes that each have a part of the layers.
        num_micro_batches: parts of a batch that go through the pipeline one after another; with one
            stage, parts whose gradients are added. A batch's size must be a multiple of it.
        gradient_clipping: the largest norm of the gradient; None or 0 does not clip.
        sequence_parallelism: divide norms and dropouts along the sequence too, within tp_degree.
        recompute_activations: compute attention again in backward, instead of keeping it.
        recompute_granularity: "selective", as above, or "full": whole layers.
        recompute_method: of "full": "uniform" or "block".
        recompute_num_layers: of "full": layers in one unit, or layers of a stage.
        use_distributed_optimizer: divide the optimizer's state over the data-parallel processes.
        decoder_last_pipeline_num_layers: layers of the last stage.
        attention_dropout: instead of the model's own.
        hidden_dropout: instead of the model's own.
        attention_softmax_in_fp32: compute the attention's softmax in float32.
        calculate_per_token_loss: weigh micro-batches and processes by their counted tokens.
        use_rotary_position_embeddings: checked against the model.
        eod_mask_loss: do not count the loss where the input is the configuration's eos_token_id.
        seq_length: the longest sequence; a longer one is an error.
        return_logits: return logits beside the loss.
        no_save_optim: leave the optimizer's state out of checkpoints.
        no_load_optim: load the weights of a checkpoint only.
        other_megatron_args: further fields of Megatron-core's `TransformerConfig`,
            `OptimizerConfig` and `DistributedDataParallelConfig`.

    Raises:
        OptionError: a choice that is not there, or a value that has no meaning.

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

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            given = getattr(self, field.name)
            same = given == field.default or (field.default is None and given is False)
            if field.name in _REFUSED and not same and not (field.name in _ONE and given == 1):
                raise OptionError(
                    f"MegatronLMPlugin({field.name}={given!r}) is not there: {_REFUSED[field.name]}"
                )
        for name in (
            "tp_degree",
            "pp_degree",
            "num_micro_batches",
            "decoder_last_pipeline_num_layers",
            "recompute_num_layers",
            "seq_length",
        ):
            given = getattr(self, name)
            if given is not None and (type(given) is not int or given < 1):
                raise OptionError(f"MegatronLMPlugin({name}={given!r}): give a number from 1")
        for name in ("attention_dropout", "hidden_dropout"):
            given = getattr(self, name)
            if given is not None and not 0 <= given < 1:
                raise OptionError(f"MegatronLMPlugin({name}={given!r}): give a share, from 0 to 1")
        if self.gradient_clipping is not None and not self.gradient_clipping >= 0:
            raise OptionError(
                f"MegatronLMPlugin(gradient_clipping={self.gradient_clipping!r}): give a norm, or "
                "0 for none"
            )
        if self.sequence_parallelism and (self.tp_degree or 1) == 1:
            raise OptionError(
                "MegatronLMPlugin(sequence_parallelism=True) divides within tp_degree, which is 1: "
                "give tp_degree, or leave it out"
            )
        self._check_recomputing()

    def _check_recomputing(self) -> None:
        granularity = self.recompute_granularity
        if granularity not in (None, "selective", "full"):
            raise OptionError(
                f"MegatronLMPlugin(recompute_granularity={granularity!r}): give 'selective' or "
                "'full'"
            )
        if self.recompute_activations and granularity == "full":
            raise OptionError(
                "MegatronLMPlugin(recompute_activations=True, recompute_granularity='full'): the "
                "first means 'selective'. Leave one out"
            )
        parts = (self.recompute_method, self.recompute_num_layers)
        if granularity == "full":
            if parts[0] not in ("uniform", "block") or parts[1] is None:
                raise OptionError(
                    "MegatronLMPlugin(recompute_granularity='full') needs recompute_method="
                    "'uniform' or 'block', and recompute_num_layers"
                )
        elif parts != (None, None):
            name = "recompute_num_layers" if parts[0] is None else "recompute_method"
            raise OptionError(f"MegatronLMPlugin({name}=...) needs recompute_granularity='full'")

    def model_arguments(self) -> dict[str, Any]:
        """What it says of Megatron's `TransformerConfig`.

        Example:
            >>> from anydevice import MegatronLMPlugin
            >>> MegatronLMPlugin(recompute_activations=True).model_arguments()[
            ...     "recompute_granularity"
            ... ]
            'selective'
        """
        granularity = "selective" if self.recompute_activations else self.recompute_granularity
        made = {
            "tensor_model_parallel_size": self.tp_degree or 1,
            "pipeline_model_parallel_size": self.pp_degree or 1,
            "sequence_parallel": bool(self.sequence_parallelism),
            "calculate_per_token_loss": bool(self.calculate_per_token_loss),
            "recompute_granularity": granularity,
            "recompute_method": self.recompute_method,
            "recompute_num_layers": self.recompute_num_layers,
            "num_layers_in_last_pipeline_stage": self.decoder_last_pipeline_num_layers,
        }
        for name in ("attention_dropout", "hidden_dropout", "attention_softmax_in_fp32"):
            if getattr(self, name) is not None:
                made[name] = getattr(self, name)
        return made
