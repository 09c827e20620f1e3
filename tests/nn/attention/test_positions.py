"""Positions are counted within each sequence; their vectors are the paper's equation, or learned and then limited."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import transformer_equations as paper

from weft.errors import DataError
from weft.nn.attention.positions import Learned, Sinusoidal, check_position, positions_of
from weft.tokens import Tokens

quick = settings(deadline=None, derandomize=True, max_examples=20)


def tokens_of(lengths):
    return Tokens.flat(torch.zeros(sum(lengths), dtype=torch.long), torch.tensor(lengths, dtype=torch.long))


@quick
@given(st.lists(st.integers(0, 9), max_size=7))
def test_tokens_are_counted_from_0_in_each_sequence(lengths):
    assert positions_of(tokens_of(lengths)).tolist() == [place for length in lengths for place in range(length)]


@pytest.mark.parametrize("lengths", [[0], [0, 0, 3, 0], [3, 0, 0, 2], [2, 0]])
def test_empty_sequences_take_no_position(lengths):
    assert positions_of(tokens_of(lengths)).tolist() == [place for length in lengths for place in range(length)]


def equals_the_equation(vectors, count, width):
    # An angle is rounded to 24 bits, so that it is off by up to 6e-8 of itself, and it grows with the position.
    off = (vectors.double() - paper.positions(count, width)).abs().amax(1)
    assert bool((off <= 1e-6 + 2e-7 * torch.arange(count)).all()), off.max()


@pytest.mark.parametrize("width", [1, 2, 3, 7, 16, 33, 512])
def test_sinusoids_are_the_papers(width):
    vectors = Sinusoidal(width)(torch.arange(2000))
    assert vectors.shape == (2000, width)
    assert vectors.dtype == torch.float32
    equals_the_equation(vectors, 2000, width)


def test_single_values_by_hand():
    first, second = Sinusoidal(4)(torch.tensor([0, 3]))
    assert first.tolist() == [0, 1, 0, 1]
    expected = [math.sin(3), math.cos(3), math.sin(3 / 100), math.cos(3 / 100)]
    torch.testing.assert_close(second, torch.tensor(expected), rtol=0, atol=1e-7)


def test_the_equation_notices_halves_in_place_of_turns():
    """The negative control: sines first and then cosines, as other code has them."""
    vectors = Sinusoidal(8)(torch.arange(20))
    with pytest.raises(AssertionError):
        equals_the_equation(vectors[:, [0, 2, 4, 6, 1, 3, 5, 7]], 20, 8)


@pytest.mark.parametrize("width", [1, 2, 7, 16, 512])
def test_halves_are_the_same_waves_in_another_order(width):
    """As Marian has them, and as exact: the weights that read them are another's."""
    vectors = Sinusoidal(width, halves=True)(torch.arange(2000))
    angle = [[place / 10000 ** (2 * (i // 2) / width) for i in range(width)] for place in range(2000)]
    expected = torch.tensor([[*map(math.sin, row[::2]), *map(math.cos, row[1::2])] for row in angle])
    assert vectors.dtype == torch.float32
    torch.testing.assert_close(vectors, expected, rtol=0, atol=1e-7)
    assert torch.equal(Sinusoidal(width, halves=True).vectors(2000, vectors.device), vectors)
    if width > 2:
        assert not torch.equal(Sinusoidal(width).vectors(2000, vectors.device), vectors)


def test_sinusoids_have_nothing_to_learn_and_no_limit():
    made = Sinusoidal(6)
    assert not list(made.parameters())
    assert not made.state_dict()
    made.check(tokens_of([100_000]))


def test_a_vector_depends_on_its_position_alone():
    made, mixed = Sinusoidal(10), torch.tensor([5, 0, 5, 900, 1] * 300)
    expected = torch.cat([made(one[None]) for one in mixed])
    for longest in (None, 901, 1000):  # how long a text may be at most changes nothing
        torch.testing.assert_close(made(mixed, longest), expected, rtol=0, atol=1e-6)


def test_learned_positions_are_rows_of_their_table():
    torch.manual_seed(0)
    made = Learned(5, 3)
    for longest in (None, 5):
        found = made(positions_of(tokens_of([2, 0, 5])), longest)
        assert torch.equal(found, made.table.weight[[0, 1, 0, 1, 2, 3, 4]])


def test_learned_positions_refuse_a_longer_text():
    made = Learned(5, 3)
    for lengths in ([5, 1], [0], []):
        made.check(tokens_of(lengths))
    said = (
        r"a sequence has 6 tokens, but the model has learned 5 positions; shorten it \(data.max_length, max_length\), "
        "or use a model with more positions"
    )
    with pytest.raises(DataError, match=said):
        made.check(tokens_of([2, 6, 5]))
    check_position(5, 5)
    with pytest.raises(DataError, match=said):
        check_position(6, 5)
