"""A test that makes an accelerator in this process begins and ends as if there were none."""

import pytest

from anydevice.state import AcceleratorState, GradientState


@pytest.fixture(autouse=True)
def _fresh():
    reset()
    yield
    reset()


def reset():
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
