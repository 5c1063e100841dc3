"""The environment variable ADASUM_LOG: what the packages say, without any set-up of logging."""

from __future__ import annotations

import logging
import os

_VARIABLE = "ADASUM_LOG"
_LEVELS = ("debug", "info", "warning", "error")


class _Handler(logging.StreamHandler):
    """Writes to standard error, unless the program has handlers of its own, which do it then."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


def show(package: str) -> None:
    """Let what a package logs be seen from the level on that the variable names, if it is set.

    Args:
        package: "kernels", "collectives" or "adasum": the logger that those of its modules are
            below.
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
        # Once, not by each of the three.
        logger.warning("%s must be one of %s, got %r", _VARIABLE, ", ".join(_LEVELS), level)
