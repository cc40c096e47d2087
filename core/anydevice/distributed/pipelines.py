"""`load_pipeline`: a model over several processes, each with some of its blocks."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from anydevice.checkpoint import Checkpoint
from anydevice.dispatch import dispatch_model, load_checkpoint_and_dispatch
from anydevice.distributed.chain import Chain, find_chain
from anydevice.distributed.cutting import cut
from anydevice.distributed.generating import let_generate
from anydevice.distributed.opening import open_model
from anydevice.distributed.part import StageCheckpoint, tied_names
from anydevice.distributed.running import Pipeline
from anydevice.distributed.stages import Stage, own_memory, plan_stages, share_memory
from anydevice.errors import OptionError
from anydevice.processes import PartialState
from anydevice.weights import iter_slots

__all__ = ["PipelineStageInfo", "load_pipeline"]


@dataclasses.dataclass(frozen=True)
class PipelineStageInfo:
    """What this process has of a pipeline.

    Attributes:
        rank: of this process.
        stages: of all ranks, in order.
        blocks: full names of the blocks of this one.
        nbytes: of this rank's weights and buffers.
        mapped_bytes: that are views of the checkpoint's files.
        read_bytes: that were read from it, cast or moved. Both are 0 for a model that had its
            weights.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from anydevice.distributed import load_pipeline
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        >>> load_pipeline(model, example_inputs=torch.zeros(1, 4)).anydevice_stage.blocks
        ('0', '1')
    """

    rank: int
    stages: tuple[Stage, ...]
    blocks: tuple[str, ...]
    nbytes: int
    mapped_bytes: int = 0
    read_bytes: int = 0


@torch.inference_mode(False)
def load_pipeline(
    model: nn.Module | str | os.PathLike[str],
    checkpoint: str | os.PathLike[str] | Checkpoint | None = None,
    *,
    max_memory: Mapping[Any, int | str] | None = None,
    microbatches: int = 1,
    example_inputs: Any = None,
    offload: bool = True,
    offload_folder: str | os.PathLike[str] | None = None,
    model_class: Any = None,
    dtype: str | torch.dtype | None = None,
    **options: Any,
) -> Any:
    """Spread a model over the processes that were started together, and make it run there.

    The blocks of the model are divided over the ranks, each getting some that follow one another:
    as evenly as the memory of all allows. Each rank reads its own weights only. Within a rank they
    are placed as `anydevice.load_checkpoint_and_dispatch` does, so that a stage that its device
    cannot hold is offloaded. Hidden states travel by ``torch.distributed.pipelining``.

    The model is called on every rank alike, with the same inputs, and returns its output on every
    rank. ``model.generate`` works: each rank keeps the key-value cache of its blocks, and all draw
    the tokens that rank 0 draws. It is for inference: no gradients are computed.

    Args:
        model: a folder or Hub repo id of a transformers model; or a model, perhaps built in
            `anydevice.init_empty_weights`, which is changed in place.
        checkpoint: of a model that is given empty; see `anydevice.load_checkpoint_and_dispatch`.
        max_memory: budgets of this process's devices; they may differ between ranks. By default
            this process's device and its share of the host's memory, measured.
        microbatches: how many parts a batch is divided into, so that stages work at the same time.
            Forwards with a key-value cache, such as those of ``generate``, use one.
        example_inputs: what the model's forward takes: a tensor, a tuple, or a dict of keyword
            arguments; only shapes matter. By default some are made for a transformers model. The
            model is run once on meta with them, to see where it can be cut.
        offload: whether weights may rest on the host next to an accelerator, or on the disk.
        offload_folder: where weights placed on the disk are written, unless a file has them.
        model_class: a transformers class, where ``model`` is a path; None takes the config's.
        dtype: the dtype to hold the weights in, where ``model`` is a path; see
            `anydevice.from_pretrained`.
        **options: where ``model`` is a path: ``config``, ``revision``, ``token``, ``variant``,
            ``subfolder``, ``cache_dir``, ``local_files_only``, ``trust_remote_code`` and
            ``attn_implementation`` of `anydevice.from_pretrained`.

    Returns:
        The model, cut to this rank's stage, with ``anydevice_stage`` (a `PipelineStageInfo`).

    Raises:
        ModelError: the model cannot be cut; the message says why.
        DoesNotFitError: the processes cannot hold the model, or one cannot hold a single block.
        OptionError: an argument cannot be used, or there are more processes than blocks.
        CollectiveMismatchError: the ranks load different models, or with different arguments.
        MissingRankError: a rank did not come in time, or has died.
        CheckpointError, BudgetError, UnknownDeviceError: see `load_checkpoint_and_dispatch`.

    Example:
        The same lines run in one process, and in several that ``torchrun`` starts.

        >>> import torch
        >>> from torch import nn
        >>> from anydevice.distributed import load_pipeline
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> model = load_pipeline(model, example_inputs=torch.zeros(1, 4))
        >>> model(torch.zeros(3, 4)).shape
        torch.Size([3, 2])
    """
    state = PartialState()
    if not isinstance(microbatches, int) or isinstance(microbatches, bool) or microbatches < 1:
        raise OptionError(f"microbatches={microbatches!r}: give a number from 1 up")
    built, source = open_model(model, checkpoint, model_class, dtype, options)
    built.eval()
    chain = find_chain(built, example_inputs)
    state.meet("load_pipeline", _description(built, chain, microbatches))
    own = own_memory(state, max_memory, offload=offload)
    stages = plan_stages(chain, share_memory(state, own))
    stage = stages[state.process_index]
    ties = tied_names(built)
    stand_ins = cut(built, chain, stage, state.device)
    placing: dict[str, Any] = {
        "device_map": "auto",
        "max_memory": own.budgets,
        "force_hooks": True,
        "disk": own.disk,
    }
    if source is None:
        dispatch_model(built, offload_dir=offload_folder, **placing)
    else:
        part = StageCheckpoint(source, [name for name, _ in iter_slots(built)], ties)
        load_checkpoint_and_dispatch(built, part, offload_folder=offload_folder, **placing)
    pipeline = Pipeline(built, chain, stage, state, microbatches)
    for stand_in in stand_ins:
        stand_in.__dict__["may_run"] = lambda: not pipeline.has_begun
    _install(built, pipeline)
    blocks = chain.blocks[stage.start : stage.stop]
    info = PipelineStageInfo(stage.rank, tuple(stages), blocks, stage.nbytes)
    if source is not None:
        report = built.anydevice_load_report
        info = dataclasses.replace(
            info, mapped_bytes=report.mapped_bytes, read_bytes=report.read_bytes
        )
    built.anydevice_stage = info
    return built


def _description(model: nn.Module, chain: Chain, microbatches: int) -> dict[str, Any]:
    """What must be equal on all ranks."""
    shapes = [f"{n} {tuple(p.shape)} {p.dtype}" for n, p in chain.bare.named_parameters()]
    digest = hashlib.blake2b("\n".join(shapes).encode(), digest_size=8).hexdigest()
    return {
        "model": type(model).__name__,
        "blocks": len(chain.blocks),
        "weights": digest,
        "microbatches": microbatches,
    }


def _install(model: nn.Module, pipeline: Pipeline) -> None:
    own = model.forward

    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return pipeline(*args, **kwargs)

    model.forward = forward
    let_generate(model, pipeline.state, pipeline.trusted)
