"""The command; see `collectives.tools.flight.__main__`."""

import sys

from collectives.tools.flight.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
