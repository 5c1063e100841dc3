"""File descriptors: whether the limit leaves room for those that a transport needs."""

from __future__ import annotations

import logging
import os

# Kept free for files that the program itself opens: data, checkpoints, libraries.
SPARE = 64
# Assumed where the system does not say what is open: torch's libraries and the standard streams.
_USUALLY_OPEN = 64
_FOLDERS = ("/proc/self/fd", "/dev/fd")
_logger = logging.getLogger(__name__)


def shortage(count: int) -> str:
    """Raise the soft limit as far as needed and allowed, for `count` more descriptors.

    Return "" if there is room; else the number needed and the limit, for an error's text.
    """
    try:
        import resource
    except ImportError:
        # Only Unix has this limit.
        return ""
    opened = _opened()
    need = opened + count + SPARE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or need <= soft:
        return ""
    limit = need if hard == resource.RLIM_INFINITY else min(need, hard)
    refused = ""
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        _logger.info("raised the limit of file descriptors from %d to %d", soft, limit)
    except (OSError, ValueError) as error:
        limit, refused = soft, f", which the system does not let it raise ({error})"
    if need <= limit:
        return ""
    return (
        f"{need} file descriptors are needed ({opened} are open, {count} more, {SPARE} to spare), "
        f"and the limit is {limit}{refused}: raise the hard limit (ulimit -Hn, systemd's "
        "LimitNOFILE, Docker's --ulimit nofile)"
    )


def _opened() -> int:
    """Return how many descriptors this process has open."""
    for folder in _FOLDERS:
        try:
            return len(os.listdir(folder))
        except OSError:
            continue
    return _USUALLY_OPEN
