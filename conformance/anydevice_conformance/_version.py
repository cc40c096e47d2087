"""Versions: of the suite's code, and of the specification that it checks."""

SUITE_VERSION = "1.0.0"
SPEC_VERSION = "1.1"
