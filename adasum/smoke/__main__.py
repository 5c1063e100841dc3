"""`python -m adasum.smoke`."""

from adasum.smoke.supervisor import main

if __name__ == "__main__":
    raise SystemExit(main())
