"""Loading by one process for all: rank 0 reads, the others receive.

[Note: nobody waits for ever]
Every step that can fail on one rank is followed by one in which all learn of it: rank 0 says how
opening went, all say how planning went, each message carries whether rank 0 could fill it, and all
say how receiving went, before any of them changes its model. A rank that fails while it receives
goes on receiving, so that the others are not left waiting.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from anydevice.checkpoint.checkpoint import Checkpoint
from anydevice.checkpoint.info import TensorInfo
from anydevice.devices import CPU, DISK, Device
from anydevice.errors import CheckpointError, ModelError
from anydevice.loading.applying import Loading, LoadReport, memory_to_fill
from anydevice.loading.converting import convert
from anydevice.loading.match import Plan, Target
from anydevice.loading.options import LoadOptions
from anydevice.loading.progress import Progress
from anydevice.tensors import move_tensor

__all__ = ["MESSAGE_BYTES", "load_from_rank0"]

#: Bytes of a message. A row (along the first dimension) that is larger goes in one by itself.
MESSAGE_BYTES: Final = 64 << 20
_ALIGNMENT: Final = 64
#: At the end of each message: whether rank 0 could fill it.
_STATUS_BYTES: Final = 8


def load_from_rank0(
    model: nn.Module,
    find: Callable[[], Checkpoint],
    plan_for: Callable[[Checkpoint], Plan],
    options: LoadOptions,
    bar: Progress,
) -> LoadReport:
    """Load with the checkpoint on rank 0 of the default group alone. Every rank must call it.

    Args:
        model: this rank's.
        find: opens the checkpoint; called on rank 0 only.
        plan_for: matches this rank's model with it.
        options: see `load_checkpoint_in_model`.
        bar: shown where it is on.

    Raises:
        ModelError: there is no process group.
        CheckpointError: another rank failed; the message says which, and why.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ModelError(
            "broadcast_from_rank0 needs a process group: call torch.distributed.init_process_group "
            "on every rank first, or load without it"
        )
    source = _open(find)
    loading: _Sending | _Receiving | None = None
    with _Agreement("prepare for the checkpoint") as agreement:
        plan = plan_for(source)
        _require_rows(plan)
        kind = _Sending if dist.get_rank() == 0 else _Receiving
        loading = kind(model, source, plan, options, bar)
    agreement.require()
    assert loading is not None
    wanted = _wanted_by_any(source, loading.plan)
    messages = list(_pack({name: source[name] for name in wanted}))
    bar.begin(sum(message.nbytes for message in messages), "Broadcasting")
    channel: _Channel | None = None
    with _Agreement("make room for its weights") as agreement:
        channel = _Channel(messages, 2 if dist.get_rank() == 0 else 1)
    agreement.require()
    assert channel is not None
    with _Agreement("load its weights") as agreement:
        if isinstance(loading, _Receiving):
            loading.receive(messages, channel)
        else:
            loading.send(messages, channel)
        loading.prepare()
    with loading.explained():
        agreement.require()
    return loading.commit()


# ---------------------------------------------------------------------- agreement


class _Agreement:
    """A step that may fail on some ranks; `require` lets all know."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.error: Exception | None = None

    def __enter__(self) -> _Agreement:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if isinstance(error, Exception):
            self.error = error
        return self.error is not None

    def require(self) -> None:
        """Raise where this rank failed, and on all others that one did. All ranks must call it."""
        mine = None if self.error is None else f"{type(self.error).__name__}: {self.error}"
        answers: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(answers, mine)
        if self.error is not None:
            raise self.error
        for rank, answer in enumerate(answers):
            if answer is not None:
                raise CheckpointError(f"rank {rank} could not {self.what}: {answer}")


def _open(find: Callable[[], Checkpoint]) -> Checkpoint:
    """The checkpoint on rank 0; what it holds, without the tensors, on the others."""
    source: Checkpoint | None = None
    failure: Exception | None = None
    content: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            source = find()
            entries = [(n, i.dtype, i.shape, i.form) for n, i in source.items()]
            content = [("opened", source.source, entries, dict(source.extras))]
        except Exception as error:  # noqa: BLE001 - the others must be told of any
            failure = error
            content = [("failed", f"{type(error).__name__}: {error}")]
    dist.broadcast_object_list(content, src=0)
    if failure is not None:
        raise failure
    if content[0][0] == "failed":
        raise CheckpointError(f"rank 0 could not open the checkpoint: {content[0][1]}")
    return source if source is not None else _Described(*content[0][1:])


class _Described(Checkpoint):
    """A checkpoint of which only the description is here, and in time some tensors."""

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


def _require_rows(plan: Plan) -> None:
    for target in plan.targets:
        if target.info.form is not None:
            raise ModelError(
                f"{target.name} is {target.info.form} in the checkpoint, which cannot be sent: "
                "load it on each rank, without broadcast_from_rank0"
            )


def _wanted_by_any(source: Checkpoint, plan: Plan) -> list[str]:
    """Names that some rank needs, in the checkpoint's order: the same list on all ranks."""
    mine = {target.name for target in plan.targets} | set(_whole_names(source, plan))
    names = list(source)
    bits = bytes(name in mine for name in names)
    answers: list[bytes] = [b""] * dist.get_world_size()
    dist.all_gather_object(answers, bits)
    wanted = [any(column) for column in zip(*answers, strict=True)]
    return [name for name, is_wanted in zip(names, wanted, strict=True) if is_wanted]


def _whole_names(source: Checkpoint, plan: Plan) -> list[str]:
    """Tensors that are not weights: scales, and extra state."""
    scales = [target.scale for target in plan.targets if target.scale is not None]
    return scales + [state.name for state in plan.extra_states if state.name in source]


# ---------------------------------------------------------------------- messages


class _Rows(NamedTuple):
    """Some rows of a tensor, and where they are in a message."""

    name: str
    info: TensorInfo
    start: int
    stop: int
    offset: int
    nbytes: int


@dataclasses.dataclass
class _Message:
    rows: list[_Rows] = dataclasses.field(default_factory=list)
    nbytes: int = 0


def _pack(infos: dict[str, TensorInfo]) -> Iterator[_Message]:
    """Divide tensors into messages: small ones together, large ones by rows."""
    message = _Message()
    for name, info in infos.items():
        count = info.shape[0] if info.shape else 1
        row = info.nbytes // count if count else 0
        if row == 0:
            continue  # without elements: nothing to send
        at = 0
        while at < count:
            offset = -(-message.nbytes // _ALIGNMENT) * _ALIGNMENT
            fitting = min(count - at, (MESSAGE_BYTES - offset) // row)
            if fitting <= 0 and message.rows:
                yield message
                message = _Message()
                continue
            fitting = max(1, fitting)
            message.rows.append(_Rows(name, info, at, at + fitting, offset, fitting * row))
            message.nbytes = offset + fitting * row
            at += fitting
    if message.rows:
        yield message


class _Channel:
    """The device that messages travel from, and buffers on it."""

    def __init__(self, messages: list[_Message], count: int) -> None:
        largest = max((message.nbytes for message in messages), default=0)
        self.device = _message_device()
        size = -(-largest // _STATUS_BYTES) * _STATUS_BYTES + _STATUS_BYTES
        self.buffers = [
            torch.zeros(size, dtype=torch.uint8, device=self.device.torch) for _ in range(count)
        ]

    def parcel(self, turn: int, nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What travels, and its status, which stands behind the bytes."""
        size = -(-nbytes // _STATUS_BYTES) * _STATUS_BYTES + _STATUS_BYTES
        parcel = self.buffers[turn % len(self.buffers)][:size]
        return parcel, parcel[-_STATUS_BYTES:]


def _message_device() -> Device:
    """The host, where the group's backend can send from it; else its own device."""
    config = str(dist.get_backend_config())
    kinds = [pair.partition(":")[0] for pair in config.split(",")]
    if CPU.type in kinds or not kinds:
        return CPU
    module: Any = torch.get_device_module(kinds[0])
    return Device(kinds[0], int(module.current_device()))


class _Taking(Loading):
    """Loading that takes weights from rows as they pass by."""

    def _keep_rows(self, target: Target, rows: _Rows, data: torch.Tensor) -> None:
        """Copy what this rank holds of some rows to its place."""
        first, stop = rows.start, rows.stop
        begin = 0
        if target.part:
            begin, length = target.part[0]
            first, stop = max(first, begin), min(stop, begin + length)
            if first >= stop:
                return
            data = data[first - rows.start : stop - rows.start]
            for dim, (start, size) in enumerate(target.part[1:], 1):
                data = data.narrow(dim, start, size)
        place = self._place_for(target)
        if place.dim() == 0:
            place = place.view(1)
        on_device = target.device.is_accelerator
        moved = convert(data, target) if on_device else move_tensor(data, CPU)
        place[first - begin : stop - begin].copy_(
            moved.view(place[first - begin : stop - begin].shape)
        )

    def _place_for(self, target: Target) -> torch.Tensor:
        if target not in self.values:
            into = memory_to_fill(target)
            self.touched |= into is not None
            self.values[target] = _empty(target) if into is None else into
            self.report.read_bytes += target.info.nbytes
        return self.values[target]


class _Sending(_Taking):
    """Loading on rank 0, which reads for all.

    What it needs in memory itself it takes from what it sends, so that no byte is read twice; what
    it casts for its own disk is read again, in pieces, rather than held.
    """

    def send(self, messages: list[_Message], channel: _Channel) -> None:
        """Fill one message while the one before it travels.

        Raises:
            Exception: whatever kept it from reading; the others have been told.
        """
        by_name = _by_name(self.ways["stream"])
        travelling: Any = None
        failure: Exception | None = None
        for turn, message in enumerate(messages):
            parcel, status = channel.parcel(turn, message.nbytes)
            try:
                for rows in message.rows:
                    tensor = self.checkpoint.tensor(rows.name)
                    part = tensor[rows.start : rows.stop] if tensor.dim() else tensor.view(1)
                    flat = part.contiguous().view(-1).view(torch.uint8)
                    parcel[rows.offset : rows.offset + rows.nbytes].copy_(flat)
                    for target in by_name.get(rows.name, ()):
                        self._keep_rows(target, rows, part)
            except Exception as error:  # noqa: BLE001 - whatever it is, the others are waiting
                failure = error
            status.fill_(failure is not None)
            if travelling is not None:
                travelling.wait()
            travelling = dist.broadcast(parcel, src=0, async_op=True)
            self.bar.advance(message.nbytes)
            if failure is not None:
                break
        if travelling is not None:
            travelling.wait()
        if failure is not None:
            raise failure


class _Receiving(_Taking):
    """Loading on a rank that has no checkpoint."""

    checkpoint: _Described

    def _compare_ties(self) -> None:
        """Rank 0 does, which has the values."""

    def receive(self, messages: list[_Message], channel: _Channel) -> None:
        """Take part in all broadcasts, and keep what is this rank's.

        Raises:
            CheckpointError: rank 0 failed.
        """
        by_name = _by_name(self.plan.targets)
        whole = set(_whole_names(self.checkpoint, self.plan))
        failure: Exception | None = None
        for turn, message in enumerate(messages):
            parcel, status = channel.parcel(turn, message.nbytes)
            dist.broadcast(parcel, src=0)
            if bool(status[0].item()):
                raise CheckpointError("rank 0 could not read the checkpoint to its end")
            self.bar.advance(message.nbytes)
            if failure is not None:
                continue
            try:
                for rows in message.rows:
                    data = parcel[rows.offset : rows.offset + rows.nbytes]
                    data = data.view(rows.info.dtype).view(
                        rows.stop - rows.start, *rows.info.shape[1:]
                    )
                    for target in by_name.get(rows.name, ()):
                        self._keep_rows(target, rows, data)
                    if rows.name in whole:
                        self._keep_whole(rows, data)
            except Exception as error:  # noqa: BLE001 - the others are not to wait for this rank
                failure = error
        if failure is not None:
            raise failure

    def prepare(self) -> None:
        """Write what is for the disk; all else was received."""
        with self.explained():
            for target in self.plan.targets:
                if target not in self.values:  # without elements: nothing came
                    self.values[target] = _empty(target)
            self.write([t for t in self.plan.targets if t.device == DISK], self.values)

    def _keep_whole(self, rows: _Rows, data: torch.Tensor) -> None:
        tensors = self.checkpoint.tensors
        if rows.name not in tensors:
            tensors[rows.name] = torch.empty(rows.info.shape, dtype=rows.info.dtype, device="cpu")
        tensor = tensors[rows.name]
        (tensor if tensor.dim() else tensor.view(1))[rows.start : rows.stop].copy_(data)


def _by_name(targets: list[Target]) -> dict[str, list[Target]]:
    found: dict[str, list[Target]] = {}
    for target in targets:
        found.setdefault(target.name, []).append(target)
    return found


def _home(target: Target) -> Device:
    return CPU if target.device == DISK else target.device


def _empty(target: Target) -> torch.Tensor:
    return torch.empty(target.shape, dtype=target.dtype, device=_home(target).torch)
