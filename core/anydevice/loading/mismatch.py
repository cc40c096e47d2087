"""All differences between a checkpoint and a model, in one error."""

from __future__ import annotations

from typing import Final

from torch import nn

from anydevice.errors import CheckpointMismatchError
from anydevice.loading.match import EXTRA_STATE, Plan
from anydevice.text import list_some

__all__ = ["require_match"]

#: Names that a message lists of each kind of fault.
_MOST_SHOWN: Final = 20


def require_match(
    plan: Plan, model: nn.Module, source: str, *, strict: bool, allow_missing: bool
) -> None:
    """Refuse a checkpoint that does not fit its model, with all differences in one message.

    Raises:
        CheckpointMismatchError: shapes differ; or weights are missing and were not allowed to; or,
            when ``strict``, any name is missing or unexpected, or a buffer stays on meta.
    """
    missing = plan.missing
    if not strict:
        missing = [n for n in missing if n.rpartition(".")[2] != EXTRA_STATE]
    faulty_missing = bool(missing) and (strict or not allow_missing)
    faulty_unexpected = bool(plan.unexpected) and strict
    empty = plan.left_on_meta if strict and not allow_missing else []
    if not (faulty_missing or faulty_unexpected or plan.mismatched or empty):
        return
    parts = [f"{source} does not fit {type(model).__name__}:"]
    if faulty_missing:
        parts.append(
            f"{len(missing)} missing in the checkpoint: {_list(_with_ties(plan, missing))}."
        )
    if plan.mismatched:
        parts.append(f"{len(plan.mismatched)} that differ: {_list(plan.mismatched, '; ')}.")
    if plan.unexpected and (strict or faulty_missing):
        parts.append(f"{len(plan.unexpected)} unexpected: {_list(plan.unexpected)}.")
    if empty:
        parts.append(
            f"{len(empty)} buffers stay on meta, as no checkpoint need have them: {_list(empty)}. "
            "Create the model with its buffers real (init_empty_weights() does), or give "
            "allow_missing=True and fill them in yourself."
        )
    parts.append(_advice(missing if faulty_missing else [], plan.unexpected, strict))
    raise CheckpointMismatchError(" ".join(part for part in parts if part))


def _with_ties(plan: Plan, names: list[str]) -> list[str]:
    return [f"{n} (tied to {list_some(plan.ties[n], 3)})" if n in plan.ties else n for n in names]


def _advice(missing: list[str], unexpected: list[str], strict: bool) -> str:
    prefix = _common_prefix(missing, unexpected)
    if prefix:
        return f"Names in the checkpoint begin with {prefix!r}; the model's do not."
    prefix = _common_prefix(unexpected, missing)
    if prefix:
        return f"Names in the model begin with {prefix!r}; the checkpoint's do not."
    if missing and not strict:
        return (
            "Weights that are not loaded keep whatever they hold; allow_missing=True accepts that."
        )
    return ""


def _common_prefix(names: list[str], longer: list[str]) -> str:
    """The prefix of most of ``names`` in ``longer``, when that is the difference."""
    found = set(longer)
    for name in names[:3]:
        ends = [other for other in longer if other.endswith(f".{name}")]
        prefix = ends[0][: -len(name)] if len(ends) == 1 else ""
        if prefix and 2 * sum(prefix + other in found for other in names) > len(names):
            return prefix
    return ""


def _list(names: list[str], separator: str = ", ") -> str:
    return list_some(names, _MOST_SHOWN, separator=separator)
