"""Compile the extension once for this torch, Python and compiler, and load it.

The library is kept in ``$XDG_CACHE_HOME/anydevice/simulator/<key>`` (``~/.cache`` without the
variable). It is built next to that place and renamed into it, so a build that is killed leaves
nothing that a later process could take for whole; a lock makes processes that start together wait
for one build. One call of the compiler does it: ninja and ``torch.utils.cpp_extension`` are not
needed for a single translation unit.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Final, cast

import filelock
import torch

from anydevice.errors import AnyDeviceError
from anydevice.text import FALSE_WORDS

from .native import Native

__all__ = ["SimulatorUnavailableError", "cache_folder", "load_extension"]

_NAME: Final = "_anydevice_simulator"
_SOURCES: Final = Path(__file__).with_name("csrc")
_OLDEST_TORCH: Final = (2, 11)
_FLAGS: Final = ("-std=c++20", "-O1", "-g0", "-w", "-fPIC", "-shared")
_LIBRARIES: Final = ("c10", "torch_cpu", "torch", "torch_python")
_TIMEOUT_S: Final = 1800.0


class SimulatorUnavailableError(AnyDeviceError, RuntimeError):
    """The simulator cannot be had here; the message says what is missing and how to get it."""


def load_extension() -> Native:
    """Return the compiled module, building it first if this machine has not yet.

    Raises:
        SimulatorUnavailableError: no compiler, no Python headers, or a torch that does not fit.
    """
    _require_platform()
    library = _build_once(_compiler())
    loader = importlib.machinery.ExtensionFileLoader(_NAME, str(library))
    spec = importlib.util.spec_from_file_location(_NAME, library, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    try:
        loader.exec_module(module)
    except ImportError as error:
        raise SimulatorUnavailableError(
            f"The simulator was built but does not load: {error}. Delete {library.parent} and try "
            "again."
        ) from error
    return cast("Native", module)


def cache_folder() -> Path:
    """The folder that holds one subfolder for each build."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "anydevice" / "simulator"


def _require_platform() -> None:
    if os.name != "posix":
        raise SimulatorUnavailableError(
            f"The simulator is written for POSIX systems, not for {sys.platform}. Run its tests "
            "under Linux (WSL will do)."
        )
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if release < _OLDEST_TORCH:
        oldest = ".".join(map(str, _OLDEST_TORCH))
        raise SimulatorUnavailableError(
            f"The simulator needs torch {oldest} or later; this is {torch.__version__}. "
            f"Install it with: pip install 'torch>={oldest}'"
        )


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "g++", "c++", "clang++"):
        path = shutil.which(name) if name else None
        if path:
            return path
    raise SimulatorUnavailableError(
        "The simulator is compiled on first use, and no C++ compiler was found (looked for $CXX, "
        "g++, c++, clang++). Install one, for example: apt-get install g++. The Python packages "
        "that it needs come with: pip install 'anydevice[conformance]'"
    )


def _build_once(compiler: str) -> Path:
    key = _key(compiler)
    root = cache_folder()
    library = root / key / f"{_NAME}.so"
    if library.exists():
        return library
    root.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(root / f"{key}.lock", timeout=_TIMEOUT_S):
        if not library.exists():
            for remains in root.glob(f"{key}.unfinished-*"):  # of builds that were killed
                shutil.rmtree(remains, ignore_errors=True)
            # A killed build's compiler may live on: never write where it writes.
            unfinished = Path(tempfile.mkdtemp(prefix=f"{key}.unfinished-", dir=root))
            _compile(compiler, unfinished / library.name)
            unfinished.rename(library.parent)
    return library


def _key(compiler: str) -> str:
    """Name all that the library depends on."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    digest = hashlib.sha256()
    for part in (version.stdout, *_FLAGS):
        digest.update(part.encode())
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    abi = sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag
    return f"torch{torch.__version__}-{abi}-{digest.hexdigest()[:16]}".replace("+", "_")


def _compile(compiler: str, library: Path) -> None:
    python = Path(sysconfig.get_path("include"))
    if not (python / "Python.h").exists():
        raise SimulatorUnavailableError(
            f"The simulator needs Python's headers, and {python} has no Python.h. Install them, "
            "for example: apt-get install python3-dev"
        )
    torch_folder = Path(torch.__file__).parent
    include = torch_folder / "include"
    cxx11_abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    command = [
        compiler,
        *_FLAGS,
        *(["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []),
        f"-DTORCH_EXTENSION_NAME={_NAME}",
        f"-D_GLIBCXX_USE_CXX11_ABI={cxx11_abi}",
        *(f"-I{path}" for path in (include, include / "torch/csrc/api/include", python)),
        str(_SOURCES / "simulator.cpp"),
        "-o",
        str(library),
        f"-L{torch_folder / 'lib'}",
        *(f"-l{name}" for name in _LIBRARIES),
    ]
    result = _run_with_clock(command)
    if result.returncode != 0:
        errors = [line for line in result.stderr.splitlines() if "error" in line]
        shown = "\n".join(errors[:10]) or result.stderr[-2000:]
        raise SimulatorUnavailableError(
            f"{compiler} could not compile the simulator for torch {torch.__version__} "
            f"(exit status {result.returncode}). A compiler with C++20 is needed, such as g++ 11 "
            f"or later. It says:\n{shown}"
        )


def _run_with_clock(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run the compiler; on a terminal, say how long it has been at it."""
    off = os.environ.get("ANYDEVICE_PROGRESS", "").lower() in FALSE_WORDS
    shown = sys.stderr.isatty() and not off
    start = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as c:
        while True:
            try:
                output, errors = c.communicate(timeout=1 if shown else None)
            except subprocess.TimeoutExpired:
                seconds = time.monotonic() - start
                text = f"\rcompiling the simulator, once for this torch: {seconds:.0f} s"
                print(text, end="", file=sys.stderr, flush=True)
            except BaseException:
                c.kill()
                raise
            else:
                break
    if shown:
        print(file=sys.stderr)
    return subprocess.CompletedProcess(command, c.returncode, output, errors)
