"""ELMo against an independent float64 biLM, and what it promises beside its equations."""

import pytest
import torch
from tests import elmo_equations as paper
from tests.equations import agree, scatter, weights_of

import weft
from weft.config.recipes import expand_preset
from weft.config.run import Run
from weft.errors import ConfigError, RoleError
from weft.models.elmo import ELMo, ELMoConfig
from weft.nn.kernels import dispatch
from weft.nn.rnn.time_major import TimeMajor
from weft.registry import resolve
from weft.testing import check_model
from weft.tokens import CHAR_PAD, TEXT_BEGIN, TEXT_END, WORD_BEGIN, WORD_END, Tokens, char_ids

WORDS = ["<S>", "</S>", "the", "play", "naïve", "日本語", "a" * 47, "b" * 48, "c" * 60, ""]
SENTENCES = [
    ["<S>", "the", "play", "naïve", "</S>"],
    ["<S>", "a" * 47, "b" * 48, "c" * 60, "日本語", "the", "</S>"],
    ["<S>", "</S>"],
]
SMALL = {"embedding": 3, "filters": {1: 2, 2: 3, 5: 2}, "width": 6, "cells": 5, "clip": 0.4, "dropout": 0.2}


def table():
    words = char_ids(["", "", *WORDS[2:]])
    chars = Tokens.pack([range(len(WORDS))]).with_chars([words]).chars
    chars[:2, :3] = torch.tensor([[WORD_BEGIN, TEXT_BEGIN, WORD_END], [WORD_BEGIN, TEXT_END, WORD_END]])
    return chars


def make(seed=0, **config):
    torch.manual_seed(seed)
    model = ELMo(ELMoConfig(name="elmo", **{**SMALL, **config}), len(WORDS)).double().eval()
    scatter(model, seed)
    model.set_char_table(table())
    return model


def packed(sentences=SENTENCES, chars=True):
    tokens = Tokens.pack([[WORDS.index(word) for word in sentence] for sentence in sentences])
    spelt = [["" if word in WORDS[:2] else word for word in sentence] for sentence in sentences]
    return tokens.with_chars([char_ids(words) for words in spelt]) if chars else tokens


def reference(model, sentences=SENTENCES):
    config = model.config
    net = paper.of_weft(weights_of(model), config.activation, config.clip or None, config.residual)
    alone = [paper.encoded(net, sentence) for sentence in sentences]
    return [torch.cat([layers[depth] for layers in alone]) for depth in range(config.layers + 1)]


CONFIGS = [
    {},
    {"residual": False, "clip": 0},
    {"layers": 3, "highways": 1, "activation": "tanh"},
    {"layers": 1, "highways": 0, "filters": {3: 4}, "clip": 0.05},
]


# Against the equations.


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("chars", [True, False])
def test_it_is_its_equations_forward_and_backward(config, chars):
    model, tokens = make(1, **config), packed(chars=chars)
    actual = list(model.encode(tokens, model.mixable_layers))
    agree(actual, reference(model), {name: value for name, value in model.named_parameters() if "output" not in name})


def test_it_is_so_in_kernels_too(monkeypatch):
    monkeypatch.setattr(dispatch, "SCAN_DTYPE", torch.float64)
    test_it_is_its_equations_forward_and_backward({"clip": 0.3}, True)


def test_one_softmax_scores_what_follows_and_what_was_before():
    model, tokens = make(2), packed()
    ahead, back = reference(model)[-1].chunk(2, -1)
    expected = [states @ model.output.weight.T + model.output.bias for states in (ahead, back)]
    actual = [model.logits(tokens, direction=direction) for direction in ("forward", "backward")]
    agree(actual, expected, dict(model.named_parameters()))
    for logits, expected_logits in zip(model.logits_each(tokens, ("forward", "backward")), actual, strict=True):
        torch.testing.assert_close(logits, expected_logits)
    with pytest.raises(RoleError, match="both"):
        model.logits(tokens, direction="both")


def test_a_summary_is_where_each_direction_has_read_all():
    model, tokens = make(3), packed([*SENTENCES, []])
    states = model.encode(tokens)[0]
    expected = [torch.cat([layer[-1, :3], layer[0, 3:]]) for layer in tokens.split(states)[:-1]]
    torch.testing.assert_close(model.pooled_output(tokens), torch.stack([*expected, torch.zeros(6).double()]))


class Unbounded(ELMo):
    """Broken: cells and projections are not clipped."""

    def __init__(self, config, vocab, target_vocab=None):
        super().__init__(config.model_copy(update={"clip": 0}), vocab)


class Meeting(ELMo):
    """Broken: the second layer of each direction reads both directions."""

    def encode(self, tokens, layers=(-1,)):
        embedded, grid = self._embed(tokens), TimeMajor(tokens)
        ahead, back = (lstm(embedded, grid)[0] for lstm in (self.forward_lstm, self.backward_lstm))
        mean = (ahead + back) / 2
        return torch.cat([lstm(mean, grid)[-1] for lstm in (self.forward_lstm, self.backward_lstm)], -1)[None]


class Silent(ELMo):
    """Broken: bos and eos have no characters."""

    def _chars(self, tokens):
        return tokens.chars


@pytest.mark.parametrize("broken", [Unbounded, Meeting, Silent])
def test_the_equations_tell_a_broken_one(broken):
    model = make(4, clip=0.2)
    other = broken(model.config, len(WORDS)).double().eval()
    other.load_state_dict(model.state_dict())
    other.set_char_table(table())
    assert (other.encode(packed())[0] - reference(model)[-1]).abs().max() > 1e-3


def test_single_precision_is_close_to_the_reference():
    model = make(5, cells=24, width=16)
    single = ELMo(model.config, len(WORDS))
    single.load_state_dict(model.state_dict())
    single.set_char_table(table())
    learning = single.eval().encode(packed())[0]  # in kernels
    with torch.no_grad():
        inferred = single.encode(packed())[0]
    for actual in (learning, inferred):
        torch.testing.assert_close(actual.double(), reference(model)[-1], rtol=1e-4, atol=1e-5)


# Properties.


@pytest.mark.isa
@pytest.mark.usefixtures("narrow_bound")
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_it_keeps_what_every_model_keeps(config):
    assert {"future tokens change nothing", "past tokens change nothing"} <= set(check_model(ELMo, {**SMALL, **config}))


class Peeking(ELMo):
    """Broken: its logits see both directions."""

    def logits(self, tokens, at=None, direction="forward"):
        ahead, back = self.encode(tokens)[0].chunk(2, -1)
        states = ahead + back if direction == "forward" else back
        return self.output(states if at is None else states[at])


class Turned(ELMo):
    """Broken: its backward LSTM reads forward."""

    def __init__(self, config, vocab, target_vocab=None):
        super().__init__(config, vocab)
        self.backward_lstm.reverse = False


class Batched(ELMo):
    """Broken: words are padded to the longest of the batch."""

    def __init__(self, config, vocab, target_vocab=None):
        super().__init__(config, vocab)
        self.char_encoder.filters._widest = 0


@pytest.mark.usefixtures("wide_bound")
@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (Peeking, "future tokens change nothing"),
        (Turned, "past tokens change nothing"),
        (Batched, "a sequence alone answers as in any batch"),
    ],
)
def test_a_broken_one_is_caught(broken, message):
    with pytest.raises(AssertionError, match=message):
        check_model(broken, {**SMALL, "filters": {1: 2, 2: 3}})


def test_a_word_is_its_spelling_and_not_its_number():
    model, tokens = make(6), packed()
    other = Tokens.pack([[3] * len(sentence) for sentence in SENTENCES]).with_chars(
        [char_ids(["begin", *sentence[1:-1], "end"]) for sentence in SENTENCES]
    )
    inside = [
        sum(map(len, SENTENCES[:row])) + at
        for row, sentence in enumerate(SENTENCES)
        for at in range(1, len(sentence) - 1)
    ]
    near = {"rtol": 0, "atol": 1e-12}  # of values of a few units: another number of words is another product
    torch.testing.assert_close(model.encode(tokens, (0,))[0, inside], model.encode(other, (0,))[0, inside], **near)
    unseen = Tokens.pack([[3, 3]]).with_chars([char_ids(["Unseen", "unseen"])])
    upper, lower = model.encode(unseen, (0,))[0]
    assert (upper - lower).abs().max() > 1e-6, "what is not in the vocabulary has a vector of its own"


def test_it_is_told_where_there_is_no_spelling():
    model = ELMo(ELMoConfig(name="elmo", **SMALL), len(WORDS))
    with pytest.raises(ConfigError, match="elmo reads the characters of words"):
        model.encode(packed(chars=False))
    with pytest.raises(ConfigError, match=r"this elmo has 0, the character encoder, to 2, but \[3\]"):
        model.encode(packed(), (3,))


def test_nothing_to_read_gives_nothing():
    model = make()
    empty = Tokens.pack([[], []])
    assert model.encode(empty).shape == (1, 0, 6)
    assert not model.pooled_output(empty).any()


def test_operations_are_those_of_products():
    model, tokens = make(), packed()
    count, signs = len(tokens.ids), int((model._chars(tokens) != CHAR_PAD).sum())
    filters = 3 * (1 * 2 + 2 * 3 + 5 * 2)
    rest = 2 * 2 * 7 * 7 + 7 * 3 + 2 * 2 * (5 * 4 * (3 + 3) + 5 * 3) + 2 * 3 * len(WORDS)
    assert model.flops(tokens) == 2 * (filters * signs + rest * count)
    model = make()
    model.prune_unused(set())
    assert model.flops(tokens) == 2 * (filters * signs + (rest - 2 * 3 * len(WORDS)) * count)


@pytest.mark.parametrize("chars", [True, False])
def test_operations_of_a_batch_are_counted_where_it_is_and_not_where_the_model_is(chars):
    model, tokens = make(), packed(chars=chars)
    expected = model.flops(tokens)
    assert model.to("meta").char_table.is_meta  # what is on it cannot be read, as what is on a GPU should not be
    assert model.flops(tokens) == expected


@pytest.mark.parametrize(("size", "millions"), [("original", 93.6), ("medium", 28.0), ("small", 13.6)])
def test_sizes_are_the_published(size, millions):
    """The sizes of AllenNLP's list of models, without the softmax."""
    config = resolve("model", "elmo").Config(**expand_preset({"preset": f"elmo-{size}"}))
    with torch.device("meta"):
        model = ELMo(config, 3)
    model.prune_unused(set())
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(millions * 1e6, abs=5e4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 7}, "model.width must be even, half for each direction: got 7; try 8"),
        ({"filters": {}}, "model.filters: must say how many filters there are of each width"),
        ({"filters": {51: 1}}, "of each width, 1 to 50"),
        ({"filters": {2: 0}}, "model.filters"),
    ],
)
def test_mistakes_are_named(change, message, recipe):
    with pytest.raises(ConfigError, match=message):
        Run.parse({**recipe, "task": {"name": "lm"}, "model": {"name": "elmo", **change}})


# As a language model.


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("elmo")
    (folder / "text.txt").write_text("the cat sat on the mat\na dog sat on a log\n" * 8, encoding="utf-8")
    raw = {
        "task": {"name": "lm"},
        "data": {"train": str(folder / "text.txt"), "valid": str(folder / "text.txt")},
        "tokenizer": {"name": "words", "size": 11},
        "model": {"name": "elmo", **SMALL, "width": 32, "cells": 32, "clip": 3.0, "dropout": 0.0},
        "train": {"steps": 80, "batch_tokens": 200, "lr": 0.02, "seed": 3},
    }
    return weft.train(raw, out=folder / "run"), folder / "run"


def test_it_learns_both_directions_and_goes_on_forwards(trained):
    pipeline, run = trained
    metrics = pipeline.evaluate()
    assert metrics["perplexity"] < 3
    assert metrics["backward_perplexity"] < 3
    assert pipeline("the cat sat")[0]["text"].strip().split()[:3] == ["on", "the", "mat"]
    again = weft.load(run, device="cpu")
    assert again("a dog") == pipeline("a dog")
    assert again.evaluate() == pytest.approx(metrics)


def test_what_is_unknown_is_read_by_its_letters(trained):
    pipeline, _ = trained
    first, second = pipeline.log_probs(["the unheard sat", "the unhoard sat"])
    assert first != second
    batch = pipeline.task.collate(
        pipeline.task.encode(pipeline.example("the zebra"), pipeline.tokenizer, pipeline.truncation_policy()), None
    )
    assert bytes(sign for sign in batch.tokens.chars[2].tolist() if sign < 256) == b"zebra"


def test_it_is_told_how_the_vocabulary_is_spelt(trained):
    pipeline, _ = trained
    special, table = pipeline.tokenizer.specials, pipeline.head.body.char_table
    assert table[special.bos].tolist()[:4] == [WORD_BEGIN, TEXT_BEGIN, WORD_END, CHAR_PAD]
    assert table[special.eos].tolist()[:4] == [WORD_BEGIN, TEXT_END, WORD_END, CHAR_PAD]
    assert table[special.unk].tolist()[:3] == [WORD_BEGIN, WORD_END, CHAR_PAD]
    for id in range(3, len(pipeline.tokenizer)):
        spelt = bytes(sign for sign in table[id].tolist() if sign < 256).decode()
        assert spelt == pipeline.tokenizer.token(id)
