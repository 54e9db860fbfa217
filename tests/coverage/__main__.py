"""`python -m tests.coverage`: which primitives of the installed JAX the instruction set has rules for."""

import sys

from tests.coverage.report import main

if __name__ == "__main__":
    sys.exit(main())
