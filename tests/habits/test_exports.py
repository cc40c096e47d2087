"""What is public: each ``__all__`` is true, the reference lists it, importing starts nothing."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from warm import run_python

import anydevice

ROOT = Path(__file__).parents[2]
CORE = ROOT / "core"
spec = importlib.util.spec_from_file_location("reference", ROOT / "scripts" / "make_reference.py")
reference = importlib.util.module_from_spec(spec)
spec.loader.exec_module(reference)


def declared(path):
    """A file's ``__all__``; None without one."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if getattr(target, "id", "") == "__all__":
            return ast.literal_eval(node.value)
    return None


def module_of(path):
    return ".".join(path.relative_to(CORE).with_suffix("").parts).removesuffix(".__init__")


FILES = {
    module_of(path): path
    for path in sorted((CORE / "anydevice").rglob("*.py"))
    if path.name not in ("_version.py", "__main__.py", "errors.py")  # errors: all of it is public
}


@pytest.mark.parametrize("name", FILES)
def test_every_file_says_what_it_offers(name):
    names = declared(FILES[name])
    assert names is not None, f"{FILES[name]} has no __all__"
    assert len(names) == len(set(names))
    module = importlib.import_module(name)
    missing = [n for n in names if not hasattr(module, n)]
    assert not missing, f"{name}.__all__ names {missing}, which it does not have"


@pytest.mark.parametrize("name", FILES)
def test_a_name_is_offered_or_private(name):
    """Without an underscore and in no ``__all__``: one of the two was forgotten."""
    tree = ast.parse(FILES[name].read_text(encoding="utf-8"))
    defined = [
        node.name
        for node in tree.body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
    ]
    forgotten = sorted(set(defined) - set(declared(FILES[name])))
    assert not forgotten, f"{name}: in __all__, or with an underscore: {forgotten}"


def test_each_public_name_has_a_home():
    assert set(anydevice.__all__) == {*anydevice._HOMES, "__version__"}
    for name, home in anydevice._HOMES.items():
        module = importlib.import_module(f"anydevice.{home}")
        assert getattr(anydevice, name) is getattr(module, name)
    assert set(anydevice.__all__) <= set(dir(anydevice))
    with pytest.raises(AttributeError, match="no attribute 'dispatch_models'"):
        _ = anydevice.dispatch_models


def test_every_public_thing_is_documented():
    for module in reference.MODULES:
        owner = importlib.import_module(module)
        for name in owner.__all__:
            thing = getattr(owner, name)
            assert isinstance(thing, str) or (thing.__doc__ or "").strip(), f"{module}.{name}"


def test_the_reference_is_up_to_date():
    written = reference.PAGE.read_text(encoding="utf-8")
    assert written == reference.page(), "run: python scripts/make_reference.py"


PROBE = """
import sys
import anydevice
heavy = {"transformers", "rich", "typer", "pytest", "tqdm", "huggingface_hub"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
for name in anydevice.__all__:
    getattr(anydevice, name)
late = {"transformers", "rich", "typer", "pytest"}
assert not late & set(sys.modules), late & set(sys.modules)
import torch
assert not torch.cuda.is_initialized() and not torch.cuda._is_in_bad_fork()
plugins = ("anydevice_backends", "anydevice_conformance")
assert not any(name.startswith(plugins) for name in sys.modules)
"""


def test_importing_is_light_and_starts_no_runtime():
    subprocess.run([sys.executable, "-c", PROBE], check=True, timeout=120)


FORKS = """
import os, threading, warnings
import anydevice
anydevice.available_devices()
threads = threading.active_count()
assert threads == 1, threading.enumerate()
child = os.fork()
if child == 0:
    import torch
    devices = anydevice.available_devices()
    ok = all(bool((torch.ones(2, device=device) == 1).all()) for device in devices)
    os._exit(0 if ok and devices else 1)
_, status = os.waitpid(child, 0)
assert status == 0, status
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_process_can_fork_after_import_and_use_its_devices():
    run_python("-W", "error", "-c", FORKS, check=True)
