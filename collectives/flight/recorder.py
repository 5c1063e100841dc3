"""The former module of these names, kept for imports."""

from collectives.recorder import of_process as of_process
from collectives.tools.flight.writer import folder as folder
