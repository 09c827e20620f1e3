"""Seq2Seq against a plain reference of its equations, and what its configurations promise."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import equations
from tests.equations import CELLS, SCORES, affine, agree, below, scatter, weights_of
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from weft.config.schema import read_section
from weft.errors import ConfigError, RoleError
from weft.models.base import Role
from weft.models.seq2seq import decoder as decoder_module
from weft.models.seq2seq.model import Seq2Seq, Seq2SeqConfig
from weft.nn.attention.capture import capture
from weft.nn.kernels import dispatch
from weft.nn.layers.losses import cross_entropy_sum
from weft.nn.rnn.time_major import TimeMajor
from weft.testing import PROPERTIES, check_model
from weft.tokens import Tokens

quick = settings(deadline=None, derandomize=True, max_examples=12)
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

# Every way for the decoder to know of its source, and for attention to stand in it.
PLACES = [
    {"attention": "none"},
    {"attention": "additive", "place": "before"},
    {"attention": "general", "place": "after"},
    {"attention": "dot", "place": "after", "input_feeding": True},
    {"attention": "none", "feedback": False},
    {"attention": "scaled-dot", "place": "before", "feedback": False},
    {"attention": "cosine", "place": "after", "feedback": False},
    {"attention": "location", "place": "after", "input_feeding": True, "feedback": False},
]


def config_id(config: object) -> str:
    """Return the test id of a configuration."""
    return " ".join(f"{key}={value}" for key, value in config.items()) if isinstance(config, dict) else str(config)


# The reference: sentence by sentence and step by step, each line an equation. It knows the model by its weights' names.


def encode(w: equations.Weights, config: Seq2SeqConfig, source: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Return h_j for each source position, and each layer's fixed vector."""
    embedded = [w["encoder.embed.weight"][token] for token in source]
    outputs, vectors = equations.stack(config.cell, below(w, "encoder.recurrent"), embedded, config.width, "both")
    return outputs[-1], vectors


def begin(w: equations.Weights, cell: str, vector: Tensor) -> tuple[Tensor, ...]:
    parts = equations.STATES[cell]
    if "bridge.weight" not in w:
        return (vector,) * parts
    return torch.tanh(affine(w, "bridge", vector)).split(len(vector))


def reference(model: Seq2Seq, target: list[int], source: list[int]) -> tuple[Tensor, Tensor]:
    """Return the logits (T, V) of one sentence and, with attention, the weights (T, S)."""
    w, config = weights_of(model), model.config
    h, vectors = encode(w, config, source)
    states = [begin(w, config.cell, vector) for vector in vectors]
    read, logits, alphas = torch.zeros_like(vectors[0]), [], []
    for token in target:
        y = w["decoder.embed.weight"][token] if config.feedback else vectors[-1]
        x, context = [y], []
        if config.attention != "none" and config.place == "before":
            c, alpha = equations.look(config.attention, below(w, "decoder.score"), states[0][0], h)
            x, context, alphas = [y, c], [c], [*alphas, alpha]
        if config.input_feeding:
            x = [y, read]
        s = torch.cat(x)
        for depth in range(config.layers):
            states[depth] = equations.step(config.cell, below(w, f"decoder.layers.{depth}"), s, states[depth])
            s = states[depth][0]
        parts = [s, *context, y]
        if config.attention != "none" and config.place == "after":
            c, alpha = equations.look(config.attention, below(w, "decoder.score"), s, h)
            parts, alphas = [s, c], [*alphas, alpha]
        read = torch.tanh(affine(w, "decoder.readout", torch.cat(parts)))
        logits.append(affine(w, "decoder.output", read))
        if config.copying:  # See et al. 2017, equations 8 and 9
            generate = 1 / (1 + torch.exp(-affine(w, "decoder.copy_gate", torch.cat([c, s, y]))))
            probabilities = generate * torch.softmax(logits[-1], 0)
            for position, copied in enumerate(source):
                same = torch.arange(len(probabilities)) == copied
                probabilities = probabilities + same * (1 - generate) * alphas[-1][position]
            logits[-1] = probabilities.log()
    return torch.stack(logits), torch.stack(alphas) if alphas else torch.empty(0)


def check_against_reference(model: Seq2Seq, lengths: list[tuple[int, int]]) -> None:
    tokens, source = pairs(lengths)
    rows = zip(tokens.split(), source.split(), strict=True)
    expected = torch.cat([reference(model, target.tolist(), origin.tolist())[0] for target, origin in rows])
    agree([model.logits(tokens, source)], [expected], dict(model.named_parameters()))


def scattered(seed: int, **config: object) -> Seq2Seq:
    model = make(seed, **config)
    scatter(model, seed)
    return model


@pytest.mark.parametrize("place", PLACES, ids=config_id)
@pytest.mark.parametrize("cell", CELLS)
def test_every_cell_is_its_equations_in_every_place(cell, place):
    check_against_reference(scattered(1, cell=cell, width=4, layers=2, locations=3, **place), RAGGED)


@pytest.mark.parametrize("place", [{}, {"place": "after"}, {"place": "after", "input_feeding": True}], ids=config_id)
@pytest.mark.parametrize("feedback", [True, False], ids=["feedback", "none"])
@pytest.mark.parametrize("attention", SCORES)
def test_every_score_is_its_equation_in_every_place(attention, feedback, place):
    check_against_reference(scattered(2, cell="gru", attention=attention, feedback=feedback, width=4, **place), RAGGED)


@pytest.mark.parametrize("place", PLACES[:4], ids=config_id)
@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("bridge", [True, False], ids=["bridge", "no bridge"])
def test_it_is_so_however_deep_and_with_and_without_a_bridge(bridge, layers, place):
    check_against_reference(scattered(3, cell="lstm", layers=layers, bridge=bridge, **place), RAGGED)


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "plain"])
@pytest.mark.parametrize("place", [PLACES[1], PLACES[2], PLACES[3], PLACES[5], PLACES[7]], ids=config_id)
def test_it_copies_by_its_equations(place, kernels, monkeypatch):
    if kernels:
        monkeypatch.setattr(dispatch, "SCAN_DTYPE", torch.float64)
    config = {"cell": "peephole", "width": 4, "layers": 1, "locations": 3, "embedding": 5, **place}
    model = scattered(7, copying=True, target_vocab=None, **config)
    check_against_reference(model, RAGGED)
    if place == PLACES[1]:  # the negative control: copies of other positions
        remember = decoder_module.Decoder.remember
        monkeypatch.setattr(
            decoder_module.Decoder, "remember", lambda self, h, ids, grid: remember(self, h, ids.flip(0), grid)
        )
        with pytest.raises(AssertionError):
            check_against_reference(model, RAGGED)


def test_what_copies_needs_attention_and_one_vocabulary():
    with pytest.raises(ConfigError, match="source and target must have one vocabulary; leave tokenizer.target out"):
        make(copying=True)
    with pytest.raises(ConfigError, match="model.copying copies what model.attention looks at"):
        read_section(Seq2SeqConfig, {"name": "seq2seq", "attention": "none", "copying": True}, "model")


@pytest.mark.parametrize("place", [PLACES[1], PLACES[3]], ids=config_id)
def test_what_copies_keeps_all_promises(place):
    assert len(check_model(Seq2Seq, {"width": 6, "copying": True, **place})) == 16


@pytest.mark.parametrize("attention", ["none", *SCORES])
@pytest.mark.parametrize("cell", ["peephole", "jordan"])
def test_it_is_so_in_kernels_too(cell, attention, monkeypatch):
    """By default they run in single precision only; tests/nn/test_scan.py has them for every cell."""
    monkeypatch.setattr(dispatch, "SCAN_DTYPE", torch.float64)
    check_against_reference(scattered(4, cell=cell, width=4, layers=2, attention=attention, bridge=False), RAGGED)


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "plain"])
@pytest.mark.parametrize("embedding", [3, 7])
@pytest.mark.parametrize("place", PLACES, ids=config_id)
def test_so_are_embeddings_of_another_width(place, embedding, kernels, monkeypatch):
    if kernels:
        monkeypatch.setattr(dispatch, "SCAN_DTYPE", torch.float64)
    model = scattered(6, cell="peephole", width=4, embedding=embedding, locations=3, **place)
    assert model.encoder.embed.weight.shape == (VOCAB, embedding)
    check_against_reference(model, RAGGED)


@pytest.mark.parametrize("attention", ["additive", "general", "scaled-dot"])
@pytest.mark.parametrize("cell", ["peephole", "gru"])
def test_so_is_input_feeding(cell, attention, monkeypatch):
    """Input feeding is fused with one layer, and step by step with several."""
    monkeypatch.setattr(dispatch, "SCAN_DTYPE", torch.float64)
    fed = {"place": "after", "input_feeding": True}
    check_against_reference(scattered(4, cell=cell, width=4, attention=attention, **fed), RAGGED)


@pytest.mark.parametrize("cell", ["peephole", "gru"])
def test_so_is_the_additive_look_after_the_cell(cell, monkeypatch):
    monkeypatch.setattr(dispatch, "SCAN_DTYPE", torch.float64)
    check_against_reference(scattered(4, cell=cell, width=4, layers=2, place="after"), RAGGED)


@pytest.mark.parametrize("layers", [1, 2])
def test_an_input_that_is_fed_wrongly_is_caught(layers, monkeypatch):
    """Negative control: the first step gets the last readout."""
    monkeypatch.setattr(dispatch, "SCAN_DTYPE", torch.float64)
    model = scattered(4, cell="peephole", width=4, layers=layers, place="after", input_feeding=True)
    begin = Seq2Seq._initial_state

    def wrong(self: Seq2Seq, source: Tokens) -> object:
        state = begin(self, source)
        return dataclasses.replace(state, read=state.read + 1)

    monkeypatch.setattr(Seq2Seq, "_initial_state", wrong)
    with pytest.raises(AssertionError):
        check_against_reference(model, RAGGED)


@pytest.mark.parametrize("attention", ["additive", "general"])
def test_single_precision_is_close_to_the_reference(attention):
    model, (tokens, source) = scattered(5, cell="peephole", attention=attention), pairs([(9, 8), (4, 6), (6, 3)])
    single = make(5, cell="peephole", attention=attention).float()
    single.load_state_dict(model.state_dict())
    rows = zip(tokens.split(), source.split(), strict=True)
    expected = torch.cat([reference(model, target.tolist(), origin.tolist())[0] for target, origin in rows])
    actual = single.logits(tokens, source)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-4)
    mine = torch.autograd.grad(actual.square().sum(), list(single.parameters()))
    yours = torch.autograd.grad(expected.square().sum(), list(model.parameters()))
    for gradient, expected_gradient in zip(mine, yours, strict=True):
        assert (gradient.double() - expected_gradient).norm() < 1e-4 * expected_gradient.norm()


configs = st.fixed_dictionaries(
    {
        "cell": st.sampled_from(CELLS),
        "attention": st.sampled_from(["none", *SCORES]),
        "place": st.sampled_from(["before", "after"]),
        "input_feeding": st.booleans(),
        "locations": st.integers(1, 6),
        "feedback": st.booleans(),
        "layers": st.integers(1, 3),
        "bridge": st.booleans(),
        "tie": st.booleans(),
        "width": st.sampled_from([2, 4]),
        "embedding": st.sampled_from([None, 3]),
    }
).filter(
    lambda config: (
        not (config["input_feeding"] and (config["attention"] == "none" or config["place"] == "before"))
        and not (config["tie"] and (config["embedding"] or not config["feedback"]))
    )
)


@quick
@given(configs, lengths_of_pairs, st.sampled_from([None, TARGET_VOCAB]), st.integers(0, 99))
def test_it_is_so_for_any_configuration_and_lengths(config, lengths, target_vocab, seed):
    check_against_reference(scattered(seed, target_vocab=target_vocab, **config), lengths)


def test_attention_over_empty_places_is_caught(monkeypatch):
    """Negative control: attention over padding, too."""
    attend = decoder_module.attend
    monkeypatch.setattr(
        decoder_module, "attend", lambda scores, memory, empty: attend(scores, memory, torch.zeros_like(empty))
    )
    for place in PLACES[1:4]:
        with pytest.raises(AssertionError, match="not close"):
            check_against_reference(scattered(1, **place), RAGGED)


@pytest.mark.parametrize(
    ("had", "change"),
    [
        ({"attention": "dot"}, {"attention": "scaled-dot"}),
        ({"attention": "dot", "place": "after"}, {"attention": "scaled-dot"}),
        ({"attention": "dot", "place": "after", "input_feeding": True}, {"attention": "scaled-dot"}),
        ({"attention": "none"}, {"feedback": False}),
    ],
    ids=config_id,
)
def test_another_configuration_is_caught(had, change):
    """Negative control: the reference gets another configuration."""
    model = scattered(1, **had)
    model.config = model.config.model_copy(update=change)
    with pytest.raises(AssertionError, match="not close"):
        check_against_reference(model, RAGGED)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize(("cell", "kind"), [("elman", nn.RNN), ("lstm", nn.LSTM), ("gru", nn.GRU)])
def test_the_fixed_vector_model_is_two_of_torchs_own_networks(cell, kind, layers):
    """A second reference: torch.nn.RNN, LSTM and GRU over one padded batch."""
    model = scattered(2, cell=cell, attention="none", layers=layers)
    encoder = kind(6, 3, layers, bidirectional=True, dtype=torch.float64)
    decoder = kind(6, 6, layers, dtype=torch.float64)
    with torch.no_grad():
        for depth in range(layers):
            ahead, back = model.encoder.recurrent.layers[depth]
            for name in ("weight_ih_l", "weight_hh_l", "bias_ih_l", "bias_hh_l"):
                getattr(encoder, f"{name}{depth}").copy_(getattr(ahead.kernel, f"{name}0"))
                getattr(encoder, f"{name}{depth}_reverse").copy_(getattr(back.kernel, f"{name}0"))
                getattr(decoder, f"{name}{depth}").copy_(getattr(model.decoder.layers[depth].kernel, f"{name}0"))
    tokens, source = pairs(RAGGED)
    packed = nn.utils.rnn.pack_sequence(source.split(model.encoder.embed(source.ids)), enforce_sorted=False)
    after = encoder(packed)[1]
    ends = (after[0] if cell == "lstm" else after).view(layers, 2, len(source), 3)
    start = torch.tanh(model.bridge(torch.cat([ends[:, 0], ends[:, 1]], -1))).split(6, -1)
    begun = tuple(part.contiguous() for part in start)
    inputs = pad_sequence(tokens.split(model.decoder.embed(tokens.ids)))
    top, _ = decoder(inputs, begun if cell == "lstm" else begun[0])
    padded = model.decoder.output(torch.tanh(model.decoder.readout(torch.cat([top, inputs], -1))))
    expected = torch.cat([padded[:length, row] for row, length in enumerate(tokens.lengths.tolist())])
    torch.testing.assert_close(model.logits(tokens, source), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("place", PLACES[:4], ids=config_id)
def test_its_gradient_is_that_of_its_function(place):
    model = make(3, width=2, cell="gru", **place)
    tokens, source = pairs([(2, 3), (1, 2)])
    names, values = zip(*model.named_parameters(), strict=True)

    def loss(*parameters: Tensor) -> Tensor:
        logits = torch.func.functional_call(Logits(model), dict(zip(full, parameters, strict=True)), (tokens, source))
        return cross_entropy_sum(logits, tokens.ids)

    full = [f"model.{name}" for name in names]
    given_to = [value.detach().clone().requires_grad_() for value in values]
    assert torch.autograd.gradcheck(loss, given_to, fast_mode=True)


class Logits(nn.Module):
    """functional_call calls a module; a model's logits are a method."""

    def __init__(self, model: Seq2Seq) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tokens, source: Tokens) -> Tensor:
        return self.model.logits(tokens, source)


COVERING = [  # every value of every key; tests/test_testing.py has more of the LSTM's
    {"cell": "elman", "attention": "additive", "place": "after", "layers": 2},
    {"cell": "elman", "attention": "none", "feedback": False, "bridge": False},
    {"cell": "jordan", "attention": "cosine", "place": "before", "tie": True, "dropout": 0.3},
    {"cell": "jordan", "attention": "dot", "place": "after", "input_feeding": True, "feedback": False},
    {"cell": "lstm", "attention": "general", "place": "after", "input_feeding": True, "bridge": False},
    {"cell": "peephole", "attention": "scaled-dot", "place": "before", "layers": 2},
    {"cell": "peephole", "attention": "none", "layers": 3, "tie": True, "dropout": 0.3},
    {"cell": "gru", "attention": "additive", "place": "before", "feedback": False},
    {"cell": "gru", "attention": "location", "place": "after", "locations": 3},
    {"cell": "lstm", "attention": "additive", "embedding": 3, "vectors": "x", "channels": "static"},
    {"cell": "gru", "attention": "dot", "place": "after", "input_feeding": True, "embedding": 7},
]


@pytest.mark.parametrize("config", COVERING, ids=config_id)
def test_every_property_of_its_roles_holds(config):
    held = check_model(Seq2Seq, {"width": 4, **config}, target_vocab=13 if config["cell"] == "gru" else None)
    # It scores, generates, takes a source and encodes: it is promised all but what is of other directions.
    assert len(held) == sum(not needs & {"backward", "both", "masked"} for needs in PROPERTIES.values())


# Configurations.


def test_it_takes_a_source_scores_and_generates_and_its_encoder_encodes():
    roles = {Role.ENCODER, Role.SEQ2SEQ, Role.LANGUAGE_MODEL, Role.GENERATOR}
    assert Seq2Seq.roles(Seq2SeqConfig(name="seq2seq")) == roles


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


@pytest.mark.parametrize("cell", CELLS)
def test_the_bridge_is_one_dense_layer_or_nothing(cell):
    parts = equations.STATES[cell]
    assert sizes(make(cell=cell, bridge=True)) - sizes(make(cell=cell, bridge=False)) == (6 + 1) * 6 * parts


def test_each_layer_adds_itself_to_both_sides():
    both_directions, one_direction = 2 * 4 * 3 * (6 + 3 + 2), 4 * 6 * (6 + 6 + 2)
    for place in PLACES:
        counts = [sizes(make(layers=layers, **place)) for layers in (1, 2, 3)]
        assert {counts[1] - counts[0], counts[2] - counts[1]} == {both_directions + one_direction}


def test_attention_costs_what_its_equations_hold():
    base = sizes(make(attention="none"))
    into_cell, into_readout = 4 * 6 * 6, 6 * 6  # c_t beside E y_{t-1}
    costs = {"additive": 6 * 6 + 6 * 6 + 6 + 6, "cosine": 7, "location": 256 * 6, "general": 36, "dot": 0}
    for attention, cost in {**costs, "scaled-dot": 0}.items():
        assert sizes(make(attention=attention)) - base == cost + into_cell + into_readout
        assert sizes(make(attention=attention, place="after")) - base == cost  # c_t stands where E y_{t-1} did
        fed = make(attention=attention, place="after", input_feeding=True)
        assert sizes(fed) - base == cost + into_cell


def test_without_feedback_there_is_no_embedding_and_what_was_said_changes_nothing():
    for place in PLACES[4:]:
        model, source = make(**place), draw([3, 2], VOCAB)
        assert model.decoder.embed is None
        first, second = (model.logits(Tokens.pack([[token] * 3, [token]]), source) for token in (1, 5))
        assert torch.equal(first, second)
        assert not torch.equal(first[0], first[1])  # but a step is not as the one before it
    heard = make(attention="none")
    assert not torch.equal(*(heard.logits(Tokens.pack([[token] * 3]), draw([3], VOCAB)) for token in (1, 5)))


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
    for config in ({"dropout": 0.5, "layers": 2, **place} for place in PLACES[:5]):
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


@pytest.mark.parametrize("place", PLACES, ids=config_id)
def test_dropout_stands_on_embeddings_between_layers_and_on_the_readout(place):
    model, dropped = make(dropout=0.5, layers=3, **place), []
    for part in (model.encoder, model.encoder.recurrent, model.decoder):
        part.dropout.register_forward_hook(lambda module, *_, part=part: dropped.append(type(part).__name__))
    model.logits(*pairs(RAGGED))
    steps = 5 if model.config.input_feeding else 1  # it goes step by step, and so between its layers
    assert [dropped.count(name) for name in ("Encoder", "RecurrentStack", "Decoder")] == [1, 2, 1 + 2 * steps + 1]


@pytest.mark.parametrize(
    ("raw", "answer"),
    [
        ({"width": 7}, "model.width must be even, half for each direction: got 7; try 8"),
        ({"width": 0}, "model.width: should be greater than or equal to 2, but is 0 instead"),
        ({"layers": 0}, "model.layers: should be greater than or equal to 1, but is 0 instead"),
        ({"dropout": 1.0}, "model.dropout: should be less than 1, but is 1.0 instead"),
        ({"attention": "aditive"}, "but is 'aditive' instead; did you mean 'additive'?"),
        ({"cell": "grue"}, "but is 'grue' instead; did you mean 'gru'?"),
        ({"place": "befor"}, "but is 'befor' instead; did you mean 'before'?"),
        ({"locations": 0}, "model.locations: should be greater than or equal to 1, but is 0 instead"),
        (
            {"input_feeding": True},
            "model.input_feeding feeds what attention after the cell reads out: got model.attention 'additive' and "
            "model.place 'before'; set model.place to 'after'",
        ),
        (
            {"input_feeding": True, "place": "after", "attention": "none"},
            "model.attention 'none' and model.place 'after'; set model.attention to a score and model.place to 'after'",
        ),
        ({"tie": True, "feedback": False}, "model.tie ties the output to the embeddings that model.feedback: false"),
        ({"heads": 2}, "model.heads: unknown key"),
    ],
)
def test_a_wrong_config_is_refused_with_the_remedy(raw, answer):
    with pytest.raises(ConfigError) as caught:
        read_section(Seq2SeqConfig, {"name": "seq2seq", **raw}, "model")
    assert answer in str(caught.value)


# Looking at attention.


@pytest.mark.parametrize("place", [place for place in PLACES if place["attention"] != "none"], ids=config_id)
@pytest.mark.parametrize("cell", ["lstm", "jordan"])
def test_capture_records_where_each_step_looked_and_changes_nothing(cell, place):
    model, (tokens, source) = make(4, cell=cell, layers=2, locations=4, **place), pairs(RAGGED)
    before = model.logits(tokens, source)
    with capture() as maps:
        assert torch.equal(model.logits(tokens, source), before)
    assert list(maps.weights) == [("cross", 0)]
    (weights,) = maps.weights["cross", 0]
    assert weights.shape == (len(RAGGED), 5, 5)  # (B, T, S)
    torch.testing.assert_close(weights.sum(-1), torch.ones(len(RAGGED), 5, dtype=torch.float64))
    for row, (target, origin) in enumerate(zip(tokens.split(), source.split(), strict=True)):
        assert not weights[row, :, len(origin) :].any()
        expected = reference(model, target.tolist(), origin.tolist())[1]
        torch.testing.assert_close(weights[row, : len(target), : len(origin)], expected.detach())


@pytest.mark.parametrize("attention", SCORES)
def test_capture_sees_the_same_where_a_kernel_would_have_walked(attention, monkeypatch):
    model, (tokens, source) = make(4, attention=attention, locations=4), pairs(RAGGED)
    with capture() as maps:
        expected = model.logits(tokens, source)
    monkeypatch.setattr(dispatch, "SCAN_DTYPE", torch.float64)
    with capture() as again:
        torch.testing.assert_close(model.logits(tokens, source), expected)
    torch.testing.assert_close(again.weights["cross", 0], maps.weights["cross", 0])


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


def flat(state: decoder_module.DecoderState) -> list[Tensor]:
    return [*(part for layer in state.layers for part in layer), state.read]


@pytest.mark.parametrize("place", PLACES[:5], ids=config_id)
@pytest.mark.parametrize("cell", CELLS)
def test_ragged_and_even_prompts_take_different_ways_to_the_same_place(cell, place):
    model, (prompt, source) = make(5, cell=cell, layers=2, **place), pairs([(3, 4), (3, 2)])
    even, even_state = model.start(prompt, source)
    ragged_prompt = Tokens.pack([*(part.tolist() for part in prompt.split()), [1]])
    ragged_source = Tokens.pack([*(part.tolist() for part in source.split()), [2, 3]])
    ragged, ragged_state = model.start(ragged_prompt, ragged_source)
    alone, alone_state = model.start(Tokens.pack([[1]]), Tokens.pack([[2, 3]]))
    torch.testing.assert_close(ragged, torch.cat([even, alone]))
    assert len(ragged_state.layers) == 2
    assert [len(layer) for layer in ragged_state.layers] == [equations.STATES[cell]] * 2
    for actual, *parts in zip(flat(ragged_state), flat(even_state), flat(alone_state), strict=True):
        torch.testing.assert_close(actual, torch.cat(parts))


# Empty places.


@pytest.mark.parametrize("place", PLACES[:5], ids=config_id)
@pytest.mark.parametrize("cell", CELLS)
def test_what_stands_in_empty_places_changes_no_answer(cell, place, monkeypatch):
    model, (tokens, source) = make(6, cell=cell, layers=2, **place), pairs(RAGGED)
    lay = TimeMajor.pad

    def poisoned(self: TimeMajor, flat: Tensor, reverse: bool = False) -> Tensor:
        laid, real = lay(self, flat, reverse), self.mask
        if laid.is_floating_point():
            return laid.where(real[..., None], torch.tensor(math.nan, dtype=laid.dtype))
        return laid.where(real, torch.tensor(1))

    with torch.no_grad():
        logits, (following, state) = model.logits(tokens, source), model.start(tokens, source)
        monkeypatch.setattr(TimeMajor, "pad", poisoned)
        assert torch.equal(model.logits(tokens, source), logits)
        again, again_state = model.start(tokens, source)
    assert torch.equal(again, following)
    assert all(torch.equal(actual, expected) for actual, expected in zip(flat(again_state), flat(state), strict=True))


@pytest.mark.parametrize("kernels", [False, True], ids=["by steps", "in kernels"])
@pytest.mark.parametrize("place", PLACES, ids=config_id)
def test_empty_sequences_among_others_change_nothing_and_spoil_no_gradient(place, kernels, monkeypatch):
    monkeypatch.setattr(dispatch, "SCAN_DTYPE", torch.float64 if kernels else None)
    model, (tokens, source) = make(7, cell="peephole", layers=1 + kernels, **place), pairs(RAGGED)
    if place.get("input_feeding"):
        model = make(7, cell="peephole", **place)  # of which only one layer goes in kernels
    gaps = Tokens.flat(tokens.ids, torch.tensor([0, 4, 1, 0, 5, 2, 0]))
    source_gaps = Tokens.flat(source.ids, torch.tensor([0, 3, 5, 0, 1, 2, 0]))
    agree([model.logits(gaps, source_gaps)], [model.logits(tokens, source)], dict(model.named_parameters()))


@pytest.mark.parametrize("kernels", [False, True], ids=["by steps", "in kernels"])
@pytest.mark.parametrize("place", PLACES, ids=config_id)
def test_an_empty_source_is_answered_for_itself_alone(place, kernels, monkeypatch):
    monkeypatch.setattr(dispatch, "SCAN_DTYPE", torch.float64 if kernels else None)
    model, target = make(8, **place), [1, 2, 3, 4]
    first, second, none = (
        model.logits(Tokens.pack([target, [3]]), Tokens.pack([[], other]))[:4] for other in ([4, 5], [6, 7, 8], [])
    )
    assert first.isfinite().all()
    torch.testing.assert_close(first, second)
    torch.testing.assert_close(first, none)
    grads = torch.autograd.grad(none.sum() + first.sum(), list(model.parameters()), materialize_grads=True)
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("place", PLACES, ids=config_id)
def test_a_batch_with_nothing_said_yet_is_answered(place):
    model, nothing, source = make(10, **place), Tokens.pack([[], []]), draw([3, 2], VOCAB)
    assert model.logits(nothing, source).shape == (0, TARGET_VOCAB)
    logits, state = model.start(nothing, source)
    torch.testing.assert_close(logits, model.decoder.output.bias.expand(2, -1))  # as of a row with no token
    ids = torch.tensor([1, 2])
    torch.testing.assert_close(model.step(ids, state)[0], model.start(Tokens.pack([[1], [2]]), source)[0])


@pytest.mark.parametrize("place", PLACES, ids=config_id)
def test_longest_may_be_more_than_the_longest(place):
    """Compiled batches round `longest` up."""
    model, (tokens, source) = make(9, cell="jordan", **place), pairs(RAGGED)
    wide = [Tokens(side.ids, side.starts, side.lengths, side.longest + 3) for side in (tokens, source)]
    torch.testing.assert_close(model.logits(*wide), model.logits(tokens, source))
    torch.testing.assert_close(model.start(*wide)[0], model.start(tokens, source)[0])


# The encoder of a translator as a body (McCann et al. 2017).


@torch.no_grad()
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("cell", CELLS)
def test_the_encoder_alone_gives_the_states_that_the_decoder_attends_to(cell, layers):
    model, (_, source) = scattered(8, cell=cell, layers=layers), pairs(RAGGED)
    weights, state = weights_of(model), model._initial_state(source)
    assert state.memory is not None
    expected = [encode(weights, model.config, ids.tolist()) for ids in source.split()]
    hidden, rows = source.split(model.encode(source)[0]), enumerate(source.lengths.tolist())
    for row, (own, (states, vectors)) in enumerate(zip(hidden, expected, strict=True)):
        torch.testing.assert_close(own, torch.stack(states))
        torch.testing.assert_close(model.pooled_output(source)[row], vectors[-1])
    assert torch.equal(model.encode(source)[0], torch.cat([state.memory.states[row, :size] for row, size in rows]))
    assert torch.equal(model.final_states(model.encode(source)[0], source), state.vector)
    if layers > 1:  # the negative control: the layer below is another
        assert not torch.allclose(model.encode(source, [1]), model.encode(source))


@torch.no_grad()
def test_layers_are_numbered_from_the_embeddings_on():
    model, (_, source) = make(layers=2), pairs(RAGGED)
    assert torch.equal(model.encode(source, [0])[0], model.encoder.embed(source.ids))
    assert torch.equal(model.encode(source, [0, 1, 2]), model.encode(source, [-3, -2, -1]))
    assert model.mixable_layers == (0, 1, 2)
    narrow = make(layers=2, embedding=5)
    assert narrow.mixable_layers == (1, 2)
    with pytest.raises(ConfigError, match=r"layers: this seq2seq's encoder has 0, the embeddings, to 2, but \[3\]"):
        narrow.encode(source, [3])
    with pytest.raises(RoleError, match="layers: layer 0 is 5 wide and the last is 6"):
        narrow.encode(source, [0, 1])


@torch.no_grad()
@pytest.mark.parametrize("config", [{}, {"bridge": False}, {"feedback": False}, {"target_vocab": None}], ids=config_id)
def test_without_the_decoder_the_encoder_is_the_same(config):
    model, (_, source) = make(layers=2, **config), pairs(RAGGED)
    before, flops, groups = model.encode(source), model.flops(source), model.layer_groups()
    assert len(groups) == 1 + 2 + 1
    model.prune_unused({Role.GENERATOR})
    assert model.layer_groups() == groups
    model.prune_unused({Role.ENCODER})
    assert torch.equal(model.encode(source), before)
    assert model.flops(source) == flops
    assert all(name.startswith("encoder.") for name, _ in model.named_parameters())
    assert model.layer_groups()[1:] == groups[1:3]
    assert model.word_embeddings() == {"vectors": [model.encoder.embed]}


# Word vectors.


@pytest.mark.parametrize(
    ("keys", "target_vocab", "frozen"),
    [
        ({"vectors": "x"}, TARGET_VOCAB, {"encoder.embed.weight"}),
        ({"target_vectors": "x"}, TARGET_VOCAB, {"decoder.embed.weight"}),
        ({"vectors": "x", "target_vectors": "y"}, TARGET_VOCAB, {"encoder.embed.weight", "decoder.embed.weight"}),
        ({"vectors": "x"}, None, {"encoder.embed.weight"}),  # which is the decoder's, too
    ],
)
def test_static_vectors_get_no_gradient(keys, target_vocab, frozen):
    tokens, source = pairs(RAGGED)
    for channels, without in (("static", frozen), ("nonstatic", set())):
        model = make(target_vocab=target_vocab, channels=channels, **keys)
        model.logits(tokens, source).square().sum().backward()
        assert {name for name, value in model.named_parameters() if value.grad is None} == without


def test_static_vectors_are_no_tied_output():
    make(channels="static", vectors="x", tie=True)  # the source's are not
    for keys in ({"vectors": "x", "target_vocab": None}, {"target_vectors": "x"}):
        with pytest.raises(ConfigError, match="model.tie makes them the weights of the output.*set model.tie: false"):
            make(channels="static", tie=True, **keys)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"tie": True, "embedding": 4}, "got model.embedding 4 and model.width 6; set them equal, or model.tie: false"),
        ({"channels": "static"}, "model.channels: static keeps .* but there is no model.vectors; name a file"),
        ({"target_vectors": "x", "feedback": False}, "model.target_vectors fills .* model.feedback: false leaves out"),
    ],
)
def test_vectors_and_widths_that_do_not_go_together_are_refused(raw, message):
    with pytest.raises(ConfigError, match=message):
        read_section(Seq2SeqConfig, {"name": "seq2seq", "width": 6, **raw}, "model")
