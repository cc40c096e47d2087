"""DeepSpeed itself, on two processes of the host: `make deepspeed` installs it and runs this."""

from __future__ import annotations

import pytest
from engines import deepspeed_ranks
from launching import run_ranks


@pytest.fixture(scope="module")
def both_ranks(tmp_path_factory):
    """What each rank found, in one launch of two."""
    imports = ("deepspeed", "transformers.models.llama")
    folder = str(tmp_path_factory.mktemp("trainer"))
    return run_ranks(deepspeed_ranks.all_of_it, 2, "cpu", folder, timeout=200, imports=imports)


def test_each_stage_trains_as_the_plain_loop_does(both_ranks):
    assert all(found["loops"] for found in both_ranks)


def test_deepspeed_makes_what_stand_ins_stand_for(both_ranks):
    for rates, kind in (found["stand_ins"] for found in both_ranks):
        assert kind == "DeepSpeedSchedulerWrapper"
        assert rates == sorted(rates)
        assert rates[-1] == 0.5


def test_the_trainer_with_deepspeeds_configuration(both_ranks):
    for losses, resumed, evaluated, schedule in (found["trainer"] for found in both_ranks):
        assert len(losses) == 4
        assert losses[-1] < losses[0]
        assert resumed == pytest.approx(losses[-1], rel=0.02)
        assert evaluated < losses[0]
        assert schedule == "DeepSpeedSchedulerWrapper"
