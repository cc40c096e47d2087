"""The configuration file: where it is, how it is read and written.

It is Accelerate's ``default_config.yaml``, so one file serves both. Files of each of its versions
are read: keys that have moved are found at their old places, and what has no meaning here is
listed, not dropped in silence.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from anydevice.errors import OptionError
from anydevice.launch.settings import did_you_mean
from anydevice.launch.table import SETTINGS
from anydevice.text import says_yes

__all__ = [
    "ConfigFile",
    "default_path",
    "find_config",
    "load_config_from_file",
    "read_config",
    "write_config",
]

_NAME: Final = "default_config.yaml"
#: Keys without an effect that every version of Accelerate writes: not worth a word.
_USUAL: Final = frozenset(
    {"compute_environment", "distributed_type", "main_training_function", "same_network", "debug"}
)
#: Values of ``distributed_type`` that say how, not on which device.
_PARADIGMS: Final = {
    "FSDP": "use_fsdp",
    "DEEPSPEED": "use_deepspeed",
    "MEGATRON_LM": "use_megatron_lm",
}
_SECTIONS: Final = frozenset(
    key.partition(".")[0] for s in SETTINGS for key in s.keys if "." in key
)


@dataclasses.dataclass(frozen=True)
class ConfigFile:
    """What a configuration file gives.

    Attributes:
        path: the file.
        values: settings by name, converted and checked.
        origins: the key of the file that gave each.
        left_aside: keys that have no meaning here.
    """

    path: Path
    values: dict[str, Any]
    origins: dict[str, str]
    left_aside: list[str]

    def to_dict(self) -> dict[str, Any]:
        """The settings by name."""
        return dict(self.values)


def default_path() -> Path:
    """Where ``anydevice config`` writes: ``$ANYDEVICE_CONFIG_FILE``, or in Hugging Face's cache."""
    given = os.environ.get("ANYDEVICE_CONFIG_FILE")
    return Path(given).expanduser() if given else _cache() / "anydevice" / _NAME


def find_config(given: str | os.PathLike[str] | None = None) -> Path | None:
    """The file that a launch reads: the one given, else our own, else Accelerate's; None if none.

    Raises:
        OptionError: the file that was given is not there.
    """
    named = given or os.environ.get("ANYDEVICE_CONFIG_FILE")
    if named:
        path = Path(named).expanduser()
        if not path.is_file():
            what = "--config_file" if given else "ANYDEVICE_CONFIG_FILE"
            raise OptionError(f"{what} {path}: there is no such file; write it: anydevice config")
        return path
    theirs = _cache() / "accelerate"
    places = [default_path(), theirs / _NAME, theirs / "default_config.json"]
    return next((path for path in places if path.is_file()), None)


def load_config_from_file(config_file: str | os.PathLike[str] | None = None) -> ConfigFile:
    """Read the configuration file that a launch would read.

    Args:
        config_file: the file; None looks where `find_config` does.

    Raises:
        OptionError: there is none, or it cannot be read.

    Example:
        >>> from anydevice.commands.config import load_config_from_file
        >>> from anydevice.utils import write_basic_config
        >>> path = write_basic_config(save_location="config.yaml")
        >>> load_config_from_file("config.yaml").to_dict()["mixed_precision"]
        'no'
    """
    path = find_config(config_file)
    if path is None:
        raise OptionError(f"{default_path()}: there is no such file; write it: anydevice config")
    return read_config(path)


def _cache() -> Path:
    home = os.environ.get("HF_HOME")
    if home:
        return Path(home).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface"


def read_config(path: Path) -> ConfigFile:
    """Read a configuration file of any version.

    Raises:
        OptionError: it is no YAML or JSON mapping, is for a service that is not supported, or a
            value in it cannot be used; the message names the file and the key.
    """
    data = _load(path)
    if str(data.get("compute_environment", "LOCAL_MACHINE")).upper() != "LOCAL_MACHINE":
        raise OptionError(
            f"{path}: compute_environment is {data['compute_environment']!r}; only LOCAL_MACHINE "
            "is launched here"
        )
    flat = _flatten(data)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    used: set[str] = set()
    for setting in SETTINGS:
        for key in setting.keys:
            if key not in flat:
                continue
            used.add(key)
            if flat[key] is None or flat[key] == "" or setting.name in values:
                continue
            value = setting.read(flat[key], f"{path}: {key}")
            if setting.kind != "flag" or value:  # a flag that is off says nothing
                values[setting.name], origins[setting.name] = value, key
    _read_old(flat, values, origins, used, path)
    _read_type(flat.get("distributed_type"), values, origins, path)
    left = sorted(
        key for key, value in flat.items() if key not in used and not _is_nothing(key, value)
    )
    return ConfigFile(path, values, origins, left)


def _load(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise OptionError(f"{path} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise OptionError(f"{path} is not a configuration file: it has no keys")
    return data


def _flatten(data: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of sections joined with a dot."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, dict):
            flat.update({f"{key}.{name}": inner for name, inner in value.items()})
        else:
            flat[str(key)] = value
    return flat


def _read_old(
    flat: Mapping[str, Any],
    values: dict[str, Any],
    origins: dict[str, str],
    used: set[str],
    path: Path,
) -> None:
    """Keys of the first versions."""
    if "fp16" in flat:  # before `mixed_precision`
        used.add("fp16")
        if "mixed_precision" not in values and says_yes(str(flat["fp16"])):
            values["mixed_precision"], origins["mixed_precision"] = "fp16", "fp16"
    ids = values.get("gpu_ids")
    if ids is not None and str(ids).lower() == "all":
        del values["gpu_ids"], origins["gpu_ids"]


def _read_type(kind: Any, values: dict[str, Any], origins: dict[str, str], path: Path) -> None:
    """``distributed_type``: FSDP, DEEPSPEED, MEGATRON_LM, NO, or MULTI_ and a type of device."""
    word = str(kind or "NO").upper()  # YAML 1.1 reads a bare no as False
    if word in _PARADIGMS:
        values[_PARADIGMS[word]], origins[_PARADIGMS[word]] = True, "distributed_type"
    elif word == "MULTI_CPU":
        values.setdefault("cpu", True)
        origins.setdefault("cpu", "distributed_type")
    elif word == "MULTI_GPU":
        values["multi_gpu"], origins["multi_gpu"] = True, "distributed_type"
    elif word.startswith("MULTI_"):
        values.setdefault("device_type", word.removeprefix("MULTI_").lower())
        origins.setdefault("device_type", "distributed_type")
    elif word != "NO":
        raise OptionError(
            f"{path}: distributed_type {word} is not supported; write a new file with "
            "`anydevice config`"
        )


def _is_nothing(key: str, value: Any) -> bool:
    """Whether a key without a meaning here says nothing that anybody would miss."""
    return (
        key in _USUAL
        or value in (None, False, "", "no", "NO", {}, [])
        or (isinstance(value, str) and value.lower() == "false")
    )


def write_config(values: Mapping[str, Any], path: Path) -> Path:
    """Write settings as a file that `read_config` and Accelerate read.

    Args:
        values: settings by name.
        path: the file; its folder is made.

    Raises:
        OptionError: a name that is no setting, or the file cannot be written.
    """
    data: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE"}
    by_name = {setting.name: setting for setting in SETTINGS}
    for name, value in values.items():
        setting = by_name.get(name)
        if setting is None:
            raise OptionError(f"{name!r} is no setting{did_you_mean(name, by_name)}")
        if not setting.keys:
            continue
        section, dot, key = setting.keys[0].rpartition(".")
        target = data.setdefault(section, {}) if dot else data
        checked = setting.read(value, name)
        target[key] = yaml.safe_load(checked) if _is_plain(checked) else checked
    data["distributed_type"] = _type_of(values)
    text = yaml.safe_dump(data, sort_keys=True)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data, indent=2) if path.suffix == ".json" else text, "utf-8")
    except OSError as error:
        raise OptionError(f"{path} cannot be written: {error}") from error
    return path


def _is_plain(value: Any) -> bool:
    """Whether a text is a number, true or false, which files write without quotes."""
    return isinstance(value, str) and (value.isdecimal() or value in ("true", "false"))


def _type_of(values: Mapping[str, Any]) -> str:
    for word, name in _PARADIGMS.items():
        if values.get(name):
            return word
    if int(values.get("num_processes") or 1) == 1:
        return "NO"
    return "MULTI_CPU" if values.get("cpu") or values.get("device_type") == "cpu" else "MULTI_GPU"
