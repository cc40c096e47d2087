"""Fixtures for the tests of the suite."""

from __future__ import annotations

import forking
import pytest

from anydevice_conformance import warm_server

#: Of transformers, what checks import: each run would take seconds to do so.
_MODELS = (
    "transformers.generation.utils",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.t5.modeling_t5",
)


@pytest.fixture(scope="session")
def _warm_variables():
    """What says to others that this run of pytest has a warm process."""
    folder = forking.node(forking.RANKS, forking.TRANSFORMERS, warm_server.PRELOADED + _MODELS)
    return {"_ANYDEVICE_WARM_PROCESS": f"{folder}/programs"}


@pytest.fixture(scope="module")
def warm_process(_warm_variables):
    """Runs of `certify` in this module fork from one warm process: each starts one else."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in _warm_variables.items():
            patch.setenv(name, value)
        yield
