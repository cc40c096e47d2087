"""Fixtures for all tests, and how hypothesis draws: a plugin that `conftest.py` loads."""

from __future__ import annotations

import os
import signal
import warnings

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from anydevice.registry import get_backend
from anydevice_conformance.simulator import install
from anydevice_conformance.simulator.testing import simulator  # noqa: F401 - a fixture

_FUZZ_EXAMPLES = os.environ.get("ANYDEVICE_FUZZ_EXAMPLES")
_IS_FIXED = _FUZZ_EXAMPLES is None or "ANYDEVICE_FUZZ_SEED" in os.environ

# The same examples in each run and each worker: a test never fails by chance. hypothesis would also
# draw constants of the modules that a worker happens to have loaded, unless it takes none for ours.
assert callable(providers.is_local_module_file)
providers.is_local_module_file = lambda _path: False
settings.register_profile("fixed", derandomize=_IS_FIXED, database=None, deadline=None)
settings.load_profile("fixed")

# How much the readers of files are fuzzed: a few seconds always, minutes with `make fuzz`, which
# sets the number. Other examples are drawn then each time, except in CI, which sets a seed.
settings.register_profile(
    "readers",
    max_examples=int(_FUZZ_EXAMPLES or 200),
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Small tensors on few cores: torch's own threads would only get in each other's way."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _simulator_before_any_backward():
    """Torch's autograd engine knows only the devices that are there at its first backward."""
    install()


@pytest.fixture
def sim(simulator):  # noqa: F811 - the fixture above
    """Two simulated accelerators of 64 MiB, whose streams run only when waited for."""
    simulator.configure(devices=2, memory="64MiB", mode="lazy")
    yield simulator
    # What monkeypatch sets on an object stays there when it is undone, and hides what other tests
    # set on the class.
    assert not vars(get_backend("sim")), "patch SimulatorBackend itself"


class _Stop(BaseException):
    """What a handler of a signal raises."""


@pytest.fixture
def interrupted():
    """Run a function with a real signal ``after`` some seconds, whose handler raises `_Stop`."""

    def handle(*_):
        raise _Stop

    def run(function, after):
        try:
            signal.setitimer(signal.ITIMER_REAL, after)
            function()
            signal.setitimer(signal.ITIMER_REAL, 0)
        except _Stop as error:
            return error
        return None

    # Python itself swallows what is raised while the callback of a weak reference runs.
    warnings.filterwarnings("ignore", category=pytest.PytestUnraisableExceptionWarning)
    before = signal.signal(signal.SIGALRM, handle)
    yield run
    signal.signal(signal.SIGALRM, before)
    # Where the signal comes as `torch.no_grad` ends, gradients stay off for the tests that follow.
    torch.set_grad_enabled(True)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory):
    """A folder with a small random Llama, as its users save it: sharded safetensors."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=None,
    )
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).eval().save_pretrained(folder, max_shard_size="100KB")
    return folder
