"""Attention over flat tokens against the equations of its paper, one sequence at a time."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests import transformer_equations as paper
from tests.equations import agree, scatter, weights_of
from torch.nn import functional as F
from torch.nn.attention import varlen

from weft.errors import ConfigError
from weft.nn.attention import multihead
from weft.nn.attention.capture import capture
from weft.nn.attention.multihead import AttentionLayout, MultiHeadAttention, fused
from weft.tokens import Tokens

quick = settings(deadline=None, derandomize=True, max_examples=12)
HEADS, SIZE = 2, 4
RAGGED = [(5, 7), (1, 33), (20, 1), (16, 16), (17, 40), (3, 6)]  # lengths of queries and keys: several groups
own_lengths = st.lists(st.integers(0, 40), min_size=1, max_size=6)
lengths_of_pairs = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=6)


def tokens_of(lengths):
    return Tokens.flat(torch.zeros(sum(lengths), dtype=torch.long), torch.tensor(lengths, dtype=torch.long))


def layout_of(pairs):
    return AttentionLayout(
        tokens_of([query_length for query_length, _ in pairs]), tokens_of([key_length for _, key_length in pairs])
    )


def random_qkv(layout, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    sizes = len(layout.queries.ids), len(layout.keys.ids), len(layout.keys.ids)
    return [torch.randn(size, HEADS, SIZE, dtype=dtype, requires_grad=True) for size in sizes]


def explicit(q, k, v, layout, causal):
    """Equation 1, sequence by sequence and head by head; without keys, zero."""
    found = []
    for Q, K, V in zip(layout.queries.split(q), layout.keys.split(k), layout.keys.split(v), strict=True):
        heads = [paper.attention(Q[:, n], K[:, n], V[:, n], causal)[0] for n in range(q.shape[1])]
        found.append(torch.stack(heads, 1) if len(K) else torch.zeros_like(Q))
    return torch.cat(found)


def check_fused(layout, causal):
    q, k, v = random_qkv(layout)
    actual, expected = (way(q, k, v, layout, causal) for way in (fused, explicit))
    agree(
        [actual, q, k, v], [expected, q, k, v], {"q": q, "k": k, "v": v}
    )  # with q, there is a gradient where all is empty


# PyTorch's kernel, in float64 with gradients.


@quick
@given(lengths_of_pairs)
@example(RAGGED)
@example([(3, 4), (0, 5)])  # one group that fills q, but not k
@example([(2, 0), (2, 0)])
@example([(2, 3), (4, 0), (1, 5)])
@example([(0, 0)])
def test_any_sequences_look_at_any_others(pairs):
    check_fused(layout_of(pairs), causal=False)


@quick
@given(own_lengths, st.booleans())
@example([4, 4, 4], True)  # as one dense batch
@example([3, 50, 4, 0, 17, 49], True)
def test_any_sequences_look_at_themselves(lengths, causal):
    check_fused(AttentionLayout.self_attention(tokens_of(lengths)), causal)


def test_no_sequences_are_answered_by_nothing():
    assert fused(*random_qkv(layout_of([])), layout_of([]), False).shape == (0, HEADS, SIZE)


def broken(monkeypatch, change):
    """Let the library's kernel be called with other arguments."""
    kernel = F.scaled_dot_product_attention

    def wrong(q, k, v, attn_mask=None, is_causal=False):
        return kernel(q, k, v, **{"attn_mask": attn_mask, "is_causal": is_causal, **change})

    monkeypatch.setattr(F, "scaled_dot_product_attention", wrong)


@pytest.mark.parametrize(
    ("change", "causal"),
    [({"attn_mask": None}, False), ({"is_causal": False}, True), ({"scale": 1.0}, False), ({"scale": 1.0}, True)],
)
def test_a_wrong_mask_or_scale_is_caught(change, causal, monkeypatch):
    """The negative control."""
    broken(monkeypatch, change)
    with pytest.raises(AssertionError, match="not close"):
        check_fused(AttentionLayout.self_attention(tokens_of([5, 9, 3])), causal)


def test_answers_in_another_order_are_caught():
    """The negative control: each group's answers stay where the groups put them."""
    layout = layout_of(RAGGED)
    groups, order = layout.groups
    vars(layout)["groups"] = groups, order.sort().values
    with pytest.raises(AssertionError, match="not close"):
        check_fused(layout, causal=False)


@quick
@given(lengths_of_pairs)
def test_sequences_of_like_length_go_together(pairs):
    layout = layout_of(pairs)
    groups, _ = layout.groups
    bands = {(-(-query_length // 16), -(-key_length // 16)) for query_length, key_length in pairs if query_length}
    assert len(groups) == len(bands)
    for flat, name in (
        (layout.queries, "queries"),
        (layout.keys, "keys"),
    ):  # what fills up is less than a band a sequence
        assert sum(len(getattr(group, name)) for group in groups) < len(flat.ids) + 16 * len(pairs)


def test_sequences_of_one_length_are_neither_moved_nor_masked():
    (group,), order = layout_of([(5, 7)] * 3).groups
    assert order is None
    assert group.mask is None
    assert group.rows == 3


# A sequence alone, and in any batch.
#
# Exact where the shapes are the same: the kernel treats each row of a group by itself, so neither the number of rows
# nor what the others say has an effect. Among longer sequences a group is filled up, and the library then cuts the keys
# into blocks at other places and adds in another order: that is rounding, below 1e-6.


def alone(q, k, v, layout, causal):
    parts = zip(layout.queries.split(q), layout.keys.split(k), layout.keys.split(v), strict=True)
    return torch.cat([fused(Q, K, V, layout_of([(len(Q), len(K))]), causal) for Q, K, V in parts])


@quick
@given(lengths_of_pairs)
@example(RAGGED)
def test_alone_as_in_any_batch(pairs):
    layout = layout_of(pairs)
    q, k, v = random_qkv(layout, torch.float32)
    torch.testing.assert_close(fused(q, k, v, layout, False), alone(q, k, v, layout, False), rtol=0, atol=1e-6)


@quick
@given(own_lengths)
def test_alone_as_in_any_batch_where_it_is_causal(lengths):
    layout = AttentionLayout.self_attention(tokens_of(lengths))
    q, k, v = random_qkv(layout, torch.float32)
    torch.testing.assert_close(fused(q, k, v, layout, True), alone(q, k, v, layout, True), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("query_length", "key_length", "causal"), [(5, 7, False), (33, 1, False), (17, 17, True), (90, 90, True)]
)
def test_alone_as_in_a_batch_of_one_length(query_length, key_length, causal):
    layout = layout_of([(query_length, key_length)] * 4)
    q, k, v = random_qkv(layout, torch.float32)
    torch.testing.assert_close(fused(q, k, v, layout, causal), alone(q, k, v, layout, causal), rtol=0, atol=1e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_what_others_say_changes_nothing_exactly(causal):
    layout = AttentionLayout.self_attention(tokens_of([4, 9, 20, 12]))
    q, k, v = random_qkv(layout, torch.float32)
    before, others = fused(q, k, v, layout, causal), torch.ones(45, 1, 1)
    others[4:13] = 0
    after = fused(q + others, k + others, v - others, layout, causal)
    assert torch.equal(before[4:13], after[4:13])
    assert not torch.equal(before, after)


def test_an_unmasked_batch_is_not_as_alone(monkeypatch):
    """The negative control: what fills up a group is seen."""
    layout = layout_of(RAGGED)
    q, k, v = random_qkv(layout, torch.float32)
    expected = alone(q, k, v, layout, False)
    broken(monkeypatch, {"attn_mask": None})
    assert not torch.allclose(fused(q, k, v, layout, False), expected, rtol=0, atol=1e-2)


def test_future_tokens_change_nothing_exactly():
    layout = AttentionLayout.self_attention(tokens_of([6, 19, 8, 0, 17]))
    q, k, v = random_qkv(layout, torch.float32)
    before, place = fused(q, k, v, layout, True), torch.cat([torch.arange(length) for length in layout.queries.lengths])
    for cut in range(1, 19):
        ahead = (place >= cut).float()[:, None, None]
        after = fused(q + ahead, k - ahead, v + ahead, layout, True)
        assert torch.equal(after[place < cut], before[place < cut])
        assert not torch.equal(after, before)


# Projections and heads.


def attending(place="encoder", off=(), heads=3, dtype=torch.float64, seed=0, width=3 * SIZE):
    attention = MultiHeadAttention(width, heads, place, layer=1, causal=place == "decoder", off=off).to(dtype)
    scatter(attention, seed)
    return attention


def inputs(place, pairs=RAGGED, dtype=torch.float64, width=3 * SIZE):
    layout = (
        layout_of(pairs)
        if place == "cross"
        else AttentionLayout.self_attention(tokens_of([query_length for query_length, _ in pairs]))
    )
    torch.manual_seed(1)
    x, memory = (torch.randn(len(one.ids), width, dtype=dtype) for one in (layout.queries, layout.keys))
    return x.requires_grad_(), layout, memory.requires_grad_() if place == "cross" else None


def reference(attention, x, layout, memory, off=()):
    """Return each sequence's output and attention weights by the paper's equations."""
    w, place, looks = weights_of(attention), (attention.place, attention.layer), []
    kind, found = paper.Kind(attention.heads, off={place: off}), []
    pairs = zip(layout.queries.split(x), layout.keys.split(x if memory is None else memory), strict=True)
    for own, other in pairs:
        found.append(paper.multi_head(w, kind, place, own, other))
        looks.append(kind.seen[place])
    return torch.cat(found), looks


@pytest.mark.parametrize("heads", [1, 3, 6])
@pytest.mark.parametrize("place", ["encoder", "decoder", "cross"])
def test_many_heads_are_the_papers(place, heads):
    attention, (x, layout, memory) = attending(place, heads=heads), inputs(place)
    by = {**dict(attention.named_parameters()), "x": x} | ({} if memory is None else {"memory": memory})
    agree([attention(x, layout, memory)], [reference(attention, x, layout, memory)[0]], by)


@pytest.mark.parametrize("place", ["encoder", "decoder", "cross"])
def test_gradients_are_those_of_small_differences(place):
    attention, (x, layout, memory) = attending(place, width=6), inputs(place, [(3, 2), (1, 4)], width=6)
    names, values = zip(*attention.named_parameters(), strict=True)

    def run(x, *rest):
        given = None if memory is None else rest[0]
        weights = dict(zip(names, rest[-len(names) :], strict=True))
        return torch.func.functional_call(attention, weights, (x, layout, given))

    assert torch.autograd.gradcheck(run, (x, *([] if memory is None else [memory]), *values))


@pytest.mark.parametrize("off", [[0], [2], [0, 1], [1, 2]])
@pytest.mark.parametrize("place", ["encoder", "decoder", "cross"])
def test_a_head_that_is_off_is_as_one_that_answers_nought(place, off):
    whole, attention, (x, layout, memory) = attending(place), attending(place, off, seed=9), inputs(place)
    cut = {name: whole.cut(name, value) for name, value in whole.named_parameters()}
    assert all(torch.equal(value, cut[name]) for name, value in whole.named_parameters())  # it has all of its heads
    attention.load_state_dict({name: attention.cut(name, value) for name, value in whole.named_parameters()})
    expected = reference(whole, x, layout, memory, off)[0]
    actual = attention(x, layout, memory)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)
    mine = torch.autograd.grad(actual.square().sum(), list(attention.parameters()))
    yours = torch.autograd.grad(expected.square().sum(), list(whole.parameters()))
    for (name, _), one, other in zip(whole.named_parameters(), mine, yours, strict=True):
        torch.testing.assert_close(one, attention.cut(name, other), rtol=1e-9, atol=1e-11)
    assert not torch.allclose(
        actual, reference(whole, x, layout, memory, [(off[0] + 1) % 3])[0]
    )  # the negative control


def test_heads_that_are_off_take_no_room_and_what_is_cut_stays_as_it_is():
    attention = attending("cross", off=[1])
    assert {name: tuple(value.shape) for name, value in attention.named_parameters()} == {
        "in_proj.weight": (8, 12),
        "in_proj.bias": (8,),
        "kv_proj.weight": (16, 12),
        "kv_proj.bias": (16,),
        "out_proj.weight": (12, 8),
        "out_proj.bias": (12,),
    }
    assert all(attention.cut(name, value) is value for name, value in attention.named_parameters())


# Looking on.


def captured(attention, x, layout, memory=None, **chosen):
    with capture(**chosen) as maps:
        found = attention(x, layout, memory)
    return found, maps


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("place", ["encoder", "decoder", "cross"])
def test_looking_on_shows_the_weights_and_changes_nothing(place, dtype):
    attention, (x, layout, memory) = attending(place, dtype=dtype), inputs(place, dtype=dtype)
    found, maps = captured(attention, x, layout, memory)
    assert torch.equal(found, attention(x, layout, memory))
    (weights,) = maps.weights[place, 1]
    assert weights.shape == (len(RAGGED), 3, layout.queries.longest, layout.keys.longest)
    assert not weights.requires_grad
    q, kv = attention.project(x, memory)
    for row, (Q, K) in enumerate(zip(layout.queries.split(q), layout.keys.split(kv[:, 0]), strict=True)):
        for head in range(3):
            _, expected = paper.attention(Q[:, head], K[:, head], K[:, head], place == "decoder")
            actual = weights[row, head, : len(Q), : len(K)]
            torch.testing.assert_close(actual, expected.float(), rtol=0, atol=1e-6)
            torch.testing.assert_close(actual.sum(-1), torch.ones(len(Q)), rtol=0, atol=1e-6)
            assert place != "decoder" or not actual.triu(1).any()
        assert not weights[row, :, len(Q) :].any()
        assert not weights[row, :, :, len(K) :].any()


def test_weights_are_those_of_the_whole_way_from_the_input():
    attention, (x, layout, memory) = attending("cross"), inputs("cross")
    (weights,), looks = (
        captured(attention, x, layout, memory)[1].weights["cross", 1],
        reference(attention, x, layout, memory)[1],
    )
    for actual, expected in zip(weights, looks, strict=True):
        torch.testing.assert_close(
            actual[:, : expected.shape[1], : expected.shape[2]], expected.float(), rtol=0, atol=1e-6
        )


def test_weights_of_another_scale_are_caught(monkeypatch):
    """The negative control: the temperature of the weights is not that of the kernel."""
    real = multihead.weights_of
    monkeypatch.setattr(multihead, "weights_of", lambda q, k, causal: real(q * 1.01, k, causal))
    with pytest.raises(AssertionError, match="not close"):
        test_weights_are_those_of_the_whole_way_from_the_input()


@pytest.fixture
def computed(monkeypatch):
    """Count the heads whose weights are computed, call by call."""
    real, calls = multihead.weights_of, []

    def spy(q, k, causal):
        calls.append(q.shape[1])
        return real(q, k, causal)

    monkeypatch.setattr(multihead, "weights_of", spy)
    return calls


def test_only_what_is_looked_at_is_computed(computed):
    attention, (x, layout, _) = attending(), inputs("encoder")
    attention(x, layout)
    captured(attention, x, layout, layers=[0, 2])  # this one is layer 1
    assert computed == []
    captured(attention, x, layout, layers=[1], heads=[2])
    assert computed == [1] * len(RAGGED)


def test_chosen_heads_come_in_the_order_asked_for():
    attention, (x, layout, _) = attending(), inputs("encoder")
    (whole,) = captured(attention, x, layout)[1].weights["encoder", 1]
    maps = captured(attention, x, layout, heads=[2, 0])[1]
    torch.testing.assert_close(maps.weights["encoder", 1][0], whole[:, [2, 0]], rtol=0, atol=1e-6)
    assert maps.numbers == {("encoder", 1): [2, 0]}


def test_heads_keep_their_numbers_where_others_are_off():
    whole, attention, (x, layout, _) = attending(), attending(off=[1]), inputs("encoder")
    attention.load_state_dict({name: attention.cut(name, value) for name, value in whole.named_parameters()})
    (all_heads,), maps = captured(whole, x, layout)[1].weights["encoder", 1], captured(attention, x, layout)[1]
    assert maps.numbers == {("encoder", 1): [0, 2]}
    torch.testing.assert_close(maps.weights["encoder", 1][0], all_heads[:, [0, 2]], rtol=0, atol=1e-6)
    for asked, shown in (([2, 1], [2]), ([1], [])):  # a pruned head has no weights
        maps = captured(attention, x, layout, heads=asked)[1]
        assert maps.numbers == {("encoder", 1): shown}
        torch.testing.assert_close(maps.weights["encoder", 1][0], all_heads[:, shown], rtol=0, atol=1e-6)


def test_a_head_that_no_layer_has_is_refused():
    attention, (x, layout, _) = attending(off=[1]), inputs("encoder")
    with pytest.raises(ConfigError, match=r"heads: the model has 3 heads, counted from 0, but \[0, 3\] are asked for"):
        captured(attention, x, layout, heads=[3, 0])


def test_empty_sequences_are_looked_at_too():
    attention, (x, layout, memory) = attending("cross"), inputs("cross", [(2, 0), (0, 3), (1, 2)])
    found, maps = captured(attention, x, layout, memory)
    (weights,) = maps.weights["cross", 1]
    assert not weights[:2].any()
    torch.testing.assert_close(weights[2, :, 0].sum(-1), torch.ones(3), rtol=0, atol=1e-6)
    assert torch.equal(found[:2], attention.out_proj.bias.expand(2, -1))  # no keys: only the bias is left


@pytest.mark.parametrize("size", [4, 8, 20])
def test_heads_of_any_size_go_through_a_kernel_of_multiples_of_8(monkeypatch, size):
    seen = []

    def kernel(q, k, v, *_, window_size):
        seen.append(q.shape[-1])
        return explicit(q, k, v, layout, window_size == (-1, 0))

    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    layout = layout_of([(5, 5), (3, 3)])
    torch.manual_seed(0)
    q, k, v = (torch.randn(8, HEADS, size, dtype=torch.float64, requires_grad=True) for _ in range(3))
    for causal in (False, True):
        actual, expected = (way(q, k, v, layout, causal) for way in (multihead._varlen_attention, explicit))
        agree([actual], [expected], {"q": q, "k": k, "v": v})
    assert all(one % 8 == 0 for one in seen)
