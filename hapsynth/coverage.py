"""`python -m hapsynth.coverage`: which primitives of the installed JAX the instruction set has rules for."""

import sys

from hapsynth.report.coverage import main

if __name__ == "__main__":
    sys.exit(main())
