"""A model whose forward in training is Megatron's forward and backward of all micro-batches."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn

from anydevice.engines.megatron.device import MegatronDevice
from anydevice.engines.megatron.options import MegatronLMPlugin
from anydevice.errors import ModelError, OptionError

__all__ = ["MegatronModel"]

_INPUTS: Final = ("input_ids", "attention_mask", "position_ids", "labels")
_IGNORED: Final = -100  # transformers' label of what does not count


class MegatronModel(nn.Module):
    """Called as the transformers model: ``model(input_ids=..., labels=...).loss``.

    In training, gradients are computed within the call, since pipelines have no forward alone;
    ``backward`` of the loss only says how much they count.

    Args:
        running: Megatron's `DistributedDataParallel` of this process's stage.
        stage: its `GPTModel`.
        config: the transformers model's configuration.
        plugin: the choices.
        here: the device.
    """

    def __init__(
        self,
        running: Any,
        stage: Any,
        config: Any,
        plugin: MegatronLMPlugin,
        here: MegatronDevice,
    ) -> None:
        super().__init__()
        self.running = running
        self.config = config
        self._stage, self._plugin, self._here = [stage], plugin, here
        self._state: Any = importlib.import_module("megatron.core.parallel_state")
        self.optimizer: Any = None
        self.exchanging = True

    def forward(self, **batch: Any) -> Any:
        """The loss of a batch, and its logits where the plugin says so.

        Args:
            **batch: ``input_ids``, ``attention_mask`` and ``labels`` of shape (batch, sequence);
                ``position_ids`` where positions are learned.

        Returns:
            Transformers' `CausalLMOutput`, on each process of a pipeline.

        Raises:
            ModelError: training without a prepared optimizer.
            OptionError: a batch that this cannot take.
        """
        from transformers.modeling_outputs import CausalLMOutput

        training = self.training and torch.is_grad_enabled()
        if training and self.optimizer is None:
            raise ModelError(
                "MegatronLMPlugin: this model was prepared without an optimizer. Prepare both in "
                "one call: model, optimizer = accelerator.prepare(model, optimizer); or evaluate "
                "it with model.eval()"
            )
        if training and not self.exchanging and self._plugin.calculate_per_token_loss:
            raise OptionError(
                "MegatronLMPlugin(calculate_per_token_loss=True) counts the tokens of one call: "
                "give num_micro_batches instead of gradient_accumulation_steps"
            )
        parts = self._divide(batch, training)
        if training:
            self.optimizer.begin_batch()
        loss, logits = self._run(parts, training)
        if loss is not None and training:
            loss = _Weigh.apply(  # type: ignore[no-untyped-call]
                self.optimizer.anchor, loss, self.optimizer
            )
        return CausalLMOutput(loss=loss, logits=logits)

    # ------------------------------------------------------------------ batches

    def _divide(self, batch: Mapping[str, Any], training: bool) -> list[dict[str, torch.Tensor]]:
        given = {name: value for name, value in batch.items() if value is not None}
        others = [name for name in given if name not in _INPUTS]
        rotary = self._stage[0].position_embedding_type == "rope"
        if others or "input_ids" not in given:
            raise OptionError(
                f"MegatronLMPlugin: the batch has {', '.join(given) or 'nothing'}, and Megatron's "
                f"model takes {', '.join(_INPUTS)}. Leave {', '.join(others) or 'none'} out"
            )
        if training and "labels" not in given:
            raise OptionError(
                "MegatronLMPlugin: in training the batch needs labels: the loss is computed in "
                "the pipeline's last stage. Give labels=input_ids"
            )
        if rotary and "position_ids" in given:
            raise OptionError(
                "MegatronLMPlugin: rotary positions count from 0: leave position_ids out"
            )
        size, length = given["input_ids"].shape
        self._check_length(length)
        count = self._plugin.num_micro_batches or 1
        if size % count:
            if training:
                raise OptionError(
                    f"MegatronLMPlugin(num_micro_batches={count}) does not divide a batch of "
                    f"{size}: give loaders such a batch_size, and drop_last=True"
                )
            count = 1
        given = {name: value.to(self._here.device) for name, value in given.items()}
        return [
            {name: value.chunk(count)[number] for name, value in given.items()}
            for number in range(count)
        ]

    def _check_length(self, length: int) -> None:
        longest = self._plugin.seq_length
        if longest is not None and length > longest:
            raise OptionError(
                f"MegatronLMPlugin(seq_length={longest}): the batch has sequences of {length}. "
                "Truncate them, or give more"
            )
        degree = self._plugin.tp_degree or 1
        if self._plugin.sequence_parallelism and length % degree:
            raise OptionError(
                f"MegatronLMPlugin(sequence_parallelism=True) divides sequences by {degree}, and "
                f"the batch has {length}: pad to a multiple (pad_to_multiple_of={degree})"
            )

    def _inputs(self, part: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        ids = part["input_ids"]
        size, length = ids.shape
        hidden = torch.ones(length, length, dtype=torch.bool, device=ids.device).triu(1)
        hidden = hidden.expand(size, 1, length, length)
        if "attention_mask" in part:
            hidden = hidden | ~part["attention_mask"].bool()[:, None, None, :]
        counted = torch.arange(length, device=ids.device).expand(size, length)
        return {
            "input_ids": ids,
            "position_ids": part.get("position_ids", counted),
            "attention_mask": hidden,
        }

    def _targets(self, part: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Each position's next token, and whether it counts."""
        labels = part["labels"]
        shifted = torch.full_like(labels, _IGNORED)
        shifted[:, :-1] = labels[:, 1:]
        counts = shifted != _IGNORED
        if self._plugin.eod_mask_loss:
            counts = counts & (part["input_ids"] != self.config.eos_token_id)
        return shifted.masked_fill(~counts, 0), counts.float()

    # ------------------------------------------------------------------ running

    def _run(
        self, parts: list[dict[str, torch.Tensor]], training: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        schedules: Any = importlib.import_module("megatron.core.pipeline_parallel")
        self._stage[0].config.finalize_model_grads_func = (
            self._exchange if training and self.exchanging else None
        )
        size, length = parts[0]["input_ids"].shape
        with self._here.working(), self._random_states(training):
            found = schedules.get_forward_backward_func()(
                forward_step_func=self._step,
                data_iterator=iter(parts),
                model=[self.running],
                num_microbatches=len(parts),
                seq_length=length,
                micro_batch_size=size,
                forward_only=not training,
            )
        return self._share(found, parts)

    def _exchange(self, *args: Any, **kwargs: Any) -> None:
        gradients: Any = importlib.import_module("megatron.core.distributed")
        gradients.finalize_model_grads(*args, **kwargs)

    def _step(self, batches: Iterator[dict[str, torch.Tensor]], running: Any) -> tuple[Any, Any]:
        """One micro-batch through this stage; and how its loss follows, in the last."""
        part = next(batches)
        output = running(**self._inputs(part), labels=None)

        def loss_of(logits: torch.Tensor) -> Any:
            return self._loss(logits, part)

        return output, loss_of

    def _loss(self, logits: torch.Tensor, part: Mapping[str, torch.Tensor]) -> Any:
        kept: dict[str, Any] = {}
        if self._plugin.return_logits or "labels" not in part:
            gather: Any = importlib.import_module("megatron.core.tensor_parallel")
            kept["logits"] = gather.gather_from_tensor_model_parallel_region(
                logits.detach().float().clone()
            )
        if "labels" not in part:
            return logits.sum() * 0, kept
        targets, counts = self._targets(part)
        losses = self._stage[0].compute_language_model_loss(
            targets, logits.transpose(0, 1).contiguous()
        )
        total, number = (losses * counts).sum(), counts.sum()
        kept |= {"sum": total.detach().clone(), "number": number}
        if self._plugin.calculate_per_token_loss:
            return total, number.int(), kept
        return total / number.clamp(min=1), kept

    def _share(
        self, found: list[dict[str, Any]], parts: list[dict[str, torch.Tensor]]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The last stage's results, on all stages."""
        labelled = "labels" in parts[0]
        loss = torch.zeros((), device=self._here.device)
        logits = None
        if found and labelled:
            sums = torch.stack([part["sum"] for part in found])
            numbers = torch.stack([part["number"] for part in found])
            if self._plugin.calculate_per_token_loss:
                loss = sums.sum() / numbers.sum().clamp(min=1)
            else:
                loss = (sums / numbers.clamp(min=1)).mean()
        if self._plugin.return_logits or not labelled:
            size, length = parts[0]["input_ids"].shape
            shape = (size * len(parts), length, self.config.vocab_size)
            logits = (
                torch.cat([part["logits"] for part in found])
                if found
                else torch.empty(shape, device=self._here.device)
            )
        group = self._state.get_pipeline_model_parallel_group()
        if group.size() > 1:
            last = self._state.get_pipeline_model_parallel_last_rank()
            for value in (loss, logits):
                if value is not None:
                    torch.distributed.broadcast(value, src=last, group=group)
        return (loss if labelled else None), logits

    # ------------------------------------------------------------------ random numbers

    @contextlib.contextmanager
    def _random_states(self, training: bool) -> Iterator[None]:
        """Dropout by a seed drawn from this process's own generator, and equal where it must be.

        Processes that work on one batch drop the same elements of what each has whole, and others
        of what is divided. The user's generator goes on by one number.
        """
        config = self._stage[0].config
        if not training or not (config.attention_dropout or config.hidden_dropout):
            yield
            return
        group = self._state.get_model_parallel_group()
        seed = torch.randint(2**31, (1,)).to(self._here.device)
        torch.distributed.broadcast(
            seed, src=self._state.get_model_parallel_src_rank(), group=group
        )
        stage = self._state.get_pipeline_model_parallel_rank()
        self._here.seed(int(seed) + 100 * stage, self._state.get_tensor_model_parallel_rank())
        with self._here.drawing():
            yield


class _Weigh(torch.autograd.Function):
    """A loss whose backward tells the optimizer how much it counts."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, loss: torch.Tensor, optimizer: Any) -> torch.Tensor:
        ctx.optimizer = optimizer
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.optimizer.weigh(float(gradients[0]))
        return None, None, None
