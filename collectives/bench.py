"""`python -m collectives.bench`: the command is in `collectives/tools/bench.py`."""

from collectives.tools.bench import main

if __name__ == "__main__":
    raise SystemExit(main())
