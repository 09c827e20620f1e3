"""Bidirectional is torch.nn.LSTM(bidirectional=True) on packed sequences: outputs, last states and gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

from weft.nn.grid import Grid
from weft.nn.recurrent import Bidirectional, lstm_pointwise
from weft.tokens import Tokens

quick = settings(deadline=None, derandomize=True, max_examples=25)

INPUTS, WIDTH = 5, 6
KINDS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


def pairs(ours: Bidirectional, theirs: nn.LSTM) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Each parameter beside the one that it must equal."""
    found = []
    for depth, (ahead, back) in enumerate(zip(ours.forwards, ours.backwards, strict=True)):
        for kind in KINDS:
            found.append((getattr(ahead, f"{kind}_l0"), getattr(theirs, f"{kind}_l{depth}")))
            found.append((getattr(back, f"{kind}_l0"), getattr(theirs, f"{kind}_l{depth}_reverse")))
    return found


def both(layers: int, dtype: torch.dtype) -> tuple[Bidirectional, nn.LSTM]:
    ours = Bidirectional(INPUTS, WIDTH, layers).to(dtype)
    theirs = nn.LSTM(INPUTS, WIDTH // 2, layers, bidirectional=True).to(dtype)
    with torch.no_grad():
        for mine, yours in pairs(ours, theirs):
            yours.copy_(mine)
    return ours, theirs


def packed(theirs: nn.LSTM, tokens: Tokens, flat: Tensor) -> tuple[Tensor, Tensor]:
    """Run torch's own way for ragged batches, and lay its results out as ours: (N, D) and (L, B, D)."""
    padded = pad_sequence(tokens.split(flat))
    out, (hidden, _) = theirs(pack_padded_sequence(padded, tokens.lengths, enforce_sorted=False))
    rows = pad_packed_sequence(out)[0].unbind(1)
    ends = hidden.view(theirs.num_layers, 2, len(tokens), WIDTH // 2)
    return torch.cat([row[:length] for row, length in zip(rows, tokens.lengths, strict=True)]), torch.cat(
        [ends[:, 0], ends[:, 1]], -1
    )


def check_parity(lengths: list[int], layers: int, dtype: torch.dtype, tolerance: float) -> None:
    tokens = Tokens.flat(torch.zeros(sum(lengths), dtype=torch.long), torch.tensor(lengths))
    ours, theirs = both(layers, dtype)
    flat = torch.randn(sum(lengths), INPUTS, dtype=dtype)
    mine, yours = flat.clone().requires_grad_(), flat.clone().requires_grad_()
    got, must = ours(mine, Grid(tokens)), packed(theirs, tokens, yours)
    weigh = [torch.randn_like(part) for part in must]
    for result in (got, must):
        sum((part * weight).sum() for part, weight in zip(result, weigh, strict=True)).backward()
    compared = [*zip(got, must, strict=True), (mine.grad, yours.grad)]
    compared += [(one.grad, other.grad) for one, other in pairs(ours, theirs)]
    for one, other in compared:
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_it_is_the_packed_bidirectional_lstm(layers, dtype, tolerance):
    torch.manual_seed(layers)
    check_parity([4, 1, 7, 3, 7], layers, dtype, tolerance)


@quick
@given(st.lists(st.integers(1, 8), min_size=1, max_size=6), st.integers(1, 2), st.integers(0, 99))
def test_it_is_so_for_any_lengths(lengths, layers, seed):
    torch.manual_seed(seed)
    check_parity(lengths, layers, torch.float64, 1e-12)


def test_a_walk_the_wrong_way_is_caught(monkeypatch):
    """The negative control: the backward layer reads forwards."""
    lay = Grid.lay
    monkeypatch.setattr(Grid, "lay", lambda self, flat, reverse=False: lay(self, flat))
    with pytest.raises(AssertionError):
        check_parity([4, 1, 7], 1, torch.float64, 1e-12)


def test_a_sequence_with_no_token_ends_in_zeros_and_changes_no_other():
    torch.manual_seed(0)
    ours, flat = Bidirectional(INPUTS, WIDTH, 2).double(), torch.randn(5, INPUTS, dtype=torch.float64)
    ids = torch.zeros(5, dtype=torch.long)
    out, ends = ours(flat, Grid(Tokens.flat(ids, torch.tensor([2, 3]))))
    gaps, gap_ends = ours(flat, Grid(Tokens.flat(ids, torch.tensor([0, 2, 0, 3, 0]))))
    torch.testing.assert_close(gaps, out)
    torch.testing.assert_close(gap_ends[:, [1, 3]], ends)
    assert not gap_ends[:, [0, 2, 4]].any()


def test_dropout_stands_between_layers_and_only_in_training():
    torch.manual_seed(0)
    grid, flat = Grid(Tokens.pack([[0, 0, 0]])), torch.randn(3, INPUTS)
    shallow, deep = Bidirectional(INPUTS, WIDTH, 1, dropout=0.5), Bidirectional(INPUTS, WIDTH, 2, dropout=0.5)
    assert torch.equal(shallow(flat, grid)[0], shallow(flat, grid)[0])
    assert not torch.equal(deep(flat, grid)[0], deep(flat, grid)[0])
    deep.eval()
    assert torch.equal(deep(flat, grid)[0], deep(flat, grid)[0])


def test_pointwise_is_the_lstm_cell_from_its_sums_on():
    torch.manual_seed(0)
    cell = nn.LSTMCell(INPUTS, WIDTH, dtype=torch.float64)
    x, h, c = (torch.randn(4, size, dtype=torch.float64) for size in (INPUTS, WIDTH, WIDTH))
    gates = x @ cell.weight_ih.T + cell.bias_ih + h @ cell.weight_hh.T + cell.bias_hh
    for got, must in zip(lstm_pointwise(gates, c), cell(x, (h, c)), strict=True):
        torch.testing.assert_close(got, must, rtol=1e-12, atol=1e-12)
