"""The communication hook for Lightning, Accelerate and Hugging Face's Trainer, a module each.

Each module imports its framework. `import adasum` imports none of them.
"""

from __future__ import annotations

__all__: list[str] = []
