"""The pytest plugin: options, and nothing else until ``--anydevice-backend`` is given.

It is loaded in every pytest run of everyone who has anydevice installed, so it imports nothing
here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

#: The marks of the suite's checks, for ``--strict-markers``.
MARKERS = (
    "anydevice_needs(capability): the check is for backends that claim it",
    "anydevice_slow: left out by --quick",
    "anydevice_two_devices: the check needs two devices of the type",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the suite's options."""
    group = parser.getgroup("anydevice", "conformance of an anydevice backend")
    group.addoption(
        "--anydevice-backend",
        metavar="TYPE",
        help="check the backend of this device type: "
        "pytest --pyargs anydevice_conformance --anydevice-backend TYPE",
    )
    group.addoption(
        "--anydevice-quick",
        action="store_true",
        help="leave out slow checks (gives no certificate)",
    )
    group.addoption(
        "--anydevice-seed", metavar="N", type=int, default=0, help="of the generated examples (0)"
    )
    group.addoption(
        "--anydevice-examples", metavar="N", type=int, help="how many of each law (it knows itself)"
    )
    group.addoption("--anydevice-output", metavar="DIR", help="write the report here")
    group.addoption(
        "--anydevice-known-failures", metavar="FILE", help="JSON file of failures that are known"
    )
    group.addoption("--anydevice-journal", metavar="FILE", help="append each result here, as JSON")
    group.addoption(
        "--anydevice-assume",
        metavar="CAPABILITIES",
        help="check these capabilities (comma-separated) though they are not claimed",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Name the marks; start the session plugin, if a backend was named.

    Raises:
        pytest.UsageError: the suite was asked for, and no backend was named.
    """
    for line in MARKERS:
        config.addinivalue_line("markers", line)
    if config.getoption("--anydevice-backend"):
        from anydevice_conformance import session

        session.configure(config)
    elif config.option.pyargs and any(a.startswith(__package__) for a in config.args):
        import pytest

        raise pytest.UsageError("name the backend to check: --anydevice-backend TYPE")
