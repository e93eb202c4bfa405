"""The import of bm25s, which ranks the passages of search and the products of WebShop."""

from __future__ import annotations

import sys
import threading
from typing import Any

from agentfly.errors import require_extra

_JAX = ("jax", "jax.lax")
_IMPORT_LOCK = threading.Lock()


def import_bm25s(feature: str, extra: str) -> Any:
    """Import bm25s while JAX is hidden from it.

    Where JAX is installed, `bm25s.selection` calls `jax.lax.top_k` at import time, and JAX then reserves 75 % of the
    GPU memory. Without JAX, bm25s uses NumPy.
    """
    modules: dict[str, Any] = sys.modules
    with _IMPORT_LOCK, require_extra(feature, extra):
        if "bm25s" not in modules:
            hidden = {name: modules[name] for name in _JAX if name in modules}
            modules.update(dict.fromkeys(_JAX))  # None makes `import jax.lax` raise ModuleNotFoundError
            try:
                import bm25s
            finally:
                for name in _JAX:
                    del modules[name]
                modules.update(hidden)
        import bm25s
    return bm25s
