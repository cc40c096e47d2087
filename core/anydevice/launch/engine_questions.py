"""The questions of ``anydevice config`` about the engine that divides the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final

__all__ = ["ENGINES", "Question"]

#: The answers so far, by the name of the setting.
Answers = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Question:
    """A question for one setting.

    Attributes:
        name: of the setting.
        text: what is asked.
        offered: the answer that an empty line gives; None: an answer is needed.
        when: whether it is asked, by the answers so far.
    """

    name: str
    text: str
    offered: Any = None
    when: Callable[[Answers], bool] = lambda answers: True


def _by_questions(answers: Answers) -> bool:
    return "deepspeed_config_file" not in answers


def _at_stage(least: int) -> Callable[[Answers], bool]:
    return lambda answers: _by_questions(answers) and answers.get("zero_stage", 0) >= least


def _on_disk(what: str) -> Callable[[Answers], bool]:
    return lambda answers: answers.get(f"offload_{what}_device") == "nvme"


def _above_one(name: str) -> Callable[[Answers], bool]:
    return lambda answers: answers.get(name, 1) > 1


_Q = Question
#: By the setting that chooses an engine: the question for it, and those that follow a yes.
ENGINES: Final[Mapping[str, tuple[str, tuple[Question, ...]]]] = {
    "use_fsdp": (
        "Shard the model over the processes (FSDP)?",
        (_Q("fsdp_offload_params", "Keep the shards in host memory?", False),),
    ),
    "use_deepspeed": (
        "Train with DeepSpeed?",
        (
            _Q("zero_stage", "Stage of ZeRO (0 to 3)?", 2, _by_questions),
            _Q(
                "offload_optimizer_device",
                "Where does the optimizer rest (none, cpu, nvme)?",
                "none",
                _at_stage(1),
            ),
            _Q(
                "offload_optimizer_nvme_path",
                "In which folder of the disk?",
                when=_on_disk("optimizer"),
            ),
            _Q(
                "offload_param_device",
                "Where do the weights rest (none, cpu, nvme)?",
                "none",
                _at_stage(3),
            ),
            _Q("offload_param_nvme_path", "In which folder of the disk?", when=_on_disk("param")),
            _Q("gradient_clipping", "The largest norm of the gradient?", 1.0, _by_questions),
            _Q("zero3_save_16bit_model", "Save gathered 16-bit weights?", False, _at_stage(3)),
        ),
    ),
    "use_megatron_lm": (
        "Train with Megatron-LM?",
        (
            _Q("megatron_lm_tp_degree", "How many processes divide each layer?", 1),
            _Q(
                "megatron_lm_sequence_parallelism",
                "Divide norms along the sequence too?",
                False,
                _above_one("megatron_lm_tp_degree"),
            ),
            _Q("megatron_lm_pp_degree", "How many processes have a part of the layers each?", 1),
            _Q(
                "megatron_lm_num_micro_batches",
                "In how many parts does a batch go through them?",
                2,
                _above_one("megatron_lm_pp_degree"),
            ),
            _Q(
                "megatron_lm_use_distributed_optimizer",
                "Divide the optimizer among the copies of the model?",
                False,
            ),
            _Q("megatron_lm_recompute_activations", "Compute attention again in backward?", False),
            _Q("megatron_lm_gradient_clipping", "The largest norm of the gradient?", 1.0),
        ),
    ),
}
