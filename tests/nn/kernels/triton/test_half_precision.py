"""Kernels for training in half precision on CUDA, against what they stand for in float64."""

import math

import pytest
import torch
from torch.nn import functional as F

from weft.data.batching.static_shape import StaticShape
from weft.models.transformer import Transformer, TransformerConfig
from weft.nn.attention.multihead import AttentionLayout, fused
from weft.nn.kernels import dispatch
from weft.nn.kernels.block_schedule import BlockSchedule
from weft.nn.kernels.self_test import try_kernels
from weft.nn.layers.losses import cross_entropy_sum, read_out_sum
from weft.nn.transformer.output_projection import OutputProjection
from weft.tasks.batch import Batch
from weft.tasks.translate import TranslateHead
from weft.tokens import Tokens

pytestmark = [
    pytest.mark.skipif(not (torch.cuda.is_available() and dispatch.has_triton()), reason="needs CUDA and Triton"),
    # Autograd's own thread calls cuBLAS first: PyTorch 2.11 warns, and sets the context itself.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),
]
HALF = 4e-3  # of a norm: about what rounding to bfloat16 at the beginning and at the end costs
BACK = 6e-3  # and where weights, and what comes back to scores, are rounded in between


@pytest.fixture(autouse=True)
def kernels_enabled():
    dispatch.trust(True)
    yield
    dispatch.trust(False)


def test_the_kernels_pass_their_trial():
    assert try_kernels(torch.device("cuda")) == ""
    assert dispatch.use_kernels(torch.zeros(1, device="cuda", dtype=torch.bfloat16))


def apart(actual, expected):
    return float((actual.detach().double() - expected.detach()).norm() / expected.detach().norm().clamp(min=1e-9))


def starts_of(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device="cuda")


def drawn(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, device="cuda").to(dtype).requires_grad_()


def exactly(*tensors):
    return [None if one is None else one.detach().double().requires_grad_() for one in tensors]


def explicit(qkv, kv, shift, query_lengths, key_lengths, causal):
    """Equation 1, sequence by sequence; without keys, zero."""
    shift = shift.view(3, *qkv.shape[2:])
    q = qkv[:, 0] + shift[0]
    k, v = ((qkv[:, 1:] if kv is None else kv) + shift[1:]).unbind(1)
    found = []
    for Q, K, V in zip(q.split(query_lengths), k.split(key_lengths), v.split(key_lengths), strict=True):
        scores = torch.einsum("thd,shd->hts", Q, K) / math.sqrt(Q.shape[-1])
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores[0]).triu(1).bool(), -math.inf)
        found.append(torch.einsum("hts,shd->thd", scores.softmax(-1), V) if len(K) else torch.zeros_like(Q))
    return torch.cat(found)


LOOKS = {
    "short": ([3, 0, 70, 64, 17, 128, 65, 1, 120], None),
    "long": ([200, 0, 60, 129, 256], None),
    "across": ([3, 0, 7, 100, 40], [4, 6, 0, 70, 128]),
    "across, long": ([200, 0, 60, 129, 3], [150, 3, 256, 0, 2]),
}


@pytest.mark.parametrize(("heads", "size"), [(8, 64), (3, 20)])
@pytest.mark.parametrize(("name", "causal"), [(name, False) for name in LOOKS] + [("short", True), ("long", True)])
def test_short_sequences_attend_by_the_equation(name, causal, heads, size):
    from weft.nn.kernels.triton.short_attention import short_attention

    torch.manual_seed(0)
    query_lengths, key_lengths = LOOKS[name][0], LOOKS[name][1] or LOOKS[name][0]
    qkv = drawn(sum(query_lengths), 1 if LOOKS[name][1] else 3, heads, size)
    kv = drawn(sum(key_lengths), 2, heads, size) if LOOKS[name][1] else None
    shift, back = drawn(3 * heads * size, dtype=torch.float32), drawn(sum(query_lengths), heads, size).detach()
    longest = max(*query_lengths, *key_lengths)
    actual = short_attention(qkv, kv, shift, starts_of(query_lengths), starts_of(key_lengths), longest, causal)[0]
    read = [one for one in (qkv, kv, shift) if one is not None]
    exact = exactly(qkv, kv, shift)
    expected = explicit(*exact, query_lengths, key_lengths, causal)
    wanted = torch.autograd.grad(expected, [one for one in exact if one is not None], back.double())
    grads = torch.autograd.grad(actual, read, back)
    assert apart(actual, expected) < HALF
    assert max(apart(*pair) for pair in zip(grads, wanted, strict=True)) < BACK
    moved = 2 * exact[2]
    wrong = (
        explicit(*exact[:2], moved, query_lengths, key_lengths, causal)
        if kv is not None
        else explicit(*exact, query_lengths, key_lengths, not causal)
    )
    assert apart(actual, wrong) > 10 * HALF  # the negative control


@pytest.mark.parametrize("size", [64, 16])
@pytest.mark.parametrize("lengths", [[3, 0, 70, 64, 17, 128, 65, 1, 120], [9, 64, 0, 1], [200, 0, 60, 512, 129, 256]])
@pytest.mark.parametrize("causal", [False, True])
def test_sequences_look_at_themselves_by_the_equation(causal, lengths, size):
    from weft.nn.kernels.triton.varlen_self_attention import varlen_self_attention

    torch.manual_seed(0)
    qkv, shift = drawn(sum(lengths), 3, 5, size), drawn(15 * size, dtype=torch.float32)
    starts, back = starts_of(lengths), drawn(sum(lengths), 5, size).detach()
    actual = varlen_self_attention(qkv, shift, starts, *BlockSchedule.of(starts, len(qkv)), max(lengths), causal)[0]
    exact = exactly(qkv, shift)
    expected = explicit(exact[0], None, exact[1], lengths, lengths, causal)
    grads = zip(
        torch.autograd.grad(actual, [qkv, shift], back),
        torch.autograd.grad(expected, exact, back.double()),
        strict=True,
    )
    assert apart(actual, expected) < HALF
    assert max(apart(*pair) for pair in grads) < BACK
    wrong = explicit(exact[0], None, exact[1], lengths, lengths, not causal)
    assert apart(actual, wrong) > 10 * HALF  # the negative control


def kept(seed, count, share):
    """The hash of `weft.nn.kernels.triton.add_norm`, in 64 bits."""
    x = torch.arange(count, device="cuda") ^ (seed.item() & 0xFFFFFFFF)
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return ((x ^ (x >> 16)) >> 8) >= share * 2**24


@pytest.mark.parametrize(
    ("rows", "width", "share"), [(777, 512, 0.1), (100, 1000, 0.3), (33, 64, 0.0), (3000, 128, 0.5)]
)
def test_dropout_sum_and_norm_are_those_of_torch(rows, width, share):
    from weft.nn.kernels.triton.add_norm import add_norm

    torch.manual_seed(0)
    x, z, (shift, weight, bias) = drawn(rows, width), drawn(rows, width), drawn(3, width, dtype=torch.float32).unbind()
    seed = torch.randint(2**62, (1,), device="cuda") if share else None
    actual, back = add_norm(x, z, shift, weight, bias, seed, share, 1e-5)[0], drawn(rows, width).detach()
    exact = exactly(x, z, shift, weight, bias)
    stays = kept(seed, rows * width, share).view(rows, width) if share else torch.ones_like(z)
    assert abs(stays.float().mean() - (1 - share)) < 0.02
    expected = F.layer_norm(exact[0] + (exact[1] + exact[2]) * stays / (1 - share), (width,), exact[3], exact[4])
    grads = torch.autograd.grad(actual, (x, z, shift, weight, bias), back)
    wanted = torch.autograd.grad(expected, exact, back.double())
    assert all(apart(*pair) < HALF for pair in zip((actual, *grads), (expected, *wanted), strict=True))
    assert apart(actual, F.layer_norm(exact[0] + exact[1], (width,), exact[3], exact[4])) > 10 * HALF


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width", "share"), [(777, 768, 0.1), (100, 1000, 0.0), (3000, 128, 0.5)])
def test_dropout_sum_and_the_norm_that_comes_next_are_those_of_torch(rows, width, share, dtype):
    from weft.nn.kernels.triton.residual_norm import residual_norm

    torch.manual_seed(0)
    x, z = drawn(rows, width, dtype=dtype), drawn(rows, width)
    shift, weight, bias = drawn(3, width, dtype=torch.float32).unbind()
    seed = torch.randint(2**62, (1,), device="cuda") if share else None
    actual = residual_norm(x, z, shift, weight, bias, seed, share, 1e-5)[:2]
    backs = drawn(rows, width, dtype=dtype).detach(), drawn(rows, width).detach()
    exact = exactly(x, z, shift, weight, bias)
    stays = kept(seed, rows * width, share).view(rows, width) if share else torch.ones_like(z)
    total = exact[0] + (exact[1] + exact[2]) * stays / (1 - share)
    expected = total, F.layer_norm(total, (width,), exact[3], exact[4])
    grads = torch.autograd.grad(actual, (x, z, shift, weight, bias), backs)
    wanted = torch.autograd.grad(expected, exact, [one.double() for one in backs])
    assert max(apart(*pair) for pair in zip((*actual, *grads), (*expected, *wanted), strict=True)) < HALF
    assert apart(actual[0], exact[0] + exact[1]) > 10 * HALF  # the negative control


@pytest.mark.parametrize("vocab", [37, 32000])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_loss_is_torchs_and_leaves_out_what_is_unread(vocab, smoothing, dtype):
    torch.manual_seed(0)
    logits, targets = drawn(50, vocab, dtype=dtype), torch.randint(vocab, (50,), device="cuda")
    targets[7] = -100
    actual, (exact,) = cross_entropy_sum(logits, targets, smoothing), exactly(logits)
    expected = F.cross_entropy(exact, targets, reduction="sum", label_smoothing=smoothing)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=0)
    (grad,), (wanted,) = torch.autograd.grad(0.3 * actual, logits), torch.autograd.grad(0.3 * expected, exact)
    assert apart(grad, wanted) < HALF
    assert not grad[7].any()
    assert apart(actual, F.cross_entropy(exact, targets.clamp(min=0), reduction="sum")) > 1e-3  # the negative control


def test_the_inner_layer_is_a_product_and_what_is_above_nought():
    from weft.nn.kernels.triton.linear_activation import linear_relu

    torch.manual_seed(0)
    x, weight, bias = drawn(999, 64), drawn(100, 64), drawn(100, dtype=torch.float32)
    actual, exact, back = linear_relu(x, weight, bias), exactly(x, weight, bias), drawn(999, 100).detach()
    expected = F.relu(F.linear(*exact))
    grads = torch.autograd.grad(actual, (x, weight, bias), back)
    wanted = torch.autograd.grad(expected, exact, back.double())
    # Where rounding changes the sign of a number, a gradient passes that should not.
    assert all(apart(*pair) < 4 * HALF for pair in zip((actual, *grads), (expected, *wanted), strict=True))
    assert apart(actual, F.linear(*exact)) > 10 * HALF


@pytest.mark.parametrize(("exactness", "plain"), [(True, "none"), (False, "tanh")])
def test_the_inner_layer_of_bert_and_gpt_is_a_product_and_gelu(exactness, plain):
    from weft.nn.kernels.triton.linear_activation import linear_gelu

    torch.manual_seed(0)
    x, weight, bias = drawn(999, 64), drawn(100, 64), drawn(100, dtype=torch.float32)
    actual, exact, back = linear_gelu(x, weight, bias, exactness)[0], exactly(x, weight, bias), drawn(999, 100).detach()
    expected = F.gelu(F.linear(*exact), approximate=plain)
    grads = torch.autograd.grad(actual, (x, weight, bias), back)
    wanted = torch.autograd.grad(expected, exact, back.double())
    assert max(apart(*pair) for pair in zip((actual, *grads), (expected, *wanted), strict=True)) < BACK
    assert apart(actual, F.linear(*exact)) > 10 * HALF


def test_an_odd_vocabulary_is_read_out_as_an_even_one():
    torch.manual_seed(0)
    output, x, targets = OutputProjection(64, 131).cuda(), drawn(70, 64), torch.randint(131, (70,), device="cuda")
    exact = exactly(x, output.weight)
    scores = F.linear(*exact)
    expected = F.cross_entropy(scores, targets, reduction="sum", label_smoothing=0.1)
    with torch.autocast("cuda", torch.bfloat16):
        logits, loss = output(x), read_out_sum(output, x, targets, 0.1)
    assert apart(logits, scores) < HALF
    assert apart(loss, expected) < HALF
    wanted = torch.autograd.grad(expected, exact, retain_graph=True)
    grads = torch.autograd.grad(loss, (x, output.weight))
    assert max(apart(*pair) for pair in zip(grads, wanted, strict=True)) < BACK
    (back,) = torch.autograd.grad(expected, scores, retain_graph=True)
    through = torch.autograd.grad(logits, (x, output.weight), back.to(logits.dtype))
    assert max(apart(*pair) for pair in zip(through, wanted, strict=True)) < BACK
    (wrong, _) = torch.autograd.grad(F.cross_entropy(scores, targets.flip(0), reduction="sum"), exact)
    assert apart(grads[0], wrong) > 10 * HALF  # the negative control


@pytest.mark.parametrize("rows", [1, 7, 64, 200, 300])
def test_an_odd_vocabulary_is_read_out_for_a_step(rows):
    torch.manual_seed(0)
    output, x = OutputProjection(96, 1003).cuda().bfloat16(), drawn(rows, 96)
    with torch.no_grad():
        actual = output(x)
    assert actual.shape == (rows, 1003)
    assert apart(actual, F.linear(*exactly(x, output.weight))) < HALF


@pytest.mark.parametrize("causal", [True, False])
def test_sequences_of_one_length_are_a_dense_batch(causal):
    torch.manual_seed(0)
    lengths, made = [300] * 3, drawn(900, 3, 2, 64)
    tokens = Tokens.pack([[0] * one for one in lengths]).to("cuda")
    layout, back = AttentionLayout.self_attention(tokens), drawn(900, 2, 64).detach()
    assert layout.equal_lengths
    assert not AttentionLayout.self_attention(Tokens.pack([[0] * 300, [0] * 299])).equal_lengths
    actual, (exact,) = fused(*made.unbind(1), layout, causal), exactly(made)
    expected = explicit(exact, None, exact.new_zeros(3 * 2 * 64), lengths, lengths, causal)
    (grad,), (wanted,) = torch.autograd.grad(actual, made, back), torch.autograd.grad(expected, exact, back.double())
    assert apart(actual, expected) < HALF
    assert apart(grad, wanted) < BACK
    assert apart(actual, explicit(exact, None, exact.new_zeros(384), lengths, lengths, not causal)) > 10 * HALF


def learnt(head, batch, kernels=True):
    """The loss of a batch and its gradient, with the kernels or without any."""
    dispatch.trust(kernels)
    head.zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        loss = head(batch)[0]["tokens"]
    loss.backward()
    return loss, torch.cat([one.grad.flatten() for one in head.parameters()])


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_a_model_learns_with_them_what_it_learns_without(norm):
    torch.manual_seed(0)
    config = TransformerConfig(name="transformer", width=128, heads=2, layers=2, ffn_width=256, norm=norm, dropout=0)
    head = TranslateHead(Transformer(config, 97), 1, [0], 0.1).cuda().train()
    tokens, source = (
        Tokens.pack([torch.randint(97, (n,)).tolist() for n in sizes]) for sizes in ((9, 70, 5), (8, 66, 7))
    )
    batch = Batch(tokens, torch.randint(97, (84,)), {"tokens": 84}, source).to_static_shape(
        StaticShape((128, 128), (70, 70), 4, 2)
    )
    loss, grad = learnt(head, batch.to("cuda"))
    plain, wanted = learnt(head, batch.to("cuda"), kernels=False)
    assert abs(loss - plain) < 2e-3 * plain
    assert apart(grad, wanted.double()) < 0.03
    assert not torch.equal(grad, wanted)  # it was another kernel
