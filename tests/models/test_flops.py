"""FLOPs computed from lengths, against torch's FLOP counter; and what is not counted."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from weft.config.schema import Named
from weft.models.base import Model, Role, num_matrix_parameters
from weft.models.cnn import CNN, CNNConfig
from weft.models.rnn import RNN, RNNConfig
from weft.models.seq2seq.model import Seq2Seq, Seq2SeqConfig
from weft.nn.attention.capture import capture
from weft.tokens import Tokens, char_ids

quick = settings(deadline=None, derandomize=True, max_examples=12)
VOCAB, TARGET_VOCAB = 11, 7
ROWS, STEPS, SOURCES = 3, 5, 4  # equally long: a grid then has no empty place, which torch would count
SCORES = ["cosine", "additive", "location", "general", "dot", "scaled-dot"]


def draw(lengths, vocab=VOCAB):
    return Tokens.flat(torch.randint(vocab, (sum(lengths),)), torch.tensor(lengths))


def counted(read):
    """Return torch's FLOPs of a forward pass; float64, no gradients and captured attention prevent fused kernels."""
    with FlopCounterMode(display=False) as counter, capture(), torch.no_grad():
        read()
    return counter.get_total_flops()


# What there is to count.


def test_a_number_counts_once_and_only_where_it_multiplies():
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.tied = nn.Embedding(10, 4), nn.Embedding(6, 4)
            self.first, self.output = nn.Linear(4, 3), nn.Linear(4, 6, bias=False)
            self.output.weight = self.tied.weight
            self.again, self.norm = self.first, nn.LayerNorm(4)
            self.filters = nn.Conv1d(4, 2, 3)

    assert num_matrix_parameters(Parts()) == 4 * 3 + 4 * 6 + 4 * 2 * 3
    assert num_matrix_parameters(nn.Embedding(10, 4)) == 0


class Pair(Model):
    """A user's own model without a `flops` method."""

    Config = Named

    def __init__(self, part):
        super().__init__(Named(name="pair"), VOCAB)
        self.embed, self.output = nn.Embedding(VOCAB, 4), nn.Linear(4, VOCAB)
        setattr(self, part, nn.Linear(4, 4))

    @classmethod
    def roles(cls, config):
        return frozenset({Role.ENCODER})


def test_by_default_each_matrix_meets_each_token():
    tokens, source = draw([2, 3]), draw([7, 1])
    assert Pair("reader").flops(tokens) == 2 * (16 + 4 * VOCAB) * 5
    assert Pair("reader").flops(tokens, source) == 2 * (16 + 4 * VOCAB) * (5 + 8)
    assert Pair("encoder").flops(tokens, source) == 2 * (16 * 8 + 4 * VOCAB * 5)
    assert Pair("encoder").flops(draw([]), draw([])) == 0


# Each model against torch.


@pytest.mark.parametrize("config", [{}, {"kernels": [1], "width": 4}, {"kernels": [2, 6], "embedding": 3}], ids=str)
def test_cnn(config):
    model = CNN(CNNConfig(name="cnn", **{"width": 6, **config}), VOCAB).double().eval()
    tokens = draw([4, 1, 7])  # nothing is padded here
    assert model.flops(tokens) == counted(lambda: model.encode(tokens))


@pytest.mark.parametrize("direction", ["forward", "backward", "both"])
@pytest.mark.parametrize("cell", ["elman", "jordan", "lstm", "gru"])
@pytest.mark.parametrize("config", [{}, {"layers": 3, "embedding": 5}], ids=str)
def test_rnn(config, cell, direction):
    model = RNN(RNNConfig(name="rnn", cell=cell, width=4, direction=direction, **config), VOCAB).double().eval()
    tokens = draw([STEPS] * ROWS)
    model.prune_unused({Role.ENCODER})
    assert model.flops(tokens) == counted(lambda: model.encode(tokens))


@pytest.mark.parametrize("tie", [True, False])
def test_the_output_of_an_rnn_counts_tied_or_not(tie):
    model = RNN(RNNConfig(name="rnn", cell="jordan", width=4, tie=tie), VOCAB).double().eval()
    tokens = draw([STEPS] * ROWS)
    assert model.flops(tokens) == counted(lambda: model.logits(tokens))


def test_a_peephole_multiplies_too_though_no_matrix_does():
    model = RNN(RNNConfig(name="rnn", cell="peephole", width=4), VOCAB).double().eval()
    tokens = draw([STEPS] * ROWS)
    assert model.flops(tokens) == counted(lambda: model.logits(tokens)) + 2 * 3 * 4 * STEPS * ROWS


@pytest.mark.parametrize("direction", ["forward", "both"])
@pytest.mark.parametrize("score", [score for score in SCORES if score != "location"])
def test_looks_at_its_own_past(score, direction):
    both = direction == "both"
    config = RNNConfig(name="rnn", cell="peephole", width=4, layers=2, direction=direction, attention=score, apart=both)
    model = RNN(config, VOCAB).double().eval()
    tokens = draw([STEPS] * ROWS)
    vectors = 2 * 2 * 3 * 4 * STEPS * ROWS
    # The first step has nothing to look at, so that it needs neither the query's matrix nor its strength.
    unused = {"additive": 4 * 4 // len(model.recurrent.ways), "cosine": 4}.get(score, 0)
    expected = counted(lambda: model.logits(tokens, direction=direction)) + vectors + 2 * 2 * unused * ROWS
    assert model.flops(tokens) == expected


def test_filters_meet_characters():
    model = RNN(RNNConfig(name="rnn", cell="jordan", width=4, chars=6), VOCAB).double().eval()
    tokens = draw([STEPS] * ROWS).with_chars([char_ids(["abc"] * STEPS)] * ROWS)
    assert model.flops(tokens) == counted(lambda: model.encode(tokens))
    longer = draw([STEPS] * ROWS).with_chars([char_ids(["abc"] * (STEPS - 1) + ["abcdef"])] * ROWS)
    assert model.flops(longer) - model.flops(tokens) == 2 * (30 * 3 * 6) * 3 * ROWS  # its padding is none


PLACES = [{"place": "before"}, {"place": "after"}, {"place": "after", "input_feeding": True}]


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("shape", [{"layers": 1}, {"layers": 2, "tie": True}, {"bridge": False}], ids=str)
def test_seq2seq(score, place, shape):
    model = seq2seq(attention=score, locations=SOURCES, **place, **shape)
    tokens, source = draw([STEPS] * ROWS, TARGET_VOCAB), draw([SOURCES] * ROWS)
    assert model.flops(tokens, source) == counted(lambda: model.logits(tokens, source))


@pytest.mark.parametrize("config", [{}, {"feedback": False}, {"layers": 3}], ids=str)
def test_seq2seq_without_attention(config):
    model = seq2seq(attention="none", **config)
    tokens, source = draw([STEPS] * ROWS, TARGET_VOCAB), draw([SOURCES] * ROWS)
    assert model.flops(tokens, source) == counted(lambda: model.logits(tokens, source))


def test_the_encoder_of_a_seq2seq():
    model, source = seq2seq(layers=2), draw([SOURCES] * ROWS)
    assert model.flops(source) == counted(lambda: model.encode(source))


def seq2seq(**config):
    return Seq2Seq(Seq2SeqConfig(name="seq2seq", **{"cell": "jordan", "width": 6, **config}), VOCAB, 7).double().eval()


def test_a_source_is_looked_at_as_far_as_there_are_locations():
    few, many = (seq2seq(attention="location", place="after", locations=number) for number in (3, 40))
    tokens, source = draw([2], TARGET_VOCAB), draw([5])
    assert many.flops(tokens, source) - few.flops(tokens, source) == 4 * 6 * 2 * (5 - 3)


def test_what_is_looked_up_for_nothing_would_be_caught():
    """Negative control: the base class would count the source's keys for the target, and no attention."""
    model = seq2seq(attention="general", place="after")
    tokens, source = draw([STEPS] * ROWS, TARGET_VOCAB), draw([SOURCES] * ROWS)
    assert Model.flops(model, tokens, source) != counted(lambda: model.logits(tokens, source))


def test_torch_counts_padding_and_we_do_not():
    model = seq2seq(attention="dot", place="after")
    ragged, source = draw([STEPS, 1, 2], TARGET_VOCAB), draw([SOURCES] * ROWS)
    assert model.flops(ragged, source) < counted(lambda: model.logits(ragged, source))


@pytest.mark.parametrize(
    "model",
    [
        RNN(RNNConfig(name="rnn", width=4, direction="both", attention="additive"), VOCAB),
        CNN(CNNConfig(name="cnn", width=6), VOCAB),
        seq2seq(attention="additive"),
        seq2seq(attention="location", locations=2),
    ],
    ids=lambda model: type(model).__name__,
)
@quick
@given(lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=4))
def test_a_batch_takes_what_its_sequences_take(model, lengths):
    def count(pairs):
        given = (draw([source for _, source in pairs]),) if isinstance(model, Seq2Seq) else ()
        return model.flops(draw([steps for steps, _ in pairs], TARGET_VOCAB), *given)

    assert count(lengths) == sum(count([pair]) for pair in lengths)


def test_the_training_of_a_layer_is_three_forward_passes():
    layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5))
    inputs = torch.randn(6, 8, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        layers(inputs).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * num_matrix_parameters(layers) * 6
