"""Models are saved once for all tests of this folder."""

from __future__ import annotations

import importlib.util
import pathlib
import sys
import warnings

import pytest

spec = importlib.util.spec_from_file_location("zoo", pathlib.Path(__file__).with_name("zoo.py"))
zoo = sys.modules.setdefault("zoo", importlib.util.module_from_spec(spec))
spec.loader.exec_module(zoo)


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """A function from the name of a family to its `zoo.Saved`."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    made = {}

    def get(name):
        if name not in made:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                made[name] = zoo.Saved(getattr(zoo, name), tmp_path_factory.mktemp(name))
        return made[name]

    return get


@pytest.fixture
def enabled():
    """transformers with anydevice's device maps."""
    from anydevice.integrations import transformers as integration

    with integration.enable():
        yield integration
