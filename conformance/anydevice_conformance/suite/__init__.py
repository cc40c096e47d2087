"""The checks: one module a group of the specification."""
