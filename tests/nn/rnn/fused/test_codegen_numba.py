"""Compiled stages are cached on disk and reused by the next process."""

import numpy as np
import pytest
import torch

from weft.nn.rnn.fused import codegen_numba
from weft.nn.rnn.fused.codegen_numba import StageShape


def add(input_proj, product, state, vectors):
    return (input_proj[0] + state[0],)


def subtract(input_proj, product, state, vectors):
    return (input_proj[0] - state[0],)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(codegen_numba, "CACHE_DIR", tmp_path / "kept")
    return tmp_path / "kept"


def step(pointwise, dtype=torch.float64):
    """Return the stage's value for 5 and 3, compiled as in a new process."""
    shape = StageShape(input_proj=1, product=0, state=1, vectors=0, values=1)
    forward = codegen_numba.numba_step_kernels.__wrapped__(pointwise, shape, (True,), dtype).forward
    input_proj, state, out = (torch.full((2, 1, 1), value, dtype=dtype) for value in (5, 3, 0))
    forward(1, 1, {"input_proj": input_proj, "state0": state, "out0": out})(0)
    return out[1].item()


def compiled(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*.nbc")}


def test_what_is_compiled_is_found_again_and_another_stage_is_not_taken_for_it(folder):
    assert step(add) == 8
    before = compiled(folder)
    assert len(before) == 1
    assert step(add) == 8
    assert compiled(folder) == before, "it was compiled again"
    assert step(subtract) == 2
    assert step(add, torch.float32) == 8
    assert len(compiled(folder)) == 3
    assert compiled(folder).items() > before.items()
    assert not [path for path in folder.iterdir() if path.suffix != ".kernel" and path.is_file()]


def test_a_stage_of_another_version_is_compiled_anew(folder, tmp_path, monkeypatch):
    step(add)
    (tmp_path / "kernels.py").write_text("# another")
    monkeypatch.setattr(codegen_numba, "__file__", str(tmp_path / "kernels.py"))
    assert step(add) == 8
    assert len(compiled(folder)) == 2


def test_where_nothing_may_be_written_it_is_compiled_each_time(folder):
    folder.write_text("in the way")
    assert step(add) == 8
    assert folder.read_text() == "in the way"


def changed(x):
    return x


def first(values):
    return changed(values[0])


@pytest.mark.parametrize(("dtype", "factor"), [(np.float32, 2), (np.float64, 3)])
def test_a_function_with_a_compiled_one_is_found_again_for_each_type(dtype, factor):
    for _ in range(2):  # as in two processes
        scaled = codegen_numba.compiler()(lambda x: factor * x)
        made = codegen_numba.cached_with(first, {"changed": scaled})
        assert made(np.ones(1, dtype)) == factor
    assert sum(made.stats.cache_hits.values()) == 1
