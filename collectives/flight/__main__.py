"""The command; see `collectives.tools.flight.analysis`."""

import sys

from collectives.tools.flight.analysis import main

if __name__ == "__main__":
    sys.exit(main())
