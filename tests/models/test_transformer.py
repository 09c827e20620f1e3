"""The Transformer against a plain reference of its equations, its cache against recomputation, and pruned heads."""

import dataclasses
import re
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tests import transformer_equations as paper
from tests.equations import agree, weights_of
from torch import Tensor

from weft.checkpoint import contents
from weft.config.schema import read_section
from weft.decoding.config import DecodingConfig
from weft.decoding.generate import generate
from weft.errors import CheckpointError, ConfigError, DataError
from weft.models.base import Role
from weft.models.transformer import Transformer, TransformerConfig
from weft.nn.attention import kv_cache, multihead
from weft.nn.attention.capture import capture
from weft.nn.attention.multihead import MultiHeadAttention
from weft.testing import PROPERTIES, check_model
from weft.tokens import Tokens

quick = settings(deadline=None, derandomize=True, max_examples=12)
VOCAB, TARGET_VOCAB = 13, 11
SMALL = {"width": 12, "heads": 3, "layers": 2, "ffn_width": 20}
RAGGED = [(4, 3), (1, 18), (19, 1), (2, 2)]
OFF = {"0": [1], "cross.1": [0, 2], "encoder.1": [2]}

KINDS = [
    {"norm": "post"},
    {"norm": "pre", "activation": "gelu"},
    {"norm": "pre", "positions": "learned", "max_positions": 30, "activation": "silu"},
    {"tie": False, "decoder_layers": 3, "positions": "halves", "bias": True},
    {"norm": "pre", "decoder_layers": 1, "pruned_heads": {"0": [1], "encoder.1": [2]}},
    {"pruned_heads": OFF},
    {"tie": False, "embedding": 5},
]


def config_id(value: object) -> str:
    return " ".join(f"{key}={setting}" for key, setting in value.items()) if isinstance(value, dict) else str(value)


def config_of(**config: object) -> TransformerConfig:
    return read_section(TransformerConfig, {"name": "transformer", **SMALL, **config}, "model")


def make(seed: int = 0, target_vocab: int | None = TARGET_VOCAB, **config: object) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(config_of(**config), VOCAB, target_vocab).eval()


def spread(model: Transformer, seed: int = 0) -> Transformer:
    """Draw all weights anew, so that none is zero or one, or equal to another."""
    torch.manual_seed(seed)
    paper.spread_weights(model)
    return model


def draw(lengths: list[int], vocab: int) -> Tokens:
    return Tokens.flat(torch.randint(vocab, (sum(lengths),)), torch.tensor(lengths))


def pairs(lengths: list[tuple[int, int]], seed: int = 5) -> tuple[Tokens, Tokens]:
    torch.manual_seed(seed)
    return draw([length for length, _ in lengths], TARGET_VOCAB), draw(
        [length for _, length in lengths], min(VOCAB, TARGET_VOCAB)
    )


def off_by_place(config: TransformerConfig) -> dict[paper.Place, set[int]]:
    """Return the pruned heads of every attention, as the configuration's docstring defines them."""
    pruned = {}
    for place in ("encoder", "decoder", "cross"):
        for layer in range(max(config.layers, config.decoder_layers or 0)):
            off = {*config.pruned_heads.get(str(layer), ()), *config.pruned_heads.get(f"{place}.{layer}", ())}
            pruned[place, layer] = off
    return pruned


def reference(model: Transformer, tokens: Tokens, source: Tokens, kind: paper.Kind | None = None) -> Tensor:
    """Return the logits sentence by sentence, by the paper; positions are the model's (tests/nn/test_positions.py)."""
    config, w = model.config, weights_of(model)
    kind = kind or paper.Kind(config.heads, config.norm, config.activation)
    places = model.positions(torch.arange(max(tokens.longest, source.longest))).to(w["output.weight"].dtype)
    rows = zip(tokens.split(), source.split(), strict=True)
    return torch.cat([paper.logits(w, kind, target, origin, places) for target, origin in rows])


def check_against_reference(model: Transformer, lengths: list[tuple[int, int]], kind: paper.Kind | None = None) -> None:
    tokens, source = pairs(lengths)
    agree([model.logits(tokens, source)], [reference(model, tokens, source, kind)], dict(model.named_parameters()))


# The equations.


@pytest.mark.parametrize("kind", [*KINDS[:4], KINDS[6]], ids=config_id)
def test_it_is_its_equations(kind):
    check_against_reference(spread(make(**kind).double()), RAGGED)


@pytest.mark.parametrize("kind", [{}, {"norm": "pre", "tie": False, "embedding": 5}], ids=config_id)
def test_it_copies_by_its_equations(kind, monkeypatch):
    model = spread(make(target_vocab=None, copying=True, **kind).double())
    check_against_reference(model, RAGGED)
    remember = model.copy_attention.remember  # the negative control: the words in another order than their states

    def wrong(states, source):
        memory = remember(states, source)
        return dataclasses.replace(memory, ids=memory.ids.flip(1))

    monkeypatch.setattr(model.copy_attention, "remember", wrong)
    with pytest.raises(AssertionError):
        check_against_reference(model, RAGGED)


def test_what_copies_keeps_all_promises_and_is_not_captured():
    assert len(check_model(Transformer, {**SMALL, "layers": 1, "copying": True})) == 16
    assert not make(target_vocab=None, copying=True).supports_capture
    assert make().supports_capture
    with pytest.raises(ConfigError, match="source and target must have one vocabulary"):
        make(copying=True)


configs = st.fixed_dictionaries(
    {
        "norm": st.sampled_from(["pre", "post"]),
        "activation": st.sampled_from(["relu", "gelu", "silu"]),
        "positions": st.sampled_from(["sinusoidal", "halves", "learned"]),
        "bias": st.booleans(),
        "tie": st.booleans(),
        "layers": st.integers(1, 2),
        "decoder_layers": st.sampled_from([None, 1, 2]),
        "heads": st.sampled_from([1, 2, 3]),
        "width": st.sampled_from([6, 12]),
    }
)
lengths_of_pairs = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=4)


@quick
@given(configs, lengths_of_pairs, st.sampled_from([None, TARGET_VOCAB]), st.integers(0, 99))
def test_it_is_so_for_any_configuration_and_lengths(config, lengths, target_vocab, seed):
    check_against_reference(spread(make(target_vocab=target_vocab, **config).double(), seed), lengths)


@pytest.mark.parametrize(
    ("had", "kind"),
    [({"norm": "pre"}, paper.Kind(3, "post")), ({}, paper.Kind(3, activation="gelu")), ({}, paper.Kind(2))],
    ids=["norm", "activation", "heads"],
)
def test_another_configuration_is_caught(had, kind):
    """Negative control: the reference gets another configuration."""
    with pytest.raises(AssertionError, match="not close"):
        check_against_reference(spread(make(**had).double()), RAGGED, kind)


def test_single_precision_is_close_to_the_reference():
    model = spread(make(norm="pre"))
    exact = make(norm="pre").double()
    exact.load_state_dict(model.state_dict())
    tokens, source = pairs(RAGGED)
    actual, expected = model.logits(tokens, source), reference(exact, tokens, source)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)
    mine = torch.autograd.grad(actual.square().sum(), list(model.parameters()))
    yours = torch.autograd.grad(expected.square().sum(), list(exact.parameters()))
    for gradient, expected_gradient in zip(mine, yours, strict=True):
        assert (gradient.double() - expected_gradient).norm() <= 1e-4 * expected_gradient.norm()


# What every model keeps, in float64.


@pytest.mark.usefixtures("narrow_bound")
@pytest.mark.parametrize(
    ("kind", "target_vocab"),
    [*((kind, None) for kind in KINDS), *((KINDS[number], TARGET_VOCAB) for number in (0, 3, 6))],
)
def test_it_keeps_what_every_model_keeps(kind, target_vocab):
    passed = check_model(Transformer, {**SMALL, **kind}, VOCAB, target_vocab)
    roles = {Role.ENCODER, Role.SEQ2SEQ, Role.LANGUAGE_MODEL, Role.GENERATOR}
    assert Transformer.roles(config_of(**kind)) == roles
    assert len(passed) == sum(needs <= {*roles, "forward"} for needs in PROPERTIES.values())


class Forgets(Transformer):
    """Broken: positions of the next token are off by one."""

    def _embed_next(self, ids, cache):
        return super()._embed_next(ids, kv_cache.replace(cache, first=cache.first - 1))


class Peeks(Transformer):
    """Broken: the decoder's self-attention is not causal."""

    def __init__(self, *given):
        super().__init__(*given)
        for block in self.decoder.blocks:
            block.attention.causal = False


@pytest.mark.usefixtures("wide_bound")
@pytest.mark.parametrize("kind", [Forgets, Peeks])
def test_one_that_does_not_keep_it_is_caught(kind):
    """The negative control."""
    with pytest.raises(AssertionError, match="not so: .* differs by"):
        check_model(kind, SMALL, VOCAB)


@pytest.mark.parametrize("tie", [True, False])
def test_what_is_shared(tie):
    shared, separate = make(target_vocab=None, tie=tie), make(tie=tie)
    assert shared.embed is shared.target_embed
    assert separate.embed is not separate.target_embed
    for model in (shared, separate):
        assert (model.output.weight is model.target_embed.weight) == tie
    assert separate.embed.weight.shape == (VOCAB, 12)
    assert separate.output.weight.shape == separate.target_embed.weight.shape == (TARGET_VOCAB, 12)


@pytest.mark.parametrize("tie", [True, False])
def test_a_seed_gives_the_same_weights_wherever_they_lie_in_memory(tie):
    models, between = [], []
    for size in range(8):
        models.append(make(seed=3, tie=tie))
        between.append([torch.empty(97 * size + 1) for _ in range(size)])
    for other in models[1:]:
        assert all(torch.equal(*two) for two in zip(models[0].parameters(), other.parameters(), strict=True))


# A sequence alone, and in any batch, in single precision.
#
# Exact as long as the shapes stay: what the others say has no effect on any bit. In a batch of another size it is not:
# the library multiplies one row by a matrix in another order than many (a product of matrix and vector), cuts many rows
# into other blocks, and attention cuts the keys of a longer group into other blocks. Each is rounding, of 1e-6 at most
# of the largest score.


def alone(model: Transformer, tokens: Tokens, source: Tokens) -> Tensor:
    rows = zip(tokens.split(), source.split(), strict=True)
    return torch.cat([model.logits(Tokens.pack([own]), Tokens.pack([other])) for own, other in rows])


def apart(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())


@quick
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=6), st.sampled_from(KINDS[:2]))
@torch.no_grad()
def test_alone_as_in_any_batch(lengths, kind):
    model, (tokens, source) = make(**kind), pairs(lengths)
    assert apart(model.logits(tokens, source), alone(model, tokens, source)) < 1e-6


@torch.no_grad()
def test_a_batch_that_sees_its_filling_is_not_as_alone(monkeypatch):
    """The negative control."""
    model, (tokens, source) = make(), pairs(RAGGED)
    expected, kernel = alone(model, tokens, source), multihead.F.scaled_dot_product_attention
    monkeypatch.setattr(
        multihead.F,
        "scaled_dot_product_attention",
        lambda q, k, v, attn_mask=None, is_causal=False: kernel(q, k, v, is_causal=is_causal),
    )
    assert apart(model.logits(tokens, source), expected) > 1e-3


@pytest.mark.parametrize("kind", KINDS, ids=config_id)
@torch.no_grad()
def test_what_others_say_changes_nothing_exactly(kind):
    model, (tokens, source) = make(**kind), pairs(RAGGED)
    before = tokens.split(model.logits(tokens, source))
    for unchanged in range(len(RAGGED)):
        other = [
            Tokens.pack([ids if row == unchanged else (ids + 1) % TARGET_VOCAB for row, ids in enumerate(side.split())])
            for side in (tokens, source)
        ]
        after = tokens.split(model.logits(*other))
        assert [torch.equal(*two) for two in zip(before, after, strict=True)] == [row == unchanged for row in range(4)]


@pytest.mark.parametrize("kind", KINDS, ids=config_id)
@torch.no_grad()
def test_future_tokens_change_nothing_exactly(kind):
    model, (tokens, source) = make(**kind), pairs(RAGGED)
    before = model.logits(tokens, source)
    place = torch.cat([torch.arange(length) for length in tokens.lengths])
    for cut in range(1, 19):
        changed = torch.where(place >= cut, (tokens.ids + 3) % TARGET_VOCAB, tokens.ids)
        after = model.logits(Tokens.flat(changed, tokens.lengths), source)
        assert torch.equal(after[place < cut], before[place < cut])
        assert not torch.equal(after, before)


@torch.no_grad()
def test_an_empty_source_is_read_as_nothing():
    model = spread(make())
    prompts, sources = Tokens.pack([[1], [2, 3], [4]]), Tokens.pack([[5, 6], [], [7]])
    logits, state = model.start(prompts, sources)
    assert logits.isfinite().all()
    ids = torch.tensor([3, 2, 1])
    step, _ = model.step(ids, state)
    expected = model.logits(Tokens.pack([[1, 3], [2, 3, 2], [4, 1]]), sources)[[1, 4, 6]]
    torch.testing.assert_close(step, expected, rtol=0, atol=1e-5)
    _, state = model.start(prompts, Tokens.pack([[], [], []]))
    assert model.step(ids, state)[0].isfinite().all()


# Step by step.


def read_on(model: Transformer, rows: list[list[int]], sources: list[list[int]], steps: int):
    """Yield at each step the logits of incremental decoding, and of recomputation."""
    source = Tokens.pack(sources)
    logits, state = model.start(Tokens.pack(rows), source)
    for _ in range(steps):
        yield logits, model.logits(Tokens.pack(rows), source)[torch.tensor([len(row) for row in rows]).cumsum(0) - 1]
        ids = torch.randint(TARGET_VOCAB, (len(rows),))
        rows = [[*row, new] for row, new in zip(rows, ids.tolist(), strict=True)]
        logits, state = model.step(ids, state)


@pytest.mark.parametrize("kind", [{}, {"norm": "pre", "positions": "learned", "max_positions": 99}], ids=config_id)
@torch.no_grad()
def test_a_step_is_the_whole_at_every_position(kind):
    """In single precision, over prompts of different lengths, and past the initial capacity of a cache."""
    model = spread(make(**kind))
    torch.manual_seed(1)
    rows, sources = [[1, 2, 3, 4, 5], [6], [7, 8]], [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10] * 3]
    steps = 0
    for actual, expected in read_on(model, rows, sources, kv_cache.INITIAL_COLUMNS + 8):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        steps += 1
    assert steps == kv_cache.INITIAL_COLUMNS + 8


@pytest.mark.parametrize("kind", KINDS, ids=config_id)
@torch.no_grad()
def test_so_it_is_in_double_precision_where_the_cache_grows(kind, monkeypatch):
    monkeypatch.setattr(kv_cache, "INITIAL_COLUMNS", 2)
    model = spread(make(**kind).double())
    torch.manual_seed(1)
    for actual, expected in read_on(model, [[1, 2, 3, 4, 5], [6], [7, 8]], [[1, 2], [4], [5, 6, 7, 8]], 12):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_a_cache_that_grows_wrongly_is_caught(monkeypatch):
    """The negative control."""
    monkeypatch.setattr(kv_cache, "INITIAL_COLUMNS", 2)
    monkeypatch.setattr(
        kv_cache, "moved_index", lambda index, before, after: torch.nn.functional.pad(index, (0, after - before))
    )
    with pytest.raises(AssertionError, match="not close"):
        test_so_it_is_in_double_precision_where_the_cache_grows({}, monkeypatch)


@torch.no_grad()
def test_select_copies_neither_the_sources_nor_what_was_read():
    model = make()
    _, state = model.start(Tokens.pack([[1], [2]]), Tokens.pack([[3, 4], [5]]))
    picked = state.select(torch.tensor([1, 0, 1, 1]))
    assert all(kv is old_kv for kv, old_kv in zip(picked.source_kv, state.source_kv, strict=True))
    assert picked.cache.storage is state.cache.storage
    assert sum(len(kv) for kv in picked.source_kv) == model.config.layers * 3  # once a source token, not a hypothesis
    _, after = model.step(torch.tensor([1, 2, 3, 4]), picked)
    assert all(kv is old_kv for kv, old_kv in zip(after.source_kv, state.source_kv, strict=True))


@torch.no_grad()
def test_two_steps_from_one_state_go_their_own_ways():
    model = spread(make().double())
    source = Tokens.pack([[3, 4], [5]])
    _, state = model.start(Tokens.pack([[1], [2, 6]]), source)
    states = {}
    for first in (7, 8, 9):
        states[first] = model.step(torch.tensor([first, first]), state)[1]
    for first, next_state in states.items():
        actual, _ = model.step(torch.tensor([0, 1]), next_state)
        expected = model.logits(Tokens.pack([[1, first, 0], [2, 6, first, 1]]), source)[[2, 6]]
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_learned_positions_end():
    model = make(positions="learned", max_positions=4)
    message = "a sequence has 5 tokens, but the model has learned 4 positions"
    source = Tokens.pack([[1, 2], [3, 4, 5, 6]])
    _, state = model.start(Tokens.pack([[1, 2, 3], [1]]), source)
    _, state = model.step(torch.tensor([1, 1]), state)
    with pytest.raises(DataError, match=message):
        model.step(torch.tensor([1, 1]), state)
    for tokens, read in (([[1] * 5], [[1]]), ([[1]], [[1] * 5])):
        with pytest.raises(DataError, match=message):
            model.logits(Tokens.pack(tokens), Tokens.pack(read))
        with pytest.raises(DataError, match=message):
            model.start(Tokens.pack(tokens), Tokens.pack(read))


# A search cannot tell it from a model that remembers nothing.


@dataclass
class Rows:
    read: list[list[int]]
    sources: list[list[int]]

    def select(self, rows: Tensor) -> "Rows":
        picked = rows.tolist()
        return Rows([self.read[row] for row in picked], [self.sources[row] for row in picked])


class Anew:
    """Generates by recomputing the whole sequence at each step."""

    def __init__(self, model: Transformer) -> None:
        self.model = model

    def start(self, prompt: Tokens, source: Tokens | None = None) -> tuple[Tensor, Rows]:
        state = Rows(*([ids.tolist() for ids in side.split()] for side in (prompt, source)))
        return self._scored(state), state

    def step(self, ids: Tensor, state: Rows) -> tuple[Tensor, Rows]:
        state = Rows([[*row, new] for row, new in zip(state.read, ids.tolist(), strict=True)], state.sources)
        return self._scored(state), state

    def _scored(self, state: Rows) -> Tensor:
        last = torch.tensor([len(row) for row in state.read]).cumsum(0) - 1
        return self.model.logits(Tokens.pack(state.read), Tokens.pack(state.sources), at=last)


def searched(model, options: DecodingConfig, rows: int = 5) -> list[list[tuple[tuple[int, ...], float]]]:
    torch.manual_seed(2)
    lengths = torch.randint(1, 9, (rows,)).tolist()
    source, prompt = draw(lengths, TARGET_VOCAB), draw([1 + row % 3 for row in range(rows)], TARGET_VOCAB)
    with torch.no_grad():
        outputs = generate(model, prompt, EOS, options, source, forbid=[1])
    return [[(hypothesis.ids, hypothesis.logprob) for hypothesis in candidates] for candidates in outputs]


def same_search(actual, expected) -> None:
    assert [[ids for ids, _ in row] for row in actual] == [[ids for ids, _ in row] for row in expected]
    for mine, yours in zip(actual, expected, strict=True):
        assert [value for _, value in mine] == pytest.approx([value for _, value in yours], abs=1e-8)


EOS = 6  # not too rare with the weights below, so that some end before others
SEARCHES = [
    DecodingConfig(beam=5, num_return_sequences=3, max_length=12),
    DecodingConfig(beam=3, max_length=20, min_length=4),
    DecodingConfig(max_length=12),
    DecodingConfig(sample=True, num_return_sequences=3, max_length=12),
]


@pytest.mark.parametrize("options", SEARCHES, ids=["beam 5", "beam 3", "greedy", "sampled"])
@pytest.mark.parametrize("kind", [{}, {"norm": "pre", "pruned_heads": OFF}], ids=config_id)
def test_a_search_finds_what_it_finds_without_a_cache(kind, options, monkeypatch):
    monkeypatch.setattr(kv_cache, "INITIAL_COLUMNS", 4)
    model = spread(make(**kind).double(), 1)
    actual = searched(model, options)
    same_search(actual, searched(Anew(model), options))
    assert len({len(ids) for row in actual for ids, _ in row}) > 1


def test_a_search_on_a_cache_that_forgets_is_caught(monkeypatch):
    """Negative control: each hypothesis continues the cache of its row."""
    model = spread(make().double(), 1)
    own = kv_cache.KVCache.select
    monkeypatch.setattr(
        kv_cache.KVCache, "select", lambda self, rows: own(self, torch.arange(len(rows)) % len(self.first))
    )
    with pytest.raises(AssertionError):
        same_search(searched(model, SEARCHES[0]), searched(Anew(model), SEARCHES[0]))


# Heads that are off.


def saved(model: Transformer, folder) -> None:
    tensors = {name: value.contiguous() for name, value in contents.weights(model).items()}
    save_file(tensors, folder / "model.safetensors")


OFFS = [{0: [1]}, {"cross.1": [0, 2]}, OFF, {"encoder.0": [0], "decoder.0": [1, 2], "1": [2]}]


@pytest.mark.parametrize("off", OFFS, ids=config_id)
@pytest.mark.parametrize("norm", ["pre", "post"])
@torch.no_grad()
def test_weights_of_all_heads_are_cut_and_the_rest_is_as_if_they_said_nothing(norm, off, tmp_path):
    whole, cut = spread(make(norm=norm)), make(seed=9, norm=norm, pruned_heads=off)
    saved(whole, tmp_path)
    contents.load_weights(tmp_path, cut)
    tokens, source = pairs(RAGGED)
    actual = cut.logits(tokens, source)
    kind = paper.Kind(3, norm, off=off_by_place(cut.config))
    silenced = reference(whole, tokens, source, kind)
    assert apart(actual, silenced) < 1e-6
    assert apart(actual, whole.logits(tokens, source)) > 1e-3  # the negative control: what they say counts
    fewer = sum(value.numel() for value in whole.parameters()) - sum(value.numel() for value in cut.parameters())
    heads = sum(
        len(off_by_place(cut.config)[part.place, part.layer])
        for part in cut.modules()
        if isinstance(part, MultiHeadAttention)
    )
    assert fewer == heads * (4 * 4 * 12 + 3 * 4)  # of each, four matrices of 12 by 4 and three biases


@torch.no_grad()
def test_what_is_cut_is_saved_and_read_as_it_is(tmp_path):
    model, other = spread(make(pruned_heads=OFF)), make(seed=1, pruned_heads=OFF)
    saved(model, tmp_path)
    contents.load_weights(tmp_path, other)
    assert all(torch.equal(*two) for two in zip(model.parameters(), other.parameters(), strict=True))
    with pytest.raises(CheckpointError, match=r"in_proj.weight must be \(36, 12\), but is \(24, 12\) instead"):
        contents.load_weights(tmp_path, make())  # what is gone does not come back


@torch.no_grad()
def test_the_heads_of_another_layer_are_caught(tmp_path):
    """Negative control: the reference prunes another head."""
    whole, cut = spread(make()), make(pruned_heads={"encoder.0": [1]})
    saved(whole, tmp_path)
    contents.load_weights(tmp_path, cut)
    tokens, source = pairs(RAGGED)
    for place in (("encoder", 1), ("cross", 0), ("decoder", 0)):
        wrong = reference(whole, tokens, source, paper.Kind(3, off={place: {1}}))
        assert apart(cut.logits(tokens, source), wrong) > 1e-3


@torch.no_grad()
def test_looking_on_names_every_place_layer_and_head(tmp_path):
    whole, cut = spread(make().double()), make(pruned_heads=OFF).double()
    saved(whole, tmp_path)
    contents.load_weights(tmp_path, cut)
    tokens, source = pairs(RAGGED)
    plain = cut.logits(tokens, source)
    with capture() as maps:
        assert torch.equal(cut.logits(tokens, source), plain)
    assert maps.numbers == {
        ("encoder", 0): [0, 2],
        ("encoder", 1): [0, 1],
        ("decoder", 0): [0, 2],
        ("decoder", 1): [0, 1, 2],
        ("cross", 0): [0, 2],
        ("cross", 1): [1],
    }
    kind = paper.Kind(3, off=off_by_place(cut.config))
    for row, (target, origin) in enumerate(zip(tokens.split(), source.split(), strict=True)):
        reference(whole, Tokens.pack([target]), Tokens.pack([origin]), kind)
        for place, heads in maps.numbers.items():
            (weights,), expected = maps.weights[place], kind.seen[place][heads].float()
            torch.testing.assert_close(
                weights[row, :, : expected.shape[1], : expected.shape[2]], expected, rtol=0, atol=1e-6
            )
    with capture(layers=[1], heads=[0, 1]) as maps:
        cut.logits(tokens, source)
    assert maps.numbers == {("encoder", 1): [0, 1], ("decoder", 1): [0, 1], ("cross", 1): [1]}


# Configurations.


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"width": 500, "heads": 12}, "model.heads must divide model.width: got 12 and 500; try 10"),
        (
            {"pruned_heads": {2: [0]}},
            "model.pruned_heads names layers, 0 to 1, alone or as in cross.0 (encoder, decoder, cross): got '2'",
        ),
        ({"pruned_heads": {"middle.0": [0]}}, "got 'middle.0'"),
        ({"pruned_heads": {"cross": [0]}}, "got 'cross'"),
        ({"pruned_heads": {"cross.x": [0]}}, "got 'cross.x'"),
        ({"pruned_heads": {-1: [0]}}, "got '-1'"),
        ({"pruned_heads": {".0": [0]}}, "got '.0'"),
        ({"pruned_heads": {"00": [0]}}, "got '00'"),
        ({"pruned_heads": {"²": [0]}}, "got '²'"),
        ({"pruned_heads": {"cross.1": [0]}, "decoder_layers": 1}, "0 to 0, alone or as in cross.0"),
        ({"pruned_heads": {"encoder.2": [0]}, "decoder_layers": 3}, "0 to 1, alone or as in cross.0"),
        (
            {"pruned_heads": {"cross.1": [3]}},
            "model.pruned_heads.cross.1 names heads, 0 to 2, and must leave one on: got [3]",
        ),
        ({"pruned_heads": {0: [-1]}}, "model.pruned_heads.0 names heads, 0 to 2, and must leave one on: got [-1]"),
        ({"pruned_heads": {0: [0, 1, 2]}}, "must leave one on: got [0, 1, 2]"),
        (
            {"pruned_heads": {0: [0, 2], "cross.0": [1]}},
            "model.pruned_heads.cross.0 names heads, 0 to 2, and must leave one",
        ),
        ({"pruned_heads": {0: 1}}, "model.pruned_heads.0: must be a list, such as [a, b], but is 1 instead"),
        ({"pruned_heads": {0: [0], "0": [1]}}, "model.pruned_heads: names a layer twice, with and without quotes"),
        ({"norm": "both"}, "model.norm"),
        ({"activation": "tanh"}, "model.activation"),
        ({"positions": "none"}, "model.positions"),
        ({"dropout": 1.0}, "model.dropout"),
        ({"layers": 0}, "model.layers"),
        ({"decoder_layers": 0}, "model.decoder_layers"),
    ],
    ids=str,
)
def test_a_configuration_that_does_not_fit_is_refused(config, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        config_of(**config)


def test_a_layer_is_named_with_or_without_quotes():
    assert config_of(pruned_heads={1: [0, 2]}) == config_of(pruned_heads={"1": [0, 2]})
    assert config_of(pruned_heads={"decoder.2": [0]}, decoder_layers=3).pruned_heads == {"decoder.2": (0,)}
    assert config_of(pruned_heads={2: [0]}, decoder_layers=3).pruned_heads == {"2": (0,)}  # where there is such a layer


# Embeddings of another width, and from word vectors.


def test_another_width_has_a_projection_for_each_vocabulary():
    apart, shared = make(tie=False, embedding=5), make(tie=False, embedding=5, target_vocab=None)
    assert apart.embed.weight.shape == (VOCAB, 5)
    assert apart.project is not apart.target_project
    assert shared.project is shared.target_project
    assert make(embedding=12).project is None  # the same width
    assert len(apart.layer_groups()[0]) == 6


def test_a_projection_keeps_the_scale_of_the_embeddings():
    torch.manual_seed(0)
    model = Transformer(config_of(width=120, tie=False, embedding=60), 500, None)
    assert (model.project(model.embed.weight)).std().item() == pytest.approx(120**-0.5, rel=0.1)


@pytest.mark.parametrize(
    ("keys", "target_vocab", "frozen"),
    [
        ({"vectors": "x"}, TARGET_VOCAB, {"embed.weight"}),
        ({"target_vectors": "x", "tie": False}, TARGET_VOCAB, {"target_embed.weight"}),
        ({"vectors": "x", "tie": False}, None, {"embed.weight"}),
    ],
)
def test_static_vectors_get_no_gradient(keys, target_vocab, frozen):
    model, (tokens, source) = make(target_vocab=target_vocab, channels="static", **keys), pairs(RAGGED)
    model.logits(tokens, source).square().sum().backward()
    assert {name for name, value in model.named_parameters() if value.grad is None} == frozen
    trained = make(target_vocab=target_vocab, **keys)  # the negative control
    trained.logits(tokens, source).square().sum().backward()
    assert all(value.grad is not None for value in trained.parameters())


@pytest.mark.parametrize("target_vocab", [None, TARGET_VOCAB])
def test_static_vectors_are_no_tied_output(target_vocab):
    key = "vectors" if target_vocab is None else "target_vectors"
    with pytest.raises(ConfigError, match="model.tie makes them the weights of the output.*set model.tie: false"):
        make(target_vocab=target_vocab, channels="static", **{key: "x"})


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"embedding": 5}, "got model.embedding 5 and model.width 12; set model.tie: false"),
        ({"channels": "static"}, "model.channels: static keeps .* but there is no model.vectors; name a file"),
        ({"channels": "multichannel", "vectors": "x"}, "model.channels"),
    ],
)
def test_channels_and_widths_that_do_not_go_together_are_refused(raw, message):
    with pytest.raises(ConfigError, match=message):
        config_of(**raw)


# The encoder of a translator as a body (McCann et al. 2017).


@torch.no_grad()
def test_the_encoder_alone_gives_the_states_that_the_decoder_reads():
    model, (tokens, source) = make(), pairs([(3, 4), (2, 1)])
    states, _ = model.states(tokens, source)
    assert torch.equal(model.encode(source, (0, 1, -1)), torch.stack([states[0], states[1], states[-1]]))
    expected = torch.stack([rows.mean(0) for rows in source.split(states[-1])])
    torch.testing.assert_close(model.pooled_output(source), expected)
    with pytest.raises(ConfigError, match="the encoder of this transformer has 0"):
        model.encode(source, [9])


@torch.no_grad()
def test_without_the_decoder_the_encoder_is_the_same():
    model, (_, source) = make(), pairs([(3, 4), (2, 1)])
    before, flops = model.encode(source), model.flops(source)
    model.prune_unused({Role.ENCODER})
    assert torch.equal(model.encode(source), before)
    assert model.flops(source) == flops
    assert not any("decoder" in name or "target" in name or "output" in name for name, _ in model.named_parameters())
    assert len(model.layer_groups()) == 1 + model.config.layers
    assert model.word_embeddings() == {"vectors": [model.embed]}
