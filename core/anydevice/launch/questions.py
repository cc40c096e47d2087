"""The questions of ``anydevice config``, and the settings that fit this machine without them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal

from anydevice import registry
from anydevice.errors import OptionError
from anydevice.launch.config_file import default_path, write_config
from anydevice.launch.engine_questions import ENGINES
from anydevice.launch.settings import Setting, read_bool
from anydevice.launch.table import BY_NAME

__all__ = ["ask", "machine_defaults", "write_basic_config"]

_HOST: Final = "cpu"
#: Reads one line after a prompt.
Reader = Callable[[str], str]


def machine_defaults() -> dict[str, Any]:
    """Settings for the machine as it is: all its accelerators, or one process on the host."""
    kind = registry.primary_type()
    if kind is None:
        return {
            "cpu": True,
            "num_processes": 1,
            "num_machines": 1,
            "machine_rank": 0,
            "mixed_precision": "no",
        }
    types = {d.type for d in registry.available_devices()} - {_HOST, kind}
    return {
        # A launch takes this type by itself where there is no other; Accelerate knows no such key.
        **({"device_type": kind} if types else {}),
        "num_processes": registry.get_backend(kind).device_count(),
        "num_machines": 1,
        "machine_rank": 0,
        "mixed_precision": "no",
    }


def ask(read: Reader, say: Callable[[str], None], known: dict[str, Any]) -> dict[str, Any]:
    """Ask for the settings, a question a line. An empty answer takes the value in brackets.

    Args:
        read: reads a line after a prompt, such as `input`.
        say: prints a line.
        known: values to offer.

    Returns:
        The settings by name.
    """
    values = dict(known)

    def question(name: str, text: str, offered: Any = None) -> Any:
        offered = values.get(name, offered)
        values[name] = _ask_one(read, say, BY_NAME[name], text, offered)
        return values[name]

    types = sorted({d.type for d in registry.available_devices()})
    offered = _HOST if values.pop("cpu", False) else values.get("device_type", types[0])
    values.pop("device_type", None)
    kind = _choose(read, say, "Which type of device?", types, offered)
    values["cpu" if kind == _HOST else "device_type"] = True if kind == _HOST else kind
    machines = question("num_machines", "How many machines?", 1)
    if machines > 1:
        question("machine_rank", "Which number has this machine (from 0)?", 0)
        question("main_process_ip", "What is the address of machine 0?")
        question("main_process_port", "Which port of machine 0?", 29500)
    else:
        values["machine_rank"] = 0
    count = 1 if kind == _HOST else registry.get_backend(kind).device_count()
    if values.get("num_processes") in (None, 1):
        values["num_processes"] = count * machines
    question("num_processes", "How many processes, on all machines together?")
    question("mixed_precision", "Mixed precision (no, fp16, bf16)?", "no")
    question("gradient_accumulation_steps", "Gradient accumulation steps?", 1)
    if values["num_processes"] > 1 or kind != _HOST:
        _ask_engine(read, question, values)
    return values


def _ask_engine(read: Reader, question: Callable[..., Any], values: dict[str, Any]) -> None:
    """Which engine divides the model, if any, and what it needs to know."""
    engines = ENGINES if values["num_processes"] > 1 else ["use_deepspeed"]
    for engine in engines:
        text, following = ENGINES[engine]
        if not question(engine, text, False):
            continue
        if engine == "use_fsdp":
            values["fsdp_version"] = "2"
        if engine == "use_deepspeed":
            known = values.pop("deepspeed_config_file", "")
            file = read(f"DeepSpeed's own JSON file, or none [{known or 'none'}] ").strip() or known
            if file not in ("", "none"):
                values["deepspeed_config_file"] = file
        for each in following:
            if each.when(values):
                question(each.name, each.text, each.offered)
        break


def _ask_one(
    read: Reader, say: Callable[[str], None], setting: Setting, text: str, offered: Any
) -> Any:
    shown = "" if offered is None else f" [{setting.render(offered)}]"
    while True:
        answer = read(f"{text}{shown} ").strip()
        if not answer and offered is not None:
            return offered
        try:
            if not answer:
                raise OptionError("an answer is needed")
            if setting.kind in ("flag", "bool"):
                return read_bool(answer, "the answer")
            return setting.read(answer, "the answer")
        except OptionError as error:
            say(str(error))


def _choose(
    read: Reader, say: Callable[[str], None], text: str, choices: list[str], offered: str
) -> str:
    if offered not in choices:
        offered = choices[0]
    if len(choices) == 1:
        return choices[0]
    while True:
        answer = read(f"{text} ({', '.join(choices)}) [{offered}] ").strip() or offered
        if answer in choices:
            return answer
        say(f"{answer!r} is not one of {', '.join(choices)}")


def write_basic_config(
    mixed_precision: str = "no", save_location: str | os.PathLike[str] | None = None
) -> Path | Literal[False]:
    """Write a configuration file that fits this machine, in place of ``anydevice config``.

    Args:
        mixed_precision: ``"no"``, ``"fp16"`` or ``"bf16"``.
        save_location: the file; by default the one that ``anydevice launch`` reads.

    Returns:
        The file; False when it is there already, and was left as it is.

    Raises:
        OptionError: the precision is none of those, or the file cannot be written.

    Example:
        >>> from anydevice.utils import write_basic_config
        >>> path = write_basic_config(mixed_precision="bf16", save_location="config.yaml")
    """
    path = Path(save_location).expanduser() if save_location is not None else default_path()
    precision = BY_NAME["mixed_precision"].read(mixed_precision, "mixed_precision")
    if path.exists():
        return False
    return write_config({**machine_defaults(), "mixed_precision": precision}, path)
