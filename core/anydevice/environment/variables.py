"""Environment variables: reading them as what they mean, and changing them for a while."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, TypeVar

from anydevice.errors import OptionError
from anydevice.text import TRUE_WORDS

__all__ = [
    "clear_environment",
    "convert_dict_to_env_variables",
    "get_int_from_env",
    "parse_choice_from_env",
    "parse_flag_from_env",
    "patch_environment",
    "purge_accelerate_environment",
    "str_to_bool",
]

T = TypeVar("T")
_FALSE: Final = frozenset({"n", "no", "f", "false", "off", "0", "none", "null"})
_OURS: Final = ("ACCELERATE_", "ANYDEVICE_")


def str_to_bool(value: str | bool, to_bool: bool = False) -> int | bool:
    """Read a text as yes or no.

    Args:
        value: such as ``"yes"``, ``"True"``, ``"0"`` or ``"off"``, in any case.
        to_bool: return a bool rather than 1 or 0.

    Raises:
        OptionError: it is neither.

    Example:
        >>> from anydevice.utils import str_to_bool
        >>> str_to_bool("Yes"), str_to_bool("off", to_bool=True)
        (1, False)
    """
    text = str(value).strip().lower()
    if text in TRUE_WORDS:
        return True if to_bool else 1
    if text in _FALSE:
        return False if to_bool else 0
    raise OptionError(f"{value!r} is neither yes nor no: use 'true' or 'false'")


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Read a variable as yes or no; ``default`` where it is not set or empty.

    Raises:
        OptionError: it is set to something else; the message names it.

    Example:
        >>> import os
        >>> from anydevice.utils import parse_flag_from_env
        >>> os.environ["VERBOSE"] = "yes"
        >>> parse_flag_from_env("VERBOSE")
        True
        >>> del os.environ["VERBOSE"]
    """
    text = os.environ.get(key, "")
    if not text.strip():
        return bool(default)
    try:
        return bool(str_to_bool(text))
    except OptionError as error:
        raise OptionError(f"{key} in the environment: {error}") from None


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """Read a variable as text; ``default`` where it is not set.

    Example:
        >>> import os
        >>> from anydevice.utils import parse_choice_from_env
        >>> os.environ["PRECISION"] = "bf16"
        >>> parse_choice_from_env("PRECISION")
        'bf16'
        >>> del os.environ["PRECISION"]
    """
    return os.environ.get(key, str(default))


def get_int_from_env(env_keys: Iterable[str], default: int) -> int:
    """Read the first of several variables that is set to a number from 0; else ``default``.

    Raises:
        OptionError: one is set to something else; the message names it.

    Example:
        >>> import os
        >>> from anydevice.utils import get_int_from_env
        >>> os.environ["WORKERS"] = "3"
        >>> get_int_from_env(["MY_WORKERS", "WORKERS"], 1)
        3
        >>> del os.environ["WORKERS"]
    """
    for key in env_keys:
        text = os.environ.get(key, "").strip()
        if not text:
            continue
        try:
            number = int(text)
        except ValueError:
            raise OptionError(f"{key}={text!r} in the environment is no whole number") from None
        if number >= 0:
            return number
    return default


def convert_dict_to_env_variables(current_env: Mapping[str, Any]) -> list[str]:
    r"""Lines ``NAME=value`` of those variables that a shell can take, without quotes.

    Raises:
        OptionError: a name or value that would not stay one line of a file of variables.

    Example:
        >>> from anydevice.utils import convert_dict_to_env_variables
        >>> convert_dict_to_env_variables({"ACCELERATE_DEBUG_MODE": 1})
        ['ACCELERATE_DEBUG_MODE=1\n']
    """
    lines = []
    for name, value in current_env.items():
        if not name or any(c in f"{name}{value}" for c in "\n\r\0;<>") or "=" in name:
            raise OptionError(
                f"environment variable {name!r}={str(value)!r}: neither name nor value may hold a "
                "line's end, ';', '<' or '>', nor the name a '='"
            )
        lines.append(f"{name}={value}\n")
    return lines


@contextlib.contextmanager
def patch_environment(**kwargs: Any) -> Iterator[None]:
    """Set environment variables for a context; afterwards they are as before.

    Args:
        **kwargs: names, which are put in upper case, and values, which are made text.

    Example:
        >>> import os
        >>> from anydevice.utils import patch_environment
        >>> with patch_environment(foo=1):
        ...     os.environ["FOO"]
        '1'
    """
    new = {name.upper(): str(value) for name, value in kwargs.items()}
    before = {name: os.environ.get(name) for name in new}
    os.environ.update(new)
    try:
        yield
    finally:
        for name, value in before.items():
            _put(name, value)


@contextlib.contextmanager
def clear_environment() -> Iterator[None]:
    """Take all environment variables away for a context; afterwards they are as before.

    Example:
        >>> import os
        >>> from anydevice.utils import clear_environment
        >>> with clear_environment():
        ...     print(len(os.environ))
        0
        >>> "PATH" in os.environ
        True
    """
    before = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def purge_accelerate_environment(func_or_cls: T) -> T:
    """Decorate a function, or a class of tests, so that it leaves no variables of ours behind.

    After each call the variables whose names begin with ``ACCELERATE_`` or ``ANYDEVICE_`` are as
    before it. Of a class the methods whose names begin with ``test`` are decorated, in subclasses,
    too.

    Example:
        >>> import os
        >>> from anydevice.utils import purge_accelerate_environment
        >>> @purge_accelerate_environment
        ... def measure():
        ...     os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
        >>> measure()
        >>> "ACCELERATE_MIXED_PRECISION" in os.environ
        False
    """
    if not inspect.isclass(func_or_cls):
        return _purging(func_or_cls)  # type: ignore[arg-type, return-value]
    decorated: Any = func_or_cls
    _purge_methods(decorated)
    inherited = decorated.__dict__.get("__init_subclass__")

    def decorate_subclass(cls: Any, **kwargs: Any) -> None:
        if inherited is not None:
            inherited.__func__(cls, **kwargs)
        else:
            super(decorated, cls).__init_subclass__(**kwargs)
        _purge_methods(cls)

    hook: Any = decorate_subclass
    decorated.__init_subclass__ = classmethod(hook)
    return func_or_cls


def _purge_methods(cls: type) -> None:
    for name, value in list(vars(cls).items()):
        if name.startswith("test") and inspect.isfunction(value):
            setattr(cls, name, _purging(value))


def _purging(function: Callable[..., Any]) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def run_later(*args: Any, **kwargs: Any) -> Any:
            with _kept():
                return await function(*args, **kwargs)

        return run_later

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _kept():
            return function(*args, **kwargs)

    return run


@contextlib.contextmanager
def _kept() -> Iterator[None]:
    before = {name: value for name, value in os.environ.items() if name.startswith(_OURS)}
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith(_OURS)]:
            _put(name, before.get(name))
        os.environ.update(before)


def _put(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
