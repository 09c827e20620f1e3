"""Compact storage: what is read back is as near as the format allows, and what is damaged is refused."""

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from weft.checkpoint.contents import read_weights
from weft.checkpoint.storage import SCALE, compress, expand, leave_out
from weft.errors import CheckpointError, ConfigError


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "matrix": torch.randn(5, 7, generator=generator),
        "kernel": torch.randn(3, 4, 2, generator=generator),
        "bias": torch.randn(7, generator=generator),
        "counts": torch.arange(4),
    }


@given(st.integers(0, 1000), st.floats(1e-20, 1e20))
def test_int8_rows_are_within_half_a_scale(seed: int, size: float) -> None:
    matrix = weights(seed)["matrix"] * size
    stored = compress({"matrix": matrix}, "int8")
    error = (expand(stored, "here")["matrix"] - matrix).abs()
    assert stored["matrix"].dtype == torch.int8
    assert (error <= stored["matrix" + SCALE][:, None] * (0.5 + 1e-5)).all()


def test_a_coarser_format_is_caught_by_that_bound() -> None:
    matrix = weights()["matrix"]
    scale = compress({"matrix": matrix}, "int8")["matrix" + SCALE][:, None]
    coarse = (matrix / (2 * scale)).round() * 2 * scale
    assert not ((coarse - matrix).abs() <= scale * (0.5 + 1e-5)).all()


@pytest.mark.parametrize("storage", ["fp32", "bf16", "int8"])
def test_names_and_shapes_come_back(storage: str) -> None:
    before = weights()
    after = expand(compress(before, storage), "here")  # type: ignore[arg-type]
    assert {name: value.shape for name, value in after.items()} == {name: value.shape for name, value in before.items()}
    assert torch.equal(after["counts"], before["counts"])
    assert (storage == "fp32") == all(torch.equal(after[name], before[name]) for name in before)


def test_a_row_of_zeros_stays_zero() -> None:
    zeros = {"matrix": torch.zeros(2, 3)}
    assert torch.equal(expand(compress(zeros, "int8"), "here")["matrix"], zeros["matrix"])


def test_scales_that_do_not_fit_are_refused() -> None:
    stored = compress(weights(), "int8")
    with pytest.raises(CheckpointError, match="file: matrix: must be int8 with a float32 scale for each row"):
        expand({**stored, "matrix" + SCALE: torch.ones(3)}, "file")
    with pytest.raises(CheckpointError, match="the weights that it scales are missing"):
        expand({"matrix" + SCALE: torch.ones(3)}, "file")


def test_equal_weights_are_left_out_and_named() -> None:
    base = weights()
    changed = {**base, "bias": base["bias"] + 1}
    own, metadata = leave_out(changed, base, "encoder-en")
    assert list(own) == ["bias"]
    assert metadata == {"base": "encoder-en", "inherited": "matrix kernel counts"}
    with pytest.raises(ConfigError, match="base: not one weight equals one of encoder-en"):
        leave_out({"bias": changed["bias"]}, base, "encoder-en")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"base": "../encoder-en", "inherited": "x"}, "'../encoder-en' does not ship with weft"),
        ({"base": "encoder-en", "inherited": "no.such"}, "no.such: encoder-en, which it is to come from, has no such"),
    ],
)
def test_a_base_must_ship_and_have_the_weights(tmp_path: Path, metadata: dict[str, str], message: str) -> None:
    save_file(weights(), tmp_path / "model.safetensors", metadata)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        read_weights(tmp_path)
