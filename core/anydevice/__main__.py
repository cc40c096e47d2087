"""``python -m anydevice``: the command, where its script is not on the path."""

import sys

from anydevice.cli import main

sys.exit(main())
