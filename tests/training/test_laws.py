"""What holds on several processes; the checks are in `laws_ranks.py`."""

from __future__ import annotations

import pytest
from launching import run_ranks
from training import laws_ranks

# With the other tests whose ranks train: what these import is imported once, not in each worker.
pytestmark = pytest.mark.xdist_group("training")

#: What a first `torch.compile` imports.
COMPILING = (
    "pytest",
    "torch._dynamo.backends.cudagraphs",
    "torch._dynamo.backends.distributed",
    "torch._dynamo.backends.inductor",
    "torch._dynamo.repro.after_dynamo",
    "torch._dynamo.testing",
    "torch._functorch.aot_autograd",
    "torch._higher_order_ops.passes.inline_invoke_subgraph",
    "torch._inductor.output_code",
    "torch.distributed.tensor.experimental",
    "torch.export._trace",
    "torch.fx.experimental.validator",
)


@pytest.mark.parametrize("size", [2, 4])
def test_all_laws(size):
    for failed in run_ranks(laws_ranks.all_checks, size, timeout=250, imports=COMPILING):
        assert not failed, "\n".join(f"{check}: {text}" for check, text in failed.items())


def test_a_save_that_not_all_ranks_make_is_an_error_that_names_their_lines(tmp_path):
    for message in run_ranks(laws_ranks.a_call_that_not_all_make, 2, "cpu", str(tmp_path / "c")):
        assert "save_state" in message
        assert "wait_for_everyone" in message
        assert "--save_state_alone" in message
        assert message.count("laws_ranks.py:") == 2, message


@pytest.mark.parametrize("size", [1, 2])
def test_dispatched_models_train_in_one_process(size, tmp_path):
    assert all(run_ranks(laws_ranks.dispatched_models, size, "sim", str(tmp_path / "offload")))
