"""Seq2Seq against plain references of its equations, and what its configurations promise."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from weft.config import read_section
from weft.errors import ConfigError
from weft.models import seq2seq
from weft.models.seq2seq import Seq2Seq, Seq2SeqConfig
from weft.nn.capture import capture
from weft.nn.grid import Grid
from weft.nn.losses import cross_entropy_sum
from weft.tokens import Tokens

quick = settings(deadline=None, derandomize=True, max_examples=15)
VOCAB, TARGET_VOCAB = 11, 7
lengths_of_pairs = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=4)


def make(seed: int = 0, target_vocab: int | None = TARGET_VOCAB, **config: object) -> Seq2Seq:
    torch.manual_seed(seed)
    return Seq2Seq(Seq2SeqConfig(name="seq2seq", **{"width": 6, **config}), VOCAB, target_vocab).double().eval()


def draw(lengths: list[int], vocab: int) -> Tokens:
    return Tokens.flat(torch.randint(vocab, (sum(lengths),)), torch.tensor(lengths))


def pairs(lengths: list[tuple[int, int]]) -> tuple[Tokens, Tokens]:
    return draw([length for length, _ in lengths], TARGET_VOCAB), draw([length for _, length in lengths], VOCAB)


RAGGED = [(4, 3), (1, 5), (5, 1), (2, 2)]


# The reference: sentence by sentence and step by step, each line an equation. It knows the model by its weights' names.


def linear(model: Seq2Seq, name: str, x: Tensor) -> Tensor:
    weights = dict(model.named_parameters(remove_duplicate=False))
    found = weights[f"{name}.weight"] @ x
    return found + weights[f"{name}.bias"] if f"{name}.bias" in weights else found


def lstm(cell: nn.Module, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    sums = cell.weight_ih_l0 @ x + cell.bias_ih_l0 + cell.weight_hh_l0 @ h + cell.bias_hh_l0
    D = len(h)
    i, f, g, o = sums[:D], sums[D : 2 * D], sums[2 * D : 3 * D], sums[3 * D :]
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def walk(cell: nn.Module, inputs: list[Tensor]) -> list[Tensor]:
    h = c = torch.zeros(cell.hidden_size, dtype=torch.float64)
    outputs = []
    for x in inputs:
        h, c = lstm(cell, x, h, c)
        outputs.append(h)
    return outputs


def encode(model: Seq2Seq, source: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Return h_j for each source position, and each layer's fixed vector."""
    states, vectors = [model.encoder.embed.weight[token] for token in source], []
    for ahead, back in zip(model.encoder.recurrent.forwards, model.encoder.recurrent.backwards, strict=True):
        right, left = walk(ahead, states), walk(back, states[::-1])[::-1]
        states = [torch.cat(both) for both in zip(right, left, strict=True)]
        vectors.append(torch.cat([right[-1], left[0]]))
    return states, vectors


def begin(model: Seq2Seq, vector: Tensor) -> tuple[Tensor, Tensor]:
    if model.bridge is None:
        return vector, vector
    both = torch.tanh(linear(model, "bridge", vector))
    return both[: len(vector)], both[len(vector) :]


def look(model: Seq2Seq, s: Tensor, h: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Bahdanau et al. 2015, equations 5 and 6: the context and its weights."""
    query = linear(model, "decoder.score.query", s)
    e = [linear(model, "decoder.score.energy", torch.tanh(query + linear(model, "decoder.score.key", hj))) for hj in h]
    exps = [torch.exp(ej) for ej in e]
    alpha = [one / sum(exps) for one in exps]
    return sum(a * hj for a, hj in zip(alpha, h, strict=True)), torch.cat(alpha)


def reference(model: Seq2Seq, target: list[int], source: list[int]) -> tuple[Tensor, Tensor]:
    """Score one sentence, (T, V); with attention, return where each step looked, (T, S)."""
    h, vectors = encode(model, source)
    states = [begin(model, vector) for vector in vectors]
    logits, looks = [], []
    for token in target:
        embedded = model.decoder.embed.weight[token]
        context = []
        if model.decoder.score is not None:
            c_t, alpha = look(model, states[0][0], h)
            context, looks = [c_t], [*looks, alpha]
        x = torch.cat([embedded, *context])
        for depth, cell in enumerate(model.decoder.layers):
            states[depth] = lstm(cell, x, *states[depth])
            x = states[depth][0]
        read = torch.tanh(linear(model, "decoder.readout", torch.cat([x, *context, embedded])))
        logits.append(linear(model, "decoder.output", read))
    return torch.stack(logits), torch.stack(looks) if looks else torch.empty(0)


def check_against_reference(model: Seq2Seq, lengths: list[tuple[int, int]]) -> None:
    tokens, source = pairs(lengths)
    rows = zip(tokens.split(), source.split(), strict=True)
    must = torch.cat([reference(model, target.tolist(), origin.tolist())[0] for target, origin in rows])
    got = model.logits(tokens, source)
    torch.testing.assert_close(got, must, rtol=1e-10, atol=1e-12)
    weigh = torch.randn_like(must)
    names, parameters = zip(*model.named_parameters(), strict=True)
    ours, theirs = (torch.autograd.grad((side * weigh).sum(), parameters) for side in (got, must))
    for name, mine, yours in zip(names, ours, theirs, strict=True):
        torch.testing.assert_close(mine, yours, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("attention", ["none", "additive"])
@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("bridge", [True, False])
def test_it_is_its_equations_forward_and_backward(attention, layers, bridge):
    check_against_reference(make(1, attention=attention, layers=layers, bridge=bridge), RAGGED)


@quick
@given(lengths_of_pairs, st.integers(0, 99), st.sampled_from(["none", "additive"]), st.booleans())
def test_it_is_so_for_any_lengths(lengths, seed, attention, tie):
    check_against_reference(make(seed, attention=attention, tie=tie), lengths)


def test_a_readout_from_the_wrong_context_is_caught(monkeypatch):
    """The negative control: attention over empty places too."""
    attend = seq2seq.attend
    monkeypatch.setattr(
        seq2seq, "attend", lambda scores, memory, empty: attend(scores, memory, torch.zeros_like(empty))
    )
    with pytest.raises(AssertionError):
        check_against_reference(make(1), RAGGED)


@pytest.mark.parametrize("layers", [1, 2])
def test_the_fixed_vector_model_is_two_of_torchs_own_lstms(layers):
    """Another witness: torch.nn.LSTM over one padded batch."""
    model = make(2, attention="none", layers=layers)
    encoder = nn.LSTM(6, 3, layers, bidirectional=True, dtype=torch.float64)
    decoder = nn.LSTM(6, 6, layers, dtype=torch.float64)
    recurrent = model.encoder.recurrent
    with torch.no_grad():
        for depth in range(layers):
            for kind in ("weight_ih_l", "weight_hh_l", "bias_ih_l", "bias_hh_l"):
                getattr(encoder, f"{kind}{depth}").copy_(getattr(recurrent.forwards[depth], f"{kind}0"))
                getattr(encoder, f"{kind}{depth}_reverse").copy_(getattr(recurrent.backwards[depth], f"{kind}0"))
                getattr(decoder, f"{kind}{depth}").copy_(getattr(model.decoder.layers[depth], f"{kind}0"))
    tokens, source = pairs(RAGGED)
    packed = nn.utils.rnn.pack_sequence(source.split(model.encoder.embed(source.ids)), enforce_sorted=False)
    ends = encoder(packed)[1][0].view(layers, 2, len(source), 3)
    start = torch.tanh(model.bridge(torch.cat([ends[:, 0], ends[:, 1]], -1))).chunk(2, -1)
    inputs = pad_sequence(tokens.split(model.decoder.embed(tokens.ids)))
    top, _ = decoder(inputs, tuple(part.contiguous() for part in start))
    padded = model.decoder.output(torch.tanh(model.decoder.readout(torch.cat([top, inputs], -1))))
    must = torch.cat([padded[:length, row] for row, length in enumerate(tokens.lengths.tolist())])
    torch.testing.assert_close(model.logits(tokens, source), must, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("attention", ["none", "additive"])
def test_its_gradient_is_that_of_its_function(attention):
    model = make(3, attention=attention, width=2)
    tokens, source = pairs([(2, 3), (1, 2)])
    names, values = zip(*model.named_parameters(), strict=True)

    def loss(*parameters: Tensor) -> Tensor:
        logits = torch.func.functional_call(Logits(model), dict(zip(full, parameters, strict=True)), (tokens, source))
        return cross_entropy_sum(logits, tokens.ids)

    full = [f"model.{name}" for name in names]
    assert torch.autograd.gradcheck(loss, [value.detach().clone().requires_grad_() for value in values])


class Logits(nn.Module):
    """functional_call calls a module; a model's logits are a method."""

    def __init__(self, model: Seq2Seq) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tokens, source: Tokens) -> Tensor:
        return self.model.logits(tokens, source)


# Configurations.


def sizes(model: Seq2Seq) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_one_vocabulary_has_one_matrix_and_two_have_two():
    shared, apart = make(target_vocab=None), make(target_vocab=VOCAB)
    assert shared.encoder.embed.weight is shared.decoder.embed.weight
    assert apart.encoder.embed.weight is not apart.decoder.embed.weight
    assert sizes(apart) - sizes(shared) == VOCAB * 6


def test_tie_makes_the_output_read_the_embeddings():
    loose, tied = make(tie=False), make(tie=True)
    assert tied.decoder.output.weight is tied.decoder.embed.weight
    assert tied.decoder.output.weight is not tied.encoder.embed.weight
    assert sizes(loose) - sizes(tied) == TARGET_VOCAB * 6
    all_one = make(tie=True, target_vocab=None)
    assert all_one.decoder.output.weight is all_one.encoder.embed.weight


def test_the_bridge_is_one_dense_layer_or_nothing():
    assert sizes(make(bridge=True)) - sizes(make(bridge=False)) == 6 * 12 + 12


def test_each_layer_adds_itself_to_both_sides():
    both_directions, one = 2 * 4 * 3 * (6 + 3 + 2), 4 * 6 * (6 + 6 + 2)
    for attention in ("none", "additive"):
        counts = [sizes(make(layers=layers, attention=attention)) for layers in (1, 2, 3)]
        assert {counts[1] - counts[0], counts[2] - counts[1]} == {both_directions + one}


@pytest.mark.parametrize("target_vocab", [None, TARGET_VOCAB])
def test_a_seed_decides_the_first_weights(target_vocab):
    """Many at once, so that no two lie at the same addresses: an order taken from those would show."""
    first, *others = [make(7, target_vocab) for _ in range(12)]
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


def test_embeddings_start_at_unit_size_unless_they_score_too():
    torch.manual_seed(0)
    config = {"name": "seq2seq", "width": 64}
    plain = Seq2Seq(Seq2Seq.Config.model_validate(config), 500)
    tied = Seq2Seq(Seq2Seq.Config.model_validate({**config, "tie": True}), 500)
    assert plain.decoder.embed.weight.std().item() == pytest.approx(1, rel=0.05)
    assert tied.decoder.embed.weight.std().item() == pytest.approx(1 / 8, rel=0.05)


def test_dropout_is_active_in_training_only():
    tokens, source = pairs(RAGGED)
    for config in ({"dropout": 0.5}, {"dropout": 0.5, "attention": "none", "layers": 2}):
        model = make(**config)
        still = make(**{**config, "dropout": 0.0})
        assert torch.equal(model.logits(tokens, source), model.logits(tokens, source))
        assert torch.equal(
            model.logits(tokens, source), still.logits(tokens, source)
        )  # the same weights: the same seed
        model.train()
        assert not torch.equal(model.logits(tokens, source), model.logits(tokens, source))
        still.train()
        assert torch.equal(still.logits(tokens, source), still.eval().logits(tokens, source))


@pytest.mark.parametrize("attention", ["none", "additive"])
def test_dropout_stands_on_embeddings_between_layers_and_on_the_readout(attention):
    model, seen = make(dropout=0.5, layers=3, attention=attention), []
    for part in (model.encoder, model.encoder.recurrent, model.decoder):
        part.dropout.register_forward_hook(lambda module, *_, part=part: seen.append(type(part).__name__))
    model.logits(*pairs(RAGGED))
    assert [seen.count(name) for name in ("Encoder", "Bidirectional", "Decoder")] == [1, 2, 1 + 2 + 1]


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        ({"width": 7}, "model.width must be even, half for each direction: got 7; try 8"),
        ({"width": 0}, "model.width: should be greater than or equal to 2, but is 0 instead"),
        ({"layers": 0}, "model.layers: should be greater than or equal to 1, but is 0 instead"),
        ({"dropout": 1.0}, "model.dropout: should be less than 1, but is 1.0 instead"),
        ({"attention": "aditive"}, "but is 'aditive' instead; did you mean 'additive'?"),
        ({"heads": 2}, "model.heads: unknown key"),
    ],
)
def test_a_wrong_config_is_refused_with_the_remedy(raw, told):
    with pytest.raises(ConfigError) as caught:
        read_section(Seq2SeqConfig, {"name": "seq2seq", **raw}, "model")
    assert told in str(caught.value)


# Looking at attention.


def test_capture_records_where_each_step_looked_and_changes_nothing():
    model, (tokens, source) = make(4, layers=2), pairs(RAGGED)
    before = model.logits(tokens, source)
    with capture() as maps:
        assert torch.equal(model.logits(tokens, source), before)
    assert list(maps.weights) == [("cross", 0)]
    (weights,) = maps.weights["cross", 0]
    assert weights.shape == (len(RAGGED), 5, 5)  # (B, T, S)
    torch.testing.assert_close(weights.sum(-1), torch.ones(len(RAGGED), 5, dtype=torch.float64))
    for row, (target, origin) in enumerate(zip(tokens.split(), source.split(), strict=True)):
        assert not weights[row, :, len(origin) :].any()
        must = reference(model, target.tolist(), origin.tolist())[1]
        torch.testing.assert_close(weights[row, : len(target), : len(origin)], must.detach())


def test_capture_sees_each_step_of_a_search_and_nothing_without_attention():
    prompt, source = Tokens.pack([[1], [1]]), draw([3, 2], VOCAB)
    with capture() as maps:
        logits, state = make().start(prompt, source)
        make().step(logits.argmax(-1), state)
        make(attention="none").start(prompt, source)
    assert [weights.shape for weights in maps.weights["cross", 0]] == [(2, 1, 3), (2, 1, 3)]
    with capture(layers=[1]) as other:
        make().start(prompt, source)
    assert other.weights == {}


# Search.


def test_select_copies_no_memory():
    model = make()
    _, state = model.start(Tokens.pack([[1], [2, 3]]), draw([3, 2], VOCAB))
    chosen = state.select(torch.tensor([1, 1, 0, 1]))
    assert chosen.memory is state.memory
    assert chosen.memory.states.data_ptr() == state.memory.states.data_ptr()
    assert chosen.owner.tolist() == [1, 1, 0, 1]
    _, after = model.step(torch.tensor([0, 1, 2, 3]), chosen)
    assert after.memory is state.memory
    assert len(after.memory.states) == 2  # sources, not hypotheses
    assert model.step(torch.tensor([0]), after.select(torch.tensor([2])))[1].owner.tolist() == [0]


@pytest.mark.parametrize("attention", ["none", "additive"])
def test_ragged_and_even_prompts_take_different_ways_to_the_same_place(attention):
    model, (prompt, source) = make(5, attention=attention, layers=2), pairs([(3, 4), (3, 2)])
    even, even_state = model.start(prompt, source)
    ragged_prompt = Tokens.pack([*(part.tolist() for part in prompt.split()), [1]])
    ragged_source = Tokens.pack([*(part.tolist() for part in source.split()), [2, 3]])
    ragged, ragged_state = model.start(ragged_prompt, ragged_source)
    alone, alone_state = model.start(Tokens.pack([[1]]), Tokens.pack([[2, 3]]))
    torch.testing.assert_close(ragged, torch.cat([even, alone]))
    torch.testing.assert_close(ragged_state.hidden, torch.cat([even_state.hidden, alone_state.hidden]))
    torch.testing.assert_close(ragged_state.cell, torch.cat([even_state.cell, alone_state.cell]))


# Empty places.


@pytest.mark.parametrize("attention", ["none", "additive"])
def test_what_stands_in_empty_places_changes_no_answer(attention, monkeypatch):
    model, (tokens, source) = make(6, attention=attention, layers=2), pairs(RAGGED)
    lay = Grid.lay

    def poisoned(self: Grid, flat: Tensor, reverse: bool = False) -> Tensor:
        laid, real = lay(self, flat, reverse), self.real
        if laid.is_floating_point():
            return laid.where(real[..., None], torch.tensor(math.nan, dtype=laid.dtype))
        return laid.where(real, torch.tensor(1))

    with torch.no_grad():
        logits, (following, state) = model.logits(tokens, source), model.start(tokens, source)
        monkeypatch.setattr(Grid, "lay", poisoned)
        assert torch.equal(model.logits(tokens, source), logits)
        again, again_state = model.start(tokens, source)
    assert torch.equal(again, following)
    assert torch.equal(again_state.hidden, state.hidden)


@pytest.mark.parametrize("attention", ["none", "additive"])
def test_empty_sequences_among_others_change_nothing_and_spoil_no_gradient(attention):
    model, (tokens, source) = make(7, attention=attention, layers=2), pairs(RAGGED)
    gaps = Tokens.flat(tokens.ids, torch.tensor([0, 4, 1, 0, 5, 2, 0]))
    source_gaps = Tokens.flat(source.ids, torch.tensor([0, 3, 5, 0, 1, 2, 0]))
    parameters = list(model.parameters())
    got, must = model.logits(gaps, source_gaps), model.logits(tokens, source)
    torch.testing.assert_close(got, must)
    ours, theirs = (torch.autograd.grad(side.square().sum(), parameters) for side in (got, must))
    for mine, yours in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, yours)


@pytest.mark.parametrize("attention", ["none", "additive"])
def test_an_empty_source_is_answered_for_itself_alone(attention):
    model, target = make(8, attention=attention), [1, 2]
    first, second = (
        model.logits(Tokens.pack([target, [3]]), Tokens.pack([[], other]))[:2] for other in ([4, 5], [6, 7, 8])
    )
    assert first.isfinite().all()
    torch.testing.assert_close(first, second)


@pytest.mark.parametrize("attention", ["none", "additive"])
def test_longest_may_be_more_than_the_longest(attention):
    """Compiled batches round it up."""
    model, (tokens, source) = make(9, attention=attention), pairs(RAGGED)
    wide = [Tokens(one.ids, one.starts, one.lengths, one.longest + 3) for one in (tokens, source)]
    torch.testing.assert_close(model.logits(*wide), model.logits(tokens, source))
    torch.testing.assert_close(model.start(*wide)[0], model.start(tokens, source)[0])
