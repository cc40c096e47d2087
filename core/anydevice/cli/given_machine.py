"""The machine that a plan is for: this one, or one described by options."""

from __future__ import annotations

import argparse
import dataclasses
from collections import Counter
from typing import Final

from anydevice.errors import BudgetError
from anydevice.text import read_bytes

__all__ = ["HOST", "Machine", "read_machine"]

HOST: Final = "cpu"


@dataclasses.dataclass(frozen=True)
class Machine:
    """The devices to plan for.

    Attributes:
        budgets: as the planner takes them; None for this machine.
        names: the planner's key of each pretended device to its name, such as ``foo:0``.
    """

    budgets: dict[int | str, int | str] | None
    names: dict[int | str, str]

    def name(self, key: int | str) -> str:
        """What a device is called in the table."""
        return self.names.get(key, str(key))


def read_machine(args: argparse.Namespace) -> Machine:
    """Read the machine from the options; without them it is this one.

    Raises:
        BudgetError: a size cannot be read, or a device is named twice.
    """
    if not args.device and args.cpu is None:
        return Machine(None, {})
    budgets: dict[int | str, int | str] = {}
    names: dict[int | str, str] = {}
    kinds: Counter[str] = Counter()
    for number, word in enumerate(args.device):
        name, equals, size = word.rpartition("=")
        if not equals or not name:
            raise BudgetError(f"--device {word!r}: write NAME=SIZE, such as foo=24GiB")
        kind = name.partition(":")[0]
        label = name if ":" in name else f"{kind}:{kinds[kind]}"
        kinds[kind] += 1
        if label in names.values():
            raise BudgetError(f"--device {word!r}: {label} is named twice")
        budgets[number], names[number] = read_bytes(size, f"--device {word}"), label
    budgets[HOST] = read_bytes(args.cpu, f"--cpu {args.cpu}") if args.cpu is not None else 0
    return Machine(budgets, names)
