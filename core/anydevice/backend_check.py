"""What is wrong with a backend's class, told without calling the device.

A misspelled member is inherited in silence: ``def memory_inof`` overrides nothing, and the default
answers. These checks compare a backend's class with the interface. ``anydevice backends`` and
``anydevice certify`` show what they find.
"""

from __future__ import annotations

import difflib
import inspect
import re
from typing import Any, Final

from anydevice.backend import INTERFACE_VERSION, DeviceBackend
from anydevice.errors import BackendError

__all__ = ["member_faults", "version_fault"]

_VERSION: Final = re.compile(r"(\d+)\.(\d+)")
#: Private names of the interface; a backend's own helpers never start so.
_RESERVED: Final = "_anydevice_"


def version_fault(backend: DeviceBackend) -> str:
    """Compare the interface version that a backend was written for with this one.

    The same major version works, whichever minor: a member that the backend lacks has a default,
    and one that this anydevice does not know yet is not called.

    Returns:
        A note when the backend was written for a newer minor version; else an empty text.

    Raises:
        BackendError: the major versions differ, or the version cannot be read.
    """
    stated: Any = backend.interface_version
    match = _VERSION.fullmatch(stated) if isinstance(stated, str) else None
    if stated is None:
        return ""
    if match is None:
        raise BackendError(
            f"interface_version is {stated!r}, not a version such as {INTERFACE_VERSION!r}"
        )
    theirs, ours = tuple(map(int, match.groups())), tuple(map(int, INTERFACE_VERSION.split(".")))
    if theirs[0] != ours[0]:
        older = "the backend's package" if theirs < ours else "anydevice"
        raise BackendError(
            f"it was written for version {stated} of the interface, and this anydevice has "
            f"{INTERFACE_VERSION}: update {older}"
        )
    if theirs > ours:
        return (
            f"it was written for version {stated} of the interface, and this anydevice has "
            f"{INTERFACE_VERSION}: what is new in {stated} is not used; update anydevice"
        )
    return ""


def member_faults(backend: DeviceBackend) -> list[str]:
    """Members that are not the interface's, and those that cannot be called as it says.

    Args:
        backend: any backend; no member of it is called.

    Returns:
        One sentence for each fault, with "did you mean" where a member has nearly that name.

    Example:
        >>> class Foo(DeviceBackend):
        ...     device_type = "foo"
        ...     def device_cuont(self): return 1
        >>> member_faults(Foo())
        ["Foo.device_cuont is not a member of the interface: did you mean 'device_count'?"]
    """
    interface = {n for n in dir(DeviceBackend) if not n.startswith("_")} | {"device_type"}
    own = {
        name: value
        for kind in reversed(type(backend).__mro__[: type(backend).__mro__.index(DeviceBackend)])
        for name, value in vars(kind).items()
    }
    own.update(getattr(backend, "__dict__", {}))
    faults = []
    for name, value in own.items():
        where = f"{type(backend).__name__}.{name}"
        if name.startswith(_RESERVED):
            faults.append(f"{where}: names that start with {_RESERVED!r} are the interface's own")
        elif name.startswith("_"):
            continue
        elif name not in interface:
            close = difflib.get_close_matches(name, sorted(interface), 1, 0.6)
            remedy = (
                f": did you mean {close[0]!r}?"
                if close
                else "; the name of a helper starts with an underscore"
            )
            faults.append(f"{where} is not a member of the interface{remedy}")
        elif fault := _signature_fault(name, value):
            faults.append(f"{where} {fault}")
    return faults


def _signature_fault(name: str, value: Any) -> str:
    """Why an overriding method cannot be called as the interface calls it."""
    expected = getattr(DeviceBackend, name, None)
    if not inspect.isfunction(expected):
        return ""
    if isinstance(value, (staticmethod, classmethod)) or not callable(value):
        return "" if callable(getattr(value, "__func__", value)) else "is not a method"
    wanted = inspect.signature(expected)
    call = [p for p in wanted.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    keywords = {n: None for n, p in wanted.parameters.items() if p.kind is p.KEYWORD_ONLY}
    try:
        inspect.signature(value).bind(*call, **keywords)
    except TypeError as error:
        return f"cannot be called as the interface calls it, {name}{wanted}: {error}"
    except ValueError:  # a builtin without a signature
        return ""
    return ""
