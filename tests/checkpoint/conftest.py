"""How much the readers of files are fuzzed: a few seconds always, minutes with `make fuzz`."""

import os

from hypothesis import HealthCheck, settings

_EXAMPLES = os.environ.get("ANYDEVICE_FUZZ_EXAMPLES")

# `make fuzz` sets the number; other examples are drawn then each time, and a failure prints how to
# repeat it. Without it they are few and always the same.
settings.register_profile(
    "readers",
    max_examples=int(_EXAMPLES or 200),
    derandomize=_EXAMPLES is None,
    print_blob=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
