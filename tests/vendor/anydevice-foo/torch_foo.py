"""What a vendor has already: the package that makes torch know its device.

Here the simulator plays it, so that tensors really move.
"""

from anydevice_conformance import simulator

simulator.install(name="foo")
simulator.configure(devices=2, memory="64MiB", mode="lazy")
