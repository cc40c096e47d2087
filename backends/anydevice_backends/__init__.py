"""The devices that come with anydevice, each found by entry point as a vendor's package is.

A file here holds only what differs from `anydevice.backend.DeviceBackend`'s defaults, with a link
to the vendor's documentation for each thing that differs.
"""
