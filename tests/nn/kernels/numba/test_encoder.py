"""A stack in compiled loops says what it says operation by operation."""

from copy import deepcopy

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from weft.nn.attention.capture import capture
from weft.nn.attention.multihead import AttentionLayout
from weft.nn.kernels import dispatch
from weft.nn.kernels.numba import encoder
from weft.nn.kernels.numba.attention import MAX_LENGTH
from weft.nn.layers.activations import ACTIVATIONS
from weft.nn.layers.packed_linear import frozen_weights
from weft.nn.layers.quantization import lower
from weft.nn.transformer.blocks import BlockConfig, Blocks
from weft.tokens import Tokens

pytestmark = pytest.mark.isa
quick = settings(deadline=None, derandomize=True, max_examples=15)
WIDTH = 24


def made(norm="post", causal=False, **shape):
    torch.manual_seed(0)
    blocks = Blocks(BlockConfig(WIDTH, 3, 40, norm=norm, **shape), 2, "self", causal).eval()
    for parameter in blocks.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return blocks


def asked(lengths, seed=0):
    torch.manual_seed(seed)
    tokens = Tokens.flat(torch.zeros(sum(lengths), dtype=torch.long), torch.tensor(lengths))
    return torch.randn(sum(lengths), WIDTH), AttentionLayout.self_attention(tokens)


def all_three(blocks, x, layout):
    """Return what the loops give, what a function for each layer gives, and what operations give."""
    assert len(x) < dispatch.MIN_ENCODER_TOKENS
    with torch.inference_mode():
        looped, expected = encoder.encode(blocks, x, layout.queries), blocks(x, layout)
        with frozen_weights(), dispatch.lasting_inference():  # weights are packed
            return looped, encoder.encode(blocks, x, layout.queries), expected


def check(blocks, lengths):
    looped, compiled, expected = all_three(blocks, *asked(lengths))
    assert len(looped) == len(compiled) == len(expected) == 3
    for one, two, other in zip(looped, compiled, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(two, other, rtol=1e-5, atol=1e-5)


@pytest.fixture
def compiled_layers(monkeypatch):
    """Count the layers that are one function."""
    seen, encode = [], encoder.encode_layer
    monkeypatch.setattr(encoder, "encode_layer", lambda *given: seen.append(1) or encode(*given))
    return seen


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_layer_is_one_function_where_weights_are_packed(precision, compiled_layers):
    blocks, (x, layout) = made(), asked([5, 9])
    lower(blocks, precision)
    with torch.inference_mode():
        encoder.encode(blocks, x, layout.queries)
        assert len(compiled_layers) == (0 if precision == "fp32" else 2)
        with frozen_weights(), dispatch.lasting_inference():
            encoder.encode(blocks, x, layout.queries)
            assert len(compiled_layers) == (2 if precision == "fp32" else 4)
            encoder.encode(blocks, *_inputs([MAX_LENGTH + 1]))
            assert len(compiled_layers) == (2 if precision == "fp32" else 4)


def _inputs(lengths):
    x, layout = asked(lengths)
    return x, layout.queries


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_a_compiled_layer_is_its_operations(norm, precision, monkeypatch):
    blocks, inputs = made(norm, off={"1": [0]}), _inputs([5, 0, 9, 30])
    lower(blocks, precision)
    with torch.inference_mode(), frozen_weights(), dispatch.lasting_inference():
        compiled = encoder.encode(blocks, *inputs)
        monkeypatch.setattr(encoder, "packed_products", lambda *_: None)
        for one, other in zip(compiled, encoder.encode(blocks, *inputs), strict=True):
            torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("norm", ["pre", "post"])
@quick
@given(st.lists(st.integers(0, 30), min_size=1, max_size=6).filter(any))
@example([MAX_LENGTH + 1, 3, 0, 1])  # too long for the loops of attention
def test_every_layer_is_the_same(norm, causal, lengths):
    check(made(norm, causal), lengths)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_is_the_same(activation):
    check(made(activation=activation), [5, 9])


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_layers_are_chosen(norm):
    blocks, (x, layout) = made(norm), asked([5, 9])
    with torch.inference_mode():
        whole = encoder.encode(blocks, x, layout.queries)
        for layers in ([-1], [0], [1, -1], [-2, 0, -2]):
            for found in (encoder.encode(blocks, x, layout.queries, layers), blocks(x, layout, layers=layers)):
                assert len(found) == len(layers)
                for one, layer in zip(found, layers, strict=True):
                    torch.testing.assert_close(one, whole[layer], rtol=1e-5, atol=1e-5)


def test_heads_that_are_off_and_the_norms_own_number_count():
    check(made(off={"0": [1], "1": [0, 2]}, eps=0.1), [5, 9])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_parts_and_threads_change_nothing(threads, monkeypatch):
    monkeypatch.setattr(encoder, "_PART_TOKENS", 8)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(made(), [5, 1, 0, 30, 2, 2, 0, 7, 8, 9, 11])
        check(made("pre"), [40])
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_cuts_leave_nothing_out(monkeypatch):
    monkeypatch.setattr(encoder, "_PART_TOKENS", 8)
    tokens = asked([5, 1, 0, 30, 2, 2, 0, 7, 8, 9, 11])[1].queries
    cuts = encoder._part_bounds(tokens)
    assert cuts[0] == 0
    assert cuts[-1] == len(tokens)
    assert cuts == sorted(set(cuts))
    assert len(cuts) > 4
    assert encoder._part_bounds(asked([40])[1].queries) == [0, 1]


def test_int8_is_near_and_a_sequence_alone_is_itself():
    blocks, lengths = made(), [7, 3, 11]
    x, layout = asked(lengths)
    with torch.inference_mode():
        exact = blocks(x, layout)[-1]
        lower(blocks, "int8")
        together = blocks(x, layout)[-1]
        alone = [blocks(part, asked([len(part)])[1])[-1] for part in x.split(lengths)]
    assert 1e-5 < (together - exact).norm() / exact.norm() < 0.05
    torch.testing.assert_close(torch.cat(alone), together)


@pytest.fixture
def loops(monkeypatch):
    """Count the calls of the loops; they are for any size."""
    seen, read = [], encoder.encode
    monkeypatch.setattr(dispatch, "MIN_ENCODER_TOKENS", 1)
    monkeypatch.setattr(encoder, "encode", lambda *given: seen.append(1) or read(*given))
    return seen


def test_they_answer_much_and_do_not_learn(loops):
    blocks, (x, layout) = made(dropout=0.1), asked([5, 9])
    with torch.no_grad():
        blocks(x, layout)
        assert loops.pop()
        blocks(x, layout, keep=[])
        deepcopy(blocks).double()(x.double(), layout)
        with capture() as maps:
            blocks(x, layout)
        assert maps
        with torch.autocast("cpu", torch.bfloat16):
            blocks(x, layout)
        blocks.train()(x, layout)
    blocks.eval()(x, layout)
    assert not loops


def test_little_is_not_worth_it(monkeypatch, loops):
    blocks, (x, layout) = made(), asked([5, 9])
    monkeypatch.setattr(dispatch, "MIN_ENCODER_TOKENS", 15)
    with torch.inference_mode():
        blocks(x, layout)
        assert not loops
        lower(blocks, "int8")
        blocks(x, layout)
    assert loops
