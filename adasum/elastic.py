"""Horovod's elastic training, which is not here: importing this raises what to use instead.

`from adasum import elastic` hides the AttributeError that `adasum.elastic` is, and looks for this.
"""

from __future__ import annotations

from adasum.absent import ABSENT

raise ImportError(f"there is no adasum.elastic: {ABSENT['elastic']}", name=__name__)
