"""Matching a checkpoint with a model: what goes where, decided and checked before work starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import torch
from torch import nn

from anydevice import registry
from anydevice.checkpoint.checkpoint import Checkpoint
from anydevice.checkpoint.info import TensorInfo, form_of
from anydevice.devices import CPU, DISK, Device
from anydevice.errors import UnsupportedDtypeError
from anydevice.loading.casting import Casting, short
from anydevice.loading.shards import Part, info_of_part, mesh_device, own_part
from anydevice.tensors import PLAIN_TYPES, is_sharded
from anydevice.ties import Weight
from anydevice.weights import Slot, iter_modules

__all__ = ["ExtraState", "Plan", "Target", "dtypes_once_loaded", "make_plan"]

EXTRA_STATE: Final = "_extra_state"
#: A counter that checkpoints of before torch 0.4.1 lack; torch's own loader fills it in too.
_LATE_COUNTER: Final = "num_batches_tracked"
#: Scales of 8-bit weights are saved under this name, and are kept as an attribute of the weight.
_EIGHT_BIT_SCALE: Final = "SCB"
#: What quantizers append to the name of a weight of 8-bit floats for that of its scale.
_SCALE_ENDS: Final = ("_scale_inv", "_scale", "._scale")


@dataclasses.dataclass(eq=False, slots=True)
class Target:
    """A tensor of the model with the tensor of the checkpoint that it gets.

    Attributes:
        name: in the checkpoint.
        info: what the checkpoint says of it, or of the part that is wanted.
        slots: its places in the model: several when it is tied.
        device: where it is kept.
        dtype: in which it is kept.
        shape: in which it is wanted: the model's, or that of the part.
        part: what this process holds of a DTensor; None for all of it.
        scale: the name in the checkpoint of the scale of an 8-bit weight.
    """

    name: str
    info: TensorInfo
    slots: list[Slot]
    device: Device
    dtype: torch.dtype
    shape: torch.Size
    part: Part | None = None
    scale: str | None = None

    @property
    def old(self) -> torch.Tensor:
        """The model's tensor now."""
        tensor = self.slots[0].get()
        assert tensor is not None
        return tensor

    @property
    def is_cast(self) -> bool:
        """Whether the file has another dtype."""
        return self.dtype != self.info.dtype


class ExtraState(NamedTuple):
    """A module that keeps something of its own in the state dict, under ``name``."""

    module: nn.Module
    name: str


@dataclasses.dataclass
class Plan:
    """Everything that loading will do.

    Attributes:
        targets: in the model's order.
        extra_states: modules that get theirs.
        counters: counters that the checkpoint lacks and that start at 0, each with its device.
        missing: names that the model has and the checkpoint lacks.
        ties: the other names of missing weights that are tied.
        unexpected: names that the checkpoint has and the model lacks.
        mismatched: what differs in shape or kind, one line each.
        doubles: names of tied weights that the checkpoint has besides the one that is loaded.
        left_on_meta: buffers that no checkpoint need have and that stay without data.
    """

    targets: list[Target] = dataclasses.field(default_factory=list)
    extra_states: list[ExtraState] = dataclasses.field(default_factory=list)
    counters: list[tuple[Slot, Device]] = dataclasses.field(default_factory=list)
    missing: list[str] = dataclasses.field(default_factory=list)
    ties: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    unexpected: list[str] = dataclasses.field(default_factory=list)
    mismatched: list[str] = dataclasses.field(default_factory=list)
    doubles: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    left_on_meta: list[str] = dataclasses.field(default_factory=list)


def make_plan(
    model: nn.Module,
    checkpoint: Checkpoint,
    weights: Sequence[Weight],
    casting: Casting,
) -> Plan:
    """Match a checkpoint with a model. Nothing is changed, and no tensor is read.

    Args:
        model: on any device, meta too.
        checkpoint: an open one.
        weights: the model's, each with the device that it is to be stored on.
        casting: the dtypes.

    Raises:
        UnsupportedDtypeError: a device does not support the dtype that a weight gets.
    """
    plan = Plan()
    used: set[str] = set()
    for weight in weights:
        _plan_weight(plan, checkpoint, weight, casting, used)
    _plan_extra_states(plan, model, checkpoint, used)
    _attach_scales(plan, checkpoint, used)
    _require_no_scales(plan, checkpoint, used)
    plan.unexpected = [n for n in (*checkpoint, *checkpoint.extras) if n not in used]
    return plan


def dtypes_once_loaded(
    weights: Iterable[Weight], checkpoint: Checkpoint, casting: Casting
) -> dict[str, torch.dtype]:
    """The dtype of each weight that will have another than it has now, by all of its names."""
    dtypes: dict[str, torch.dtype] = {}
    for weight in weights:
        old = weight.tensor
        info = next((checkpoint[name] for name in weight.names if name in checkpoint), None)
        dtype = None if info is None else casting.result(weight.names[0], info, old)
        if dtype is not None and dtype is not old.dtype:
            dtypes.update((name, dtype) for name in weight.names)
    return dtypes


def _plan_weight(
    plan: Plan, checkpoint: Checkpoint, weight: Weight, casting: Casting, used: set[str]
) -> None:
    first, slot, old = weight.names[0], weight.slots[0], weight.tensor
    expected = [
        name
        for name, slot in zip(weight.names, weight.slots, strict=True)
        if not slot.is_buffer or slot.persistent
    ]
    present = [name for name in expected if name in checkpoint]
    if not expected and old.is_meta:
        # Not part of a state dict; but where the model cannot know it, an old file may.
        present = [name for name in weight.names if name in checkpoint]
    used.update(present)
    if not present:
        if expected:
            _note_missing(plan, expected, slot, weight.device)
        elif old.is_meta:
            plan.left_on_meta.append(first)
        return
    name = present[0]
    info = checkpoint[name]
    shape = _shape(info, old)
    others = [n for n in present[1:] if _shape(checkpoint[n], old) is None]
    if shape is None or others:
        plan.mismatched += [
            f"{other} has shape {tuple(checkpoint[other].shape)} in the checkpoint and "
            f"{tuple(old.shape)} in the model"
            for other in ([name] if shape is None else []) + others
        ]
        return
    fault = _fault_of_form(name, info, old)
    dtype = None if fault else casting.result(first, info, old)
    if dtype is None:
        plan.mismatched.append(fault or casting.fault(name, info, old))
        return
    if len(present) > 1:
        plan.doubles[name] = present[1:]
    sharded = is_sharded(old)
    device = mesh_device(old) if sharded else weight.device
    if info.form is not None and device == DISK:
        plan.mismatched.append(f"{name} is {info.form}, which cannot be kept on disk")
        return
    if device.is_accelerator:
        _require_support(first, device, dtype)
    part = None
    if sharded:
        part = own_part(first, old)
        info = info_of_part(info, part)
        shape = torch.Size(info.shape)
    plan.targets.append(Target(name, info, weight.slots, device, dtype, shape, part))


def _fault_of_form(name: str, info: TensorInfo, old: torch.Tensor) -> str | None:
    """Why a tensor of a checkpoint cannot be loaded into the model's ``old``; None where it can."""
    if info.form is None and type(old) in PLAIN_TYPES and old.layout is torch.strided:
        return None
    if info.form == "meta":
        return (
            f"{name} has no data in the checkpoint: it was on meta when it was saved. Save it from "
            "a model that is loaded"
        )
    sharded = is_sharded(old)
    own = None if sharded else form_of(old)
    own = None if own == "meta" else own
    if info.form == own and (sharded or not hasattr(old, "__tensor_flatten__")):
        return None
    return (
        f"{name} is {info.form or 'dense'} in the checkpoint and {own or 'dense'} in the model: "
        "save it as dense numbers, or load it before the model's weight is converted"
    )


def _note_missing(plan: Plan, expected: list[str], slot: Slot, device: Device) -> None:
    if slot.name == _LATE_COUNTER and isinstance(slot.module, nn.modules.batchnorm._NormBase):
        plan.counters.append((slot, device if device.is_accelerator else CPU))
        return
    plan.missing.append(expected[0])
    if expected[1:]:
        plan.ties[expected[0]] = expected[1:]


def _shape(info: TensorInfo, old: torch.Tensor) -> torch.Size | None:
    """The shape that the weight will have; None when file and model disagree."""
    if type(old) in (nn.UninitializedParameter, nn.UninitializedBuffer):
        return torch.Size(info.shape)  # a lazy module takes what comes
    shape = old.shape
    # Before torch 0.4 a scalar was saved as a tensor of one element.
    return shape if shape == info.shape or (shape == () and info.shape == (1,)) else None


def _plan_extra_states(
    plan: Plan, model: nn.Module, checkpoint: Checkpoint, used: set[str]
) -> None:
    for path, module in iter_modules(model):
        if type(module).get_extra_state is nn.Module.get_extra_state:
            continue
        name = f"{path}.{EXTRA_STATE}" if path else EXTRA_STATE
        if name in checkpoint or name in checkpoint.extras:
            used.add(name)
            plan.extra_states.append(ExtraState(module, name))
        else:
            plan.missing.append(name)


def _attach_scales(plan: Plan, checkpoint: Checkpoint, used: set[str]) -> None:
    for target in plan.targets:
        if target.info.dtype is not torch.int8:
            continue
        scale = f"{target.name.rpartition('.')[0]}.{_EIGHT_BIT_SCALE}"
        if scale in checkpoint and scale not in used:
            used.add(scale)
            target.scale = scale


def _require_no_scales(plan: Plan, checkpoint: Checkpoint, used: set[str]) -> None:
    """Refuse to cast 8-bit floats whose scales are saved separately: the values would be wrong."""
    for target in plan.targets:
        dtype = target.info.dtype
        if target.dtype is dtype or dtype.itemsize > 1 or not dtype.is_floating_point:
            continue
        path, _, leaf = target.name.rpartition(".")
        names = [f"{target.name}{end}" for end in _SCALE_ENDS] + [f"{path}.scale_{leaf}"]
        scale = next((n for n in names if n in checkpoint and n not in used), None)
        if scale is not None:
            plan.mismatched.append(
                f"{target.name} holds {short(dtype)}, which would be cast to {short(target.dtype)} "
                f"without its scale {scale}, for which the model has no place: load it with the "
                "library that quantized it, or keep the file's dtype with dtype='auto'"
            )


def _require_support(name: str, device: Device, dtype: torch.dtype) -> None:
    if registry.get_backend(device.type).supports_dtype(dtype):
        return
    raise UnsupportedDtypeError(
        f"{name} would be {short(dtype)} on {device}, which does not support it: give another "
        "dtype=, or place it on the CPU"
    )
