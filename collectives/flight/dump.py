"""The former place of this name."""

from collectives.tools.flight.writer import file_name as _file_name  # noqa: F401
