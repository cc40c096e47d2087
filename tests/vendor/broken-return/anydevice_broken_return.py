"""A plugin that returns the name of its device instead of a backend."""

from anydevice.backend import hookimpl


@hookimpl
def anydevice_backends():
    """Return what no one can use."""
    return "foo"
