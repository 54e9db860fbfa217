"""`python -m hapsynth` is the command `hapsynth`."""

import sys

from hapsynth.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
