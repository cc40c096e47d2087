"""Tests of one group share what is expensive to make, so they must run in one worker.

pytest-xdist tells the group to its scheduler by a suffix of the test's id. With a pytest that
ignores the suffix, each worker makes everything, and nothing says so.
"""

from __future__ import annotations

import pytest


@pytest.mark.xdist_group("habits")
def test_the_scheduler_learns_the_group(request):
    if not hasattr(request.config, "workerinput"):
        pytest.skip("one process: nothing is scheduled")
    assert request.node.nodeid.endswith("@habits")
