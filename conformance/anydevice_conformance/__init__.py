"""The conformance suite of anydevice: what "works with anydevice" means, and a simulator."""
