"""The communication hook in Lightning, Accelerate and Hugging Face's Trainer, a module for each.

Each module imports its framework. `import adasum` imports none of them.
"""

from __future__ import annotations

__all__: list[str] = []
