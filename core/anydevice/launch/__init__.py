"""Launch a script in several processes, by ``torch.distributed.run``.

This package translates and starts; it distributes nothing itself. It does not import ``training``,
nor is it imported by it: the two meet in the environment variables that a launch sets. Its files
are imported one by one (``anydevice.launch.plan``): a misspelled option must not wait for torch.
"""

from anydevice.launch.settings import Setting

__all__ = ["Setting"]
