"""``python -m autosac``."""

import sys

from autosac.cli.parser import main

if __name__ == "__main__":
    sys.exit(main())
