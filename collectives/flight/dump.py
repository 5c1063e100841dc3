"""The former module of this name, kept for imports."""

from collectives.tools.flight.writer import file_name as _file_name  # noqa: F401
