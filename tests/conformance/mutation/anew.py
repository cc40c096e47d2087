"""A child of the checks that asks what a new process is like: of the warm one, with the mutant."""

from __future__ import annotations

import os

from mutants import install
from mutants.gallery import MUTANT_VARIABLE

from anydevice_conformance import children

__all__: list[str] = []

if __name__ == "__main__":
    if os.environ.get(MUTANT_VARIABLE):
        install(os.environ[MUTANT_VARIABLE])
    children.main()
