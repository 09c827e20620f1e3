"""Just-in-time compilation with numba, cached on disk."""

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def jit_compile(function: Callable[..., Any], fastmath: bool = False) -> Any:
    """Return a function compiled by numba, cached on disk; without a writable cache folder, for this process only."""
    from numba import njit

    try:
        return njit(nogil=True, cache=True, error_model="numpy", fastmath=fastmath)(function)
    except RuntimeError:  # there is no cache folder
        return njit(nogil=True, error_model="numpy", fastmath=fastmath)(function)
