"""What tests of models over several processes share."""

from __future__ import annotations

import pytest
from distributed import models

NAMES = ("llama", "tied", "gpt2", "opt", "mixtral", "gemma3")


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """The folder and the answers of each model."""
    root = tmp_path_factory.mktemp("models")
    return {name: (root / name, models.save(name, root / name)) for name in NAMES}
