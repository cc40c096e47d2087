"""Programs of several calls of an operator, with other options in each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from anydevice_conformance.refusals import is_refusal
from anydevice_conformance.usual_operator import Make, Usual, usual

__all__ = ["ABSENT", "aligned", "has_absent", "program"]


class _Absent:
    """Stands for what a device, or the host, does not have."""

    def __repr__(self) -> str:
        return "absent"


ABSENT: Final = _Absent()


def program(
    name: str,
    make: Make,
    *calls: Callable[..., Any],
    dtypes: Any = (),
    trained: bool = True,
    slow: bool = False,
    digits: str = "",
    every: bool = False,
) -> Usual:
    """A usual operator that does each of some calls; what a device has not is left out.

    Args:
        name: of it; by it the difference that rounding may make is chosen.
        make: makes the arguments of all calls.
        calls: each with all arguments.
        dtypes: that it is tried in; floating ones where nothing is said.
        trained: whether a gradient comes back.
        slow: whether a quick run leaves it out.
        digits: how exact each element is, of `Usual`.
        every: whether a quick run tries each dtype, too.
    """
    more: Any = {"calls": len(calls), "slow": slow, "digits": digits, "every": every}
    return usual(name, make, _each(calls), *dtypes, trained=trained, **more)


def _each(calls: tuple[Callable[..., Any], ...]) -> Callable[..., Any]:
    def run(*arguments: Any) -> list[Any]:
        return [_done(call, arguments) for call in calls]

    return run


def _done(call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    try:
        return call(*arguments)
    except Exception as error:
        trains = any(isinstance(one, torch.Tensor) and one.requires_grad for one in arguments)
        if trains or not is_refusal(error):
            raise
        return ABSENT


def has_absent(result: Any) -> bool:
    """Whether something in lists and tuples is absent."""
    if isinstance(result, list | tuple):
        return any(map(has_absent, result))
    return result is ABSENT


def aligned(one: Any, other: Any) -> tuple[Any, Any]:
    """Two results without what is absent in either."""
    if one is ABSENT or other is ABSENT:
        return (), ()
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        pairs = [aligned(a, b) for a, b in zip(one, other, strict=True)]
        return [a for a, _ in pairs], [b for _, b in pairs]
    return one, other
