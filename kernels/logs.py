"""The environment variable ADASUM_LOG: show the packages' log messages without other setup."""

from __future__ import annotations

import logging
import os

_VARIABLE = "ADASUM_LOG"
_LEVELS = ("debug", "info", "warning", "error")


class _Handler(logging.StreamHandler):
    """Writes to standard error, unless the program has handlers of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


def show(package: str) -> None:
    """Show a package's log messages from the level in the environment variable on, if it is set.

    Args:
        package: "kernels", "collectives" or "adasum": the parent of its modules' loggers.
    """
    level = os.environ.get(_VARIABLE, "").lower()
    logger = logging.getLogger(package)
    if not level or any(isinstance(each, _Handler) for each in logger.handlers):
        return
    handler = _Handler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger.addHandler(handler)
    if level in _LEVELS:
        logger.setLevel(level.upper())
    elif package == "kernels":
        # Only for one of the three packages, so that the warning appears once.
        logger.warning("%s must be one of %s, got %r", _VARIABLE, ", ".join(_LEVELS), level)
