"""Blocks against torch.nn.Transformer*, over a padded batch with masks, and against the equations of their papers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import transformer_equations as paper
from tests.equations import agree, scatter, weights_of
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from weft.nn.attention.multihead import AttentionLayout
from weft.nn.transformer.blocks import Block, BlockConfig, Blocks
from weft.tokens import Tokens

WIDTH, HEADS, HIDDEN = 12, 3, 20
LENGTHS, SOURCES = [5, 1, 18, 3], [4, 17, 1, 6]
EXACT = {torch.float32: (1e-5, 1e-4), torch.float64: (1e-11, 1e-10)}  # outputs and gradients


def tokens_of(lengths):
    return Tokens.flat(torch.zeros(sum(lengths), dtype=torch.long), torch.tensor(lengths, dtype=torch.long))


def shape_of(norm="post", activation="relu", width=WIDTH, **rest):
    return BlockConfig(width, HEADS, HIDDEN, activation, norm, **rest)


def drawn(tokens, dtype, width=WIDTH):
    return torch.randn(len(tokens.ids), width, dtype=dtype, requires_grad=True)


def spread(network, seed=0):
    """Draw weights that none can be confused with, near what training has."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, weight in network.named_parameters():
            weight.normal_(mean=float("norm" in name and "weight" in name), std=0.25)


# torch.nn's names, for ours; of ours at the source, the keys and values are a matrix of their own.
FEED = {"feed_forward.fc1": "linear1", "feed_forward.fc2": "linear2"}
ENCODER = {"attention": "self_attn", "attention_residual.norm": "norm1", "feed_forward_residual.norm": "norm2", **FEED}
DECODER = {
    "attention": "self_attn",
    "cross_attention": "multihead_attn",
    "attention_residual.norm": "norm1",
    "cross_attention_residual.norm": "norm2",
    "feed_forward_residual.norm": "norm3",
    **FEED,
}


def filled(theirs, block):
    """Copy the weights of a block into one of torch's layers."""
    own, names, w = (
        dict(theirs.named_parameters()),
        DECODER if block.cross_attention is not None else ENCODER,
        weights_of(block),
    )
    with torch.no_grad():
        for kind in ("weight", "bias"):
            for mine, other in names.items():
                if mine == "cross_attention":
                    joined = torch.cat([w[f"cross_attention.in_proj.{kind}"], w[f"cross_attention.kv_proj.{kind}"]])
                elif mine == "attention":
                    joined = w[f"attention.in_proj.{kind}"]
                else:
                    own[f"{other}.{kind}"].copy_(w[f"{mine}.{kind}"])
                    continue
                own[f"{other}.in_proj_{kind}"].copy_(joined)
                own[f"{other}.out_proj.{kind}"].copy_(w[f"{mine}.out_proj.{kind}"])
    return theirs


def torch_layer(cross, norm, activation, dtype):
    kind = nn.TransformerDecoderLayer if cross else nn.TransformerEncoderLayer
    return kind(WIDTH, HEADS, HIDDEN, 0.0, activation, batch_first=True, norm_first=norm == "pre", dtype=dtype)


def padded(x, tokens):
    """Return flat (N, D) as padded (B, T, D), and the padding mask."""
    return pad_sequence(tokens.split(x), batch_first=True), torch.arange(tokens.longest) >= tokens.lengths[:, None]


def read_by_torch(theirs, cross, x, tokens, memory, source):
    wide, empty = padded(x, tokens)
    if not cross:
        return theirs(wide, src_key_padding_mask=empty)[~empty]
    held, nothing = padded(memory, source)
    ahead = torch.ones(tokens.longest, tokens.longest, dtype=torch.bool).triu(1)
    return theirs(
        wide, held, tgt_mask=ahead, tgt_key_padding_mask=empty, memory_key_padding_mask=nothing, tgt_is_causal=False
    )[~empty]


def compare(run, theirs, cross, dtype):
    """Hold outputs, and gradients by the inputs, against torch's."""
    tokens, source = tokens_of(LENGTHS), tokens_of(SOURCES)
    torch.manual_seed(1)
    x, memory = drawn(tokens, dtype), drawn(source, dtype)
    given = (
        (AttentionLayout.self_attention(tokens), memory, AttentionLayout(tokens, source))
        if cross
        else (AttentionLayout.self_attention(tokens),)
    )
    actual, expected = run(x, *given), read_by_torch(theirs, cross, x, tokens, memory, source)
    near, steep = EXACT[dtype]
    torch.testing.assert_close(actual, expected, rtol=near, atol=near)
    weigh, by = torch.randn_like(expected), [x, memory] if cross else [x]
    pairs = (torch.autograd.grad((side * weigh).sum(), by, retain_graph=True) for side in (actual, expected))
    for one, other in zip(*pairs, strict=True):
        torch.testing.assert_close(one, other, rtol=steep, atol=steep)
    return actual, expected, weigh


def same_gradients(block, theirs, actual, expected, weigh, dtype):
    """Compare the gradients by the weights, laid out as torch's."""
    layer = torch_layer(block.cross_attention is not None, "post", "relu", dtype)
    names, values = zip(*block.named_parameters(), strict=True)
    mine = torch.autograd.grad((actual * weigh).sum(), values, retain_graph=True)
    yours = torch.autograd.grad((expected * weigh).sum(), list(theirs.parameters()), retain_graph=True)
    graded = Block(shape_of(), "x", 0, cross=block.cross_attention is not None).to(dtype)
    graded.load_state_dict(dict(zip(names, mine, strict=True)))
    _, steep = EXACT[dtype]
    for (name, one), other in zip(filled(layer, graded).named_parameters(), yours, strict=True):
        torch.testing.assert_close(one.detach(), other, rtol=steep, atol=steep, msg=lambda told, n=name: f"{n}: {told}")


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("cross", [False, True], ids=["encoder", "decoder"])
def test_a_block_is_torchs_layer(cross, norm, activation, dtype):
    block = Block(shape_of(norm, activation), "x", 0, causal=cross, cross=cross).to(dtype)
    spread(block)
    theirs = filled(torch_layer(cross, norm, activation, dtype), block)
    same_gradients(block, theirs, *compare(block, theirs, cross, dtype), dtype)


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("cross", [False, True], ids=["encoder", "decoder"])
def test_a_stack_is_torchs_stack(cross, norm, dtype):
    blocks = Blocks(shape_of(norm, "gelu"), 3, "x", causal=cross, cross=cross).to(dtype)
    spread(blocks)
    last = nn.LayerNorm(WIDTH, dtype=dtype) if norm == "pre" else None
    layer = torch_layer(cross, norm, "gelu", dtype)
    theirs = nn.TransformerDecoder(layer, 3, last) if cross else nn.TransformerEncoder(layer, 3, last, False)
    for one, block in zip(theirs.layers, blocks.blocks, strict=True):
        filled(one, block)
    if last is not None:
        theirs.norm.load_state_dict(blocks.norm.state_dict())
    actual, expected, weigh = compare(lambda *given: blocks(*given)[-1], theirs, cross, dtype)
    for one, block in zip(theirs.layers, blocks.blocks, strict=True):
        same_gradients(block, one, actual, expected, weigh, dtype)


@pytest.mark.parametrize(
    ("had", "said"), [(("pre", "relu"), ("post", "relu")), (("post", "gelu"), ("post", "relu"))], ids=str
)
def test_another_kind_of_block_is_caught(had, said):
    """The negative control."""
    block = Block(shape_of(*had), "x", 0, causal=True, cross=True)
    spread(block)
    with pytest.raises(AssertionError, match="not close"):
        compare(block, filled(torch_layer(True, *said, torch.float32), block), True, torch.float32)


def test_keys_in_the_place_of_values_are_caught():
    """The negative control of where the weights go."""
    block = Block(shape_of(), "x", 0)
    spread(block)
    theirs = filled(torch_layer(False, "post", "relu", torch.float32), block)
    with torch.no_grad():
        block.attention.in_proj.weight.copy_(block.attention.in_proj.weight.view(3, -1)[[0, 2, 1]].view(-1, WIDTH))
    with pytest.raises(AssertionError, match="not close"):
        compare(block, theirs, False, torch.float32)


# The equations.

kinds = st.tuples(st.sampled_from(["pre", "post"]), st.sampled_from(["relu", "gelu", "silu"]))
pairs_of_lengths = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=4)


@settings(deadline=None, derandomize=True, max_examples=12)
@given(kinds, st.integers(1, 3), pairs_of_lengths, st.integers(0, 9))
def test_a_stack_is_its_equations(kind, layers, lengths, seed):
    blocks = Blocks(shape_of(*kind), layers, "decoder", causal=True, cross=True).double()
    scatter(blocks, seed)
    tokens, source = (tokens_of([pair[side] for pair in lengths]) for side in range(2))
    x, memory = drawn(tokens, torch.float64), drawn(source, torch.float64)
    w, rows = weights_of(blocks), zip(tokens.split(x), source.split(memory), strict=True)
    expected = [paper.stack(w, paper.Kind(HEADS, *kind), "decoder", own, other) for own, other in rows]
    actual = blocks(x, AttentionLayout.self_attention(tokens), memory, AttentionLayout(tokens, source))[-1]
    agree([actual], [torch.cat(expected)], {**dict(blocks.named_parameters()), "x": x, "memory": memory})


def test_a_stack_returns_what_each_block_makes():
    torch.manual_seed(0)
    tokens, blocks = tokens_of(LENGTHS), Blocks(shape_of("pre"), 2, "encoder")
    x, layout = drawn(tokens, torch.float32), AttentionLayout.self_attention(tokens)
    found = blocks(x, layout)
    assert len(found) == 3
    assert found[0] is x
    assert torch.equal(found[1], blocks.blocks[0](x, layout))
    assert torch.equal(found[2], blocks.norm(blocks.blocks[1](found[1], layout)))


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("cross", [False, True], ids=["encoder", "decoder"])
def test_gradients_are_those_of_small_differences(cross, norm):
    block = Block(shape_of(norm, "gelu", width=6), "x", 0, causal=cross, cross=cross).double()
    spread(block)
    tokens, source = tokens_of([3, 1]), tokens_of([1, 2])
    x, memory = drawn(tokens, torch.float64, 6), drawn(source, torch.float64, 6)
    names, values = zip(*block.named_parameters(), strict=True)

    def run(x, memory, *weights):
        across = (memory, AttentionLayout(tokens, source)) if cross else ()
        given = (x, AttentionLayout.self_attention(tokens), *across)
        return torch.func.functional_call(block, dict(zip(names, weights, strict=True)), given)

    assert torch.autograd.gradcheck(run, (x, memory, *values), fast_mode=True)


def test_dropout_is_on_what_a_layer_adds_and_nowhere_else():
    """Section 5.4: on the output of each sub-layer, before it is added; where all is dropped, x goes around."""
    torch.manual_seed(0)
    tokens = tokens_of(LENGTHS)
    x, layout = drawn(tokens, torch.float32), AttentionLayout.self_attention(tokens)
    block = Block(shape_of("pre", dropout=0.999999), "x", 0, causal=True)
    assert torch.equal(block.train()(x, layout), x)
    assert not torch.equal(block.eval()(x, layout), x)


def test_weights_start_as_in_the_authors_code():
    """Matrices are Xavier's uniform, query, key and value each by itself; biases are zero."""
    torch.manual_seed(0)
    block = Block(BlockConfig(120, 4, 200), "x", 0, cross=True)
    for name, value in block.named_parameters():
        if name.endswith("bias"):
            assert not value.any()
        elif "norm" in name:
            assert bool((value == 1).all())
        else:
            fans = sum(value.shape) if name.startswith("feed") else 240
            limit = (6 / fans) ** 0.5
            assert 0.98 * limit < value.abs().max() <= limit
