"""Loading by one process for all: rank 0 reads the checkpoint and sends it to the others.

[Note: no rank waits for ever, and no model changes alone]
Before and after each step that can fail on one rank, all ranks meet and tell how it went; so each
raises an error that names the rank at fault and its reason. A rank that does not come in time, or
has ended, is an error that names it. While weights are sent, a rank that failed goes on receiving;
after every few of them the ranks agree whether to go on. Weights are received into new memory, and
only when all ranks have all of them does any model change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from anydevice.checkpoint.checkpoint import Checkpoint
from anydevice.checkpoint.info import TensorInfo
from anydevice.devices import CPU, DISK
from anydevice.errors import ModelError
from anydevice.loading.applying import Loading, PrepareRest
from anydevice.loading.converting import convert
from anydevice.loading.failures import explained
from anydevice.loading.match import Plan, Target
from anydevice.loading.options import LoadOptions
from anydevice.loading.progress import Progress
from anydevice.loading.ranks import Ranks, connected, pending_interrupt
from anydevice.loading.report import LoadReport
from anydevice.loading.shards import cut

__all__ = ["load_from_rank0"]

#: Bytes that are sent before the ranks agree again whether to go on.
_BATCH_BYTES: Final = 256 << 20


def load_from_rank0(
    model: nn.Module,
    ranks: Ranks,
    read_options: Callable[[], LoadOptions],
    find: Callable[[], Checkpoint],
    plan_for: Callable[[Checkpoint], Plan],
    bar: Progress,
    prepare_rest: PrepareRest | None,
) -> LoadReport:
    """Load with the checkpoint on rank 0 of the default group alone. Every rank must call it.

    Args:
        model: this rank's.
        ranks: the group.
        read_options: checks the arguments of this rank.
        find: opens the checkpoint; called on rank 0 only.
        plan_for: matches this rank's model with it.
        bar: shown where it is on.
        prepare_rest: see `Loading`.

    Raises:
        CheckpointError: another rank failed; the message says which, and why. All models are as
            they were.
        MissingRankError: another rank did not come in time, or has ended.
    """
    with ranks.step("use its arguments"):
        options = read_options()
    source: Checkpoint | None = None
    with ranks.step("open the checkpoint"):
        if ranks.rank == 0:
            source = find()
    with ranks.step("prepare for the checkpoint"):
        source = _described(ranks, source)
        plan = plan_for(source)
        _require_dense(plan)
        kind = _Sending if ranks.rank == 0 else _Receiving
        loading = kind(model, source, plan, options, bar, prepare_rest)
    try:
        with ranks.step("load its weights"), explained(loading):
            wanted = _wanted_by_any(ranks, source, plan)
            bar.begin(sum(source[name].nbytes for name in wanted), "Broadcasting")
            if loading.exchange(wanted, ranks):
                loading.prepare()
        return loading.commit()
    finally:
        loading.forget()


def _described(ranks: Ranks, source: Checkpoint | None) -> Checkpoint:
    """The checkpoint on rank 0; what it holds, without the tensors, on the others."""
    content: list[Any] = [None]
    if source is not None:
        entries = [(n, i.dtype, i.shape, i.form) for n, i in source.items()]
        content = [(source.source, entries, dict(source.extras))]
    with connected():
        dist.broadcast_object_list(content, src=0, device=ranks.device.torch)
    return source if source is not None else _Described(*content[0])


class _Described(Checkpoint):
    """A checkpoint of which only the description is here, and later some tensors."""

    def __init__(
        self,
        source: str,
        entries: list[tuple[str, torch.dtype, tuple[int, ...], str | None]],
        extras: dict[str, Any],
    ) -> None:
        self.source = source
        self.extras = extras
        self._infos = {
            n: TensorInfo.describe(dtype, shape, source, form=form)
            for n, dtype, shape, form in entries
        }
        self.tensors: dict[str, torch.Tensor] = {}

    def __getitem__(self, name: str) -> TensorInfo:
        return self._infos[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._infos)

    def __len__(self) -> int:
        return len(self._infos)

    def tensor(self, name: str) -> torch.Tensor:
        return self.tensors[name]


def _require_dense(plan: Plan) -> None:
    for target in plan.targets:
        if target.info.form is not None:
            raise ModelError(
                f"{target.name} is {target.info.form} in the checkpoint, which cannot be sent: "
                "load it on each rank, without broadcast_from_rank0"
            )


def _wanted_by_any(ranks: Ranks, source: Checkpoint, plan: Plan) -> list[str]:
    """Names that some rank needs, in the checkpoint's order: the same list on all ranks."""
    mine = {target.name for target in plan.targets} | _whole_names(source, plan)
    names = list(source)
    wanted = ranks.any(torch.tensor([name in mine for name in names], dtype=torch.uint8))
    return [name for name, is_wanted in zip(names, wanted.tolist(), strict=True) if is_wanted]


def _whole_names(source: Checkpoint, plan: Plan) -> set[str]:
    """Tensors that are not weights: scales, and extra state."""
    scales = {target.scale for target in plan.targets if target.scale is not None}
    return scales | {state.name for state in plan.extra_states if state.name in source}


class _Exchange(Loading):
    """Loading of weights that rank 0 sends to all."""

    def exchange(self, names: list[str], ranks: Ranks) -> bool:
        """Send or receive tensors, all ranks in the same order; keep what this rank needs.

        Returns:
            Whether all is sent; not where another rank failed.

        Raises:
            Exception: what kept this rank from it.
        """
        targets: dict[str, list[Target]] = {}
        for target in self.kept():
            targets.setdefault(target.name, []).append(target)
        largest = max((self.checkpoint[name].nbytes for name in names), default=0)
        memory = torch.empty(largest, dtype=torch.uint8, device=ranks.device.torch)
        failure: BaseException | None = None
        sent = _BATCH_BYTES
        for name in names:
            info = self.checkpoint[name]
            if sent + info.nbytes > _BATCH_BYTES:
                sent = 0
                failure = failure or pending_interrupt()
                if ranks.any(torch.tensor([failure is not None], dtype=torch.uint8)).item():
                    if failure is None:
                        return False
                    raise failure
            sent += info.nbytes
            data = memory[: info.nbytes].view(info.dtype).view(info.shape)
            try:
                data = self.read(name, data)
            except Exception as error:  # noqa: BLE001 - the others are waiting
                failure = failure or error
            if info.nbytes:
                ranks.send(data)
            self.bar.advance(info.nbytes)
            if failure is None:
                try:
                    self.keep(name, data, targets.get(name, ()))
                except Exception as error:  # noqa: BLE001 - the others are waiting
                    failure = error
        if failure is not None:
            raise failure
        return True

    def kept(self) -> list[Target]:
        """The weights that this rank takes from what is sent."""
        raise NotImplementedError

    def read(self, name: str, data: torch.Tensor) -> torch.Tensor:
        """The tensor to send, or the memory to receive it in."""
        return data

    def keep(self, name: str, data: torch.Tensor, targets: list[Target] | tuple[()]) -> None:
        """Take what this rank holds of a tensor; ``data`` is overwritten after that."""
        for target in targets:
            part = data if target.part is None else cut(data, target.part)
            value = convert(part.view(target.shape), target)
            if value.untyped_storage().data_ptr() == data.untyped_storage().data_ptr():
                value = value.clone()
            self.values[target] = value.contiguous()
            self.report.read_bytes += target.info.nbytes


class _Sending(_Exchange):
    """Loading on rank 0, which reads for all.

    What it casts or moves itself it takes from what it sends, so that no byte is read twice; what
    it casts for its own disk is read again, in pieces, rather than held.
    """

    def kept(self) -> list[Target]:
        return self.by_method["stream"]

    def read(self, name: str, data: torch.Tensor) -> torch.Tensor:
        tensor = self.checkpoint.tensor(name)
        if data.device.type == CPU.type and tensor.is_contiguous():
            return tensor
        return data.copy_(tensor)


class _Receiving(_Exchange):
    """Loading on a rank that has no checkpoint."""

    checkpoint: _Described
    compares_ties = False  # rank 0 does

    def kept(self) -> list[Target]:
        return self.plan.targets

    def keep(self, name: str, data: torch.Tensor, targets: list[Target] | tuple[()]) -> None:
        super().keep(name, data, targets)
        if name in _whole_names(self.checkpoint, self.plan):
            self.checkpoint.tensors[name] = data.to("cpu", copy=True)

    def prepare(self) -> None:
        """Write what is for the disk; all else was received."""
        self.write([t for t in self.plan.targets if t.device == DISK], self.values)
        self.prepare_others()
