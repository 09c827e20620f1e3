"""Functions are compiled with or without a folder for the cache."""

import numba
import pytest

from weft.jit import jit_compile


def triangular(n):
    total = 0
    for number in range(n + 1):
        total += number
    return total


@pytest.mark.parametrize("fastmath", [False, True])
def test_a_compiled_function_returns_what_python_does(fastmath):
    assert jit_compile(triangular, fastmath=fastmath)(10) == triangular(10) == 55


def test_without_a_cache_folder_it_is_compiled_for_this_process(monkeypatch):
    real, options_given = numba.njit, []

    def njit(**options):
        options_given.append(options)
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return real(**options)

    monkeypatch.setattr(numba, "njit", njit)
    assert jit_compile(triangular)(4) == 10
    assert [options.get("cache", False) for options in options_given] == [True, False]
