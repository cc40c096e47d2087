"""Core knows no hardware by name."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("names", ROOT / "scripts" / "check_core_names.py")
names = importlib.util.module_from_spec(spec)
spec.loader.exec_module(names)


def test_core_names_no_device():
    assert names.main(str(ROOT / "core")) == 0


@pytest.mark.parametrize(
    "code",
    ["x = 'cuda'", "is_npu_available()", "torch.mps.empty_cache()", "f'mlu:{i}'", "CudaStream()"],
)
def test_a_device_name_is_seen(code):
    assert list(names.leaks(code))


@pytest.mark.parametrize(
    "code", ['"""Runs on cuda."""', "# cuda", "simple = maximum = 'input'", "x = 'cpu'"]
)
def test_docstrings_comments_and_other_words_are_not(code):
    assert not list(names.leaks(code))
