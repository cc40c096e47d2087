"""A plugin whose vendor's library is missing."""

import a_driver_library_that_is_not_there  # noqa: F401
