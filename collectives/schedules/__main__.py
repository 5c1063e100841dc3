"""`python -m collectives.schedules`: the command is in `collectives/tools/commands.py`."""

from collectives.tools.commands import schedules

if __name__ == "__main__":
    schedules()
