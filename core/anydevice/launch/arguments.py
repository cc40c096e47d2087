"""Read ``[options] script args...`` by the table of settings.

Not argparse's remainder: there an option that is not known swallows the script's name, and the
script's own options are taken for the launcher's.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from anydevice.errors import OptionError
from anydevice.launch.settings import Setting, did_you_mean
from anydevice.launch.table import SETTINGS

__all__ = ["Words", "help_text", "read_words"]

_BY_FLAG: Final = {flag: setting for setting in SETTINGS for flag in setting.flags}


@dataclasses.dataclass(frozen=True)
class Words:
    """A command line, taken apart.

    Attributes:
        values: the settings that it gives, by name, converted and checked.
        script: the script, module or program; None when there is none.
        arguments: what follows it.
    """

    values: dict[str, Any]
    script: str | None
    arguments: list[str]


def read_words(words: Sequence[str]) -> Words:
    """Take a command line apart. The first word that is no option is the script.

    Raises:
        OptionError: an option that is not known, lacks its value, or cannot have it.
    """
    values: dict[str, Any] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            break
        if not word.startswith("-") or word == "-":
            rest.insert(0, word)
            break
        flag, equals, value = word.partition("=")
        setting = _BY_FLAG.get(flag)
        if setting is None:
            raise OptionError(_unknown(flag))
        if setting.kind == "flag":
            values[setting.name] = setting.read(value, flag) if equals else True
            continue
        if not equals:
            if not rest:
                raise OptionError(f"{flag} needs a value: {setting.help}")
            value = rest.pop(0)
        values[setting.name] = setting.read(value, flag)
    script = rest.pop(0) if rest else None
    return Words(values, script, rest)


def _unknown(flag: str) -> str:
    name = flag.lstrip("-").replace("-", "_")
    for pattern, reason in _refused().items():
        if fnmatch.fnmatchcase(name, pattern):
            return f"{flag} has no meaning here: {reason}"
    hint = did_you_mean(flag, [s.flags[0] for s in SETTINGS])
    return (
        f"unknown option {flag}{hint or '.'} `anydevice launch --help-all` lists the launcher's "
        "options; the script's own come after the script"
    )


def _refused() -> dict[str, str]:
    """Flags of Accelerate's launcher that have no effect here, and what to do instead.

    A name that ends in ``*`` stands for all that begin so. In a file of its own, since it names
    hardware.
    """
    text = Path(__file__).with_name("refused_flags.json").read_text(encoding="utf-8")
    found: dict[str, str] = json.loads(text)
    return found


#: Columns of the help, and where the explanations begin.
_WIDTH, _LEFT = 80, 34
_USAGE: Final = """usage: anydevice launch [options] script.py [arguments of the script]

Run a script in several processes, through torch.distributed.run. Options may be
spelled with underscores or hyphens. A value comes from the first of: the flag,
the environment, the configuration file, the default; --dry-run shows which.
"""


def help_text(*, all_groups: bool = False) -> str:
    """The text of ``--help``: the common options, or all of them."""
    groups = dict.fromkeys(s.group for s in SETTINGS) if all_groups else ["common"]
    parts = [_USAGE]
    for group in groups:
        parts.append("options:" if group == "common" else f"{group}:")
        parts += _lines(s for s in SETTINGS if s.group == group)
        parts.append("")
    return "\n".join(parts).rstrip()


def _lines(settings: Iterable[Setting]) -> Iterable[str]:
    for setting in settings:
        left = f"  {setting.short + ', ' if setting.short else ''}--{setting.name}"
        if setting.kind == "choice" and len(setting.choices) <= 4:
            left += f" {'|'.join(setting.choices)}"
        elif setting.kind != "flag":
            left += f" {'true|false' if setting.kind == 'bool' else setting.kind.upper()}"
        wide = len(left) >= _LEFT or len(setting.help) > _WIDTH - _LEFT - 1
        yield f"{left}\n{'':<6}{setting.help}" if wide else f"{left:<{_LEFT}} {setting.help}"
