"""Horovod's elastic training is missing here: importing this raises an error with the replacement.

`from adasum import elastic` hides the AttributeError of `adasum.elastic` and imports this module.
"""

from __future__ import annotations

from adasum.absent import ABSENT

raise ImportError(f"there is no adasum.elastic: {ABSENT['elastic']}", name=__name__)
