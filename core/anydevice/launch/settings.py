"""What a setting of a launch is, and how its value is read."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable
from typing import Any, Literal

from anydevice.errors import OptionError
from anydevice.text import FALSE_WORDS, TRUE_WORDS

__all__ = ["Kind", "Setting", "did_you_mean", "read_bool"]

Kind = Literal["flag", "bool", "int", "float", "text", "choice"]


@dataclasses.dataclass(frozen=True)
class Setting:
    """One setting.

    Attributes:
        name: of the flag, with underscores: ``num_processes`` is ``--num_processes`` and
            ``--num-processes``.
        kind: ``"flag"`` takes no value on the command line; ``"bool"`` takes true or false.
        help: one line.
        group: the heading in ``--help``; groups other than ``"common"`` are in ``--help-all``.
        keys: where it stands in a configuration file; a dotted key is inside a section. The first
            is written, the others are older spellings.
        variable: the environment variable that gives it to the script, and from which the launcher
            takes it.
        reads: other variables from which the launcher takes it.
        choices: the values that it may have, compared without regard to case.
        least: the smallest number.
        most: the largest number.
        default: the value when nothing gives one.
        needs: the flag without which it has no effect.
        instead: what to do where that flag is not wanted.
        unused: why it never has an effect, and what to do instead: the launcher says so.
        short: a one-letter flag.
    """

    name: str
    kind: Kind
    help: str
    group: str = "common"
    keys: tuple[str, ...] = ()
    variable: str = ""
    reads: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None
    default: Any = None
    needs: str = ""
    instead: str = ""
    unused: str = ""
    short: str = ""

    @property
    def flags(self) -> list[str]:
        """The flag in both spellings, and the short one."""
        long = dict.fromkeys((f"--{self.name}", f"--{self.name.replace('_', '-')}"))
        return [*long, *([self.short] if self.short else [])]

    def read(self, value: Any, where: str) -> Any:
        """Convert and check a value.

        Args:
            value: text from the command line or the environment, or a value from a file.
            where: names the source in the error.

        Raises:
            OptionError: the value cannot be this setting's.
        """
        if self.kind in ("flag", "bool"):
            return read_bool(value, where)
        if self.kind in ("int", "float"):
            return self._number(value, where)
        # YAML 1.1 reads a bare no as False: `mixed_precision: no`.
        text = "no" if value is False and self._has_no() else self.render(value)
        if not self.choices:
            return text
        for choice in self.choices:
            if choice.lower() == text.lower():
                return choice
        raise OptionError(
            f"{where}: {text!r} is not one of {', '.join(self.choices)}"
            f"{did_you_mean(text, self.choices)}"
        )

    def _has_no(self) -> bool:
        return any(choice.lower() == "no" for choice in self.choices)

    def _number(self, value: Any, where: str) -> int | float:
        convert: Callable[[Any], int | float] = int if self.kind == "int" else float
        try:
            number = convert(value if isinstance(value, (int, float)) else str(value).strip())
            if isinstance(value, bool) or number != float(value):
                raise ValueError
        except (ValueError, OverflowError):
            what = "a whole number" if self.kind == "int" else "a number"
            raise OptionError(f"{where}: {value!r} is not {what}") from None
        if self.least is not None and number < self.least:
            raise OptionError(f"{where}: {value!r} is less than {self.least}")
        if self.most is not None and number > self.most:
            raise OptionError(f"{where}: {value!r} is more than {self.most}")
        return number

    def render(self, value: Any) -> str:
        """The value as text, for the environment of the script."""
        if isinstance(value, bool):
            return "true" if value else "false"
        return str(value)


def read_bool(value: Any, where: str) -> bool:
    """Read true or false in the usual spellings.

    Raises:
        OptionError: it is neither.
    """
    text = str(value).strip().lower()
    if text in TRUE_WORDS:
        return True
    if text in FALSE_WORDS:
        return False
    raise OptionError(f"{where}: {value!r} is neither true nor false")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``": did you mean 'x'?"``, where a known word is near a misspelled one; else nothing."""
    near = {k.lower().replace("-", "_"): k for k in known}
    close = difflib.get_close_matches(word.lower().replace("-", "_"), list(near), 1, 0.6)
    return f": did you mean {near[close[0]]!r}?" if close else ""
