"""Puts a mutant in place as a process starts, where this folder is on the path."""

import os
import sys
from pathlib import Path

if os.environ.get("ANYDEVICE_TEST_MUTANT"):
    sys.path.append(str(Path(__file__).parents[2]))
    from mutants import install

    install(os.environ["ANYDEVICE_TEST_MUTANT"])
