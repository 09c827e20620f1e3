"""GPT against a plain reference of its equations, its cache against recomputation, and its searches in place."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import transformer_equations as paper
from tests.equations import agree, below, weights_of
from torch import Tensor

from weft.config.recipes import read_preset
from weft.config.schema import read_section
from weft.decoding import cuda_graph
from weft.decoding import generate as generation
from weft.decoding.config import DecodingConfig
from weft.decoding.generate import generate
from weft.errors import ConfigError, DataError, RoleError
from weft.models.base import Capturable, Role
from weft.models.gpt import GPT, GPTConfig
from weft.nn.attention import kv_cache
from weft.nn.attention.capture import capture
from weft.nn.layers.quantization import lower
from weft.testing import PROPERTIES, check_model
from weft.tokens import Tokens

quick = settings(deadline=None, derandomize=True, max_examples=12)
VOCAB, EOS = 13, 0
SMALL = {"width": 12, "heads": 3, "layers": 2, "max_positions": 40}
RAGGED = [4, 1, 19, 2, 19]
KINDS = [
    {},
    {"norm": "post"},
    {"activation": "gelu", "ffn_width": 20, "tie": False},
    {"norm": "post", "activation": "silu", "pruned_heads": {1: [0, 2], "decoder.0": [1]}},
]


def config_of(**config: object) -> GPTConfig:
    return read_section(GPTConfig, {"name": "gpt", **SMALL, **config}, "model")


def make(seed: int = 0, **config: object) -> GPT:
    """Return a model in which no weight is zero or one, or equal to another."""
    torch.manual_seed(seed)
    model = GPT(config_of(**config), VOCAB).double().eval()
    paper.spread_weights(model)
    return model


def draw(lengths: list[int], seed: int = 5) -> Tokens:
    torch.manual_seed(seed)
    return Tokens.flat(torch.randint(VOCAB, (sum(lengths),)), torch.tensor(lengths))


def reference(model: GPT, tokens: Tokens, kind: paper.Kind | None = None) -> Tensor:
    """Return the logits one sequence at a time: no batch, no padding mask, no cache."""
    config, w = model.config, weights_of(model)
    kind = kind or paper.Kind(config.heads, config.norm, config.activation)
    states = [
        paper.stack(
            below(w, "decoder"), kind, "decoder", w["embed.weight"][ids] + w["positions.table.weight"][: len(ids)]
        )
        for ids in tokens.split()
    ]
    return torch.cat(states) @ w["output.weight"].T


def check_against_reference(model: GPT, lengths: list[int], kind: paper.Kind | None = None) -> None:
    tokens = draw(lengths)
    agree([model.logits(tokens)], [reference(model, tokens, kind)], dict(model.named_parameters()))


# The equations.


@pytest.mark.parametrize("kind", KINDS[:3], ids=str)
def test_it_is_its_equations(kind):
    check_against_reference(make(**kind), RAGGED)


@quick
@given(
    st.fixed_dictionaries(
        {
            "norm": st.sampled_from(["pre", "post"]),
            "activation": st.sampled_from(["gelu-tanh", "gelu", "relu"]),
            "tie": st.booleans(),
            "layers": st.integers(1, 3),
            "heads": st.sampled_from([1, 2, 4]),
        }
    ),
    st.lists(st.integers(1, 20), min_size=1, max_size=5),
    st.integers(0, 99),
)
def test_it_is_so_for_any_configuration_and_lengths(config, lengths, seed):
    check_against_reference(make(seed, **config), lengths)


@pytest.mark.parametrize(
    "kind", [paper.Kind(3, "post", "gelu-tanh"), paper.Kind(3, "pre", "gelu"), paper.Kind(2, "pre", "gelu-tanh")]
)
def test_another_configuration_is_caught(kind):
    """Negative control: the test distinguishes even the two kinds of GELU."""
    with pytest.raises(AssertionError, match="not close"):
        check_against_reference(make(), RAGGED, kind)


def test_the_gradient_is_the_difference_of_the_loss():
    model, tokens = make(layers=1, width=4, heads=2), draw([3, 1])
    names = [name for name, _ in model.named_parameters()]

    def logits(*weights: Tensor) -> Tensor:
        return torch.func.functional_call(model, dict(zip(names, weights, strict=True)), (tokens,))

    model.forward = model.logits
    assert torch.autograd.gradcheck(logits, tuple(model.parameters()), fast_mode=True)


# What every model keeps.


@pytest.mark.usefixtures("narrow_bound")
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_it_keeps_what_every_model_keeps(kind):
    passed = check_model(GPT, {**SMALL, **kind}, VOCAB)
    roles = {Role.ENCODER, Role.LANGUAGE_MODEL, Role.GENERATOR}
    assert GPT.roles(config_of(**kind)) == roles
    assert len(passed) == sum(needs <= {*roles, "forward"} for needs in PROPERTIES.values())


class Late(GPT):
    """Broken: the position of the next token is off by one."""

    def _embed_next(self, ids, cache):
        return super()._embed_next(ids, kv_cache.replace(cache, first=cache.first - 1))


class Peeks(GPT):
    """Broken: its attention is not causal."""

    def __init__(self, *given):
        super().__init__(*given)
        for block in self.decoder.blocks:
            block.attention.causal = False


@pytest.mark.usefixtures("wide_bound")
@pytest.mark.parametrize("kind", [Late, Peeks])
def test_one_that_does_not_keep_it_is_caught(kind):
    """The negative control."""
    with pytest.raises(AssertionError, match="not so: .* differs by"):
        check_model(kind, SMALL, VOCAB)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_future_tokens_change_nothing_exactly(kind):
    model, tokens = make(**kind).float(), draw([20])
    for place in (1, 7, 19):
        other = tokens.ids.clone()
        other[place:] = (other[place:] + 1) % VOCAB
        changed = Tokens.flat(other, tokens.lengths)
        assert torch.equal(model.logits(changed)[:place], model.logits(tokens)[:place])
        assert not torch.equal(model.logits(changed)[place:], model.logits(tokens)[place:])


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_step_is_the_whole_at_every_position_where_the_cache_grows(kind, monkeypatch):
    monkeypatch.setattr(kv_cache, "INITIAL_COLUMNS", 4)
    model, tokens = make(**kind), draw([20, 20])
    whole = model.logits(tokens).view(2, 20, -1)
    rows = tokens.ids.view(2, 20)
    logits, state = model.start(Tokens.pack([rows[0, :3].tolist(), rows[1, :3].tolist()]))
    for place in range(3, 20):
        torch.testing.assert_close(logits, whole[:, place - 1], rtol=0, atol=1e-10)
        logits, state = model.step(rows[:, place], state)


# What it gives.


@torch.no_grad()
def test_layers_are_the_embeddings_and_what_comes_out_of_each_block():
    model, tokens = make(), draw([5, 3])
    states = model.encode(tokens, (0, 1, 2, -1, -3))
    assert torch.equal(states[2], states[3])
    assert torch.equal(states[0], states[4])
    places = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2])
    torch.testing.assert_close(states[0], model.embed(tokens.ids) + model.positions.table.weight[places])
    assert torch.equal(model.output(states[2]), model.logits(tokens))
    assert torch.equal(model.pooled_output(tokens), states[2][[4, 7]])
    with pytest.raises(ConfigError, match=r"a gpt has 0, the embeddings, to 2 here, but \[3\] is asked for"):
        model.encode(tokens, [3])


def test_it_goes_forward_alone():
    with pytest.raises(RoleError, match="reads forward, but 'backward'"):
        make().logits(draw([2]), direction="backward")
    assert GPT.directions(config_of()) == ("forward",)


def test_the_output_goes_where_nothing_is_scored():
    model = make(tie=False)
    model.prune_unused([Role.ENCODER])
    assert not any(name.startswith("output") for name, _ in model.named_parameters())
    assert model.pooled_output(draw([3])).shape == (1, 12)


def test_weights_start_as_the_papers_say():
    for norm, smaller in (("pre", math.sqrt(2 * 4)), ("post", 1.0)):
        torch.manual_seed(0)
        model = GPT(config_of(norm=norm, width=240, layers=4), 300)
        for name, weight in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                assert weight.unique().tolist() == [float(name.endswith("norm.weight"))], name
            else:
                last = "attention.out_proj" in name or "feed_forward.fc2" in name
                assert float(weight.detach().std()) == pytest.approx(0.02 / (smaller if last else 1), rel=0.02), name


def test_positions_end():
    model, message = make(max_positions=4), "a sequence has 5 tokens, but the model has learned 4 positions"
    for call in (model.logits, model.start, model.encode):
        with pytest.raises(DataError, match=message):
            call(draw([5]))
    _, state = model.start(draw([4]))
    with pytest.raises(DataError, match=message):
        model.step(torch.tensor([1]), state)
    with pytest.raises(DataError, match=message):
        model.make_static(state, 1, 8)
    assert model.max_positions == 4


@torch.no_grad()
def test_it_looks_where_its_equations_look():
    model, tokens = make(), draw([6])
    kind = paper.Kind(3, "pre", "gelu-tanh")
    reference(model, tokens, kind)
    with capture() as maps:
        model.logits(tokens)
    assert set(maps.weights) == {("decoder", 0), ("decoder", 1)}
    for place, expected in kind.seen.items():
        torch.testing.assert_close(maps.weights[place][0][0].double(), expected, rtol=0, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize(("precision", "apart"), [("bf16", 0.1), ("int8", 0.1)])
def test_it_answers_in_fewer_bits(precision, apart):
    torch.manual_seed(0)
    model = GPT(config_of(width=48), VOCAB).eval()
    tokens = draw(RAGGED)
    expected = model.logits(tokens)
    lower(model, precision)
    actual = model.logits(tokens).float()
    assert 0 < (actual - expected).norm() / expected.norm() < apart
    logits, _ = model.start(tokens)
    last = tokens.starts[1:].long() - 1
    torch.testing.assert_close(logits.float(), actual[last], rtol=0.05, atol=0.05)


# Searches.

SEARCHES = [
    DecodingConfig(max_length=12),
    DecodingConfig(sample=True, num_return_sequences=3, max_length=12),
    DecodingConfig(beam=3, num_return_sequences=2, max_length=12),
]


@pytest.mark.parametrize("options", SEARCHES, ids=["greedy", "sampled", "beam"])
@pytest.mark.parametrize("lengths", [[5, 1, 9, 3], [1, 1, 1]], ids=str)
def test_ragged_prompts_go_on_as_each_alone_and_in_place(options, lengths, monkeypatch):
    for name, value in {"INITIAL_CAPACITY": 4, "MIN_ROWS": 2, "POLL_INTERVAL": 1}.items():
        monkeypatch.setattr(cuda_graph, name, value)
    model, prompts = make(2), draw(lengths, 3)
    assert isinstance(model, Capturable)
    together = generate(model, prompts, EOS, options)
    for row, ids in enumerate(prompts.split()):
        (alone,) = generate(model, Tokens.pack([ids.tolist()]), EOS, options, rows=[row])
        assert [hypothesis.ids for hypothesis in alone] == [hypothesis.ids for hypothesis in together[row]]
    monkeypatch.setattr(generation, "capturable", lambda model, prompt: True)
    in_place = generate(model, prompts, EOS, options)
    assert [[hypothesis.ids for hypothesis in row] for row in in_place] == [
        [hypothesis.ids for hypothesis in row] for row in together
    ]
    assert len({hypothesis.ids for row in together for hypothesis in row}) > 1


def test_a_cache_in_place_that_forgets_is_caught(monkeypatch):
    """Negative control: hypotheses keep their own caches."""
    model, prompts, options = make(2), draw([2, 3], 3), SEARCHES[2]
    together = generate(model, prompts, EOS, options)
    monkeypatch.setattr(generation, "capturable", lambda model, prompt: True)
    monkeypatch.setattr(kv_cache.StaticKVCache, "select", lambda self, rows: self)
    in_place = generate(model, prompts, EOS, options)
    assert [[hypothesis.ids for hypothesis in row] for row in in_place] != [
        [hypothesis.ids for hypothesis in row] for row in together
    ]


# Sizes.


def test_operations_are_matrices_and_pairs():
    model, lengths = make(width=12, heads=3, layers=2), [3, 1]
    matrices = 2 * (12 * 36 + 12 * 12 + 2 * 12 * 48) + 12 * VOCAB
    pairs = 6 + 1
    assert model.flops(draw(lengths)) == 2 * matrices * 4 + 2 * 4 * 12 * pairs
    assert make(pruned_heads={0: [1]}).flops(draw(lengths)) < model.flops(draw(lengths))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"heads": 5}, "model.heads must divide model.width: got 5 and 12; try 4"),
        (
            {"pruned_heads": {2: [0]}},
            r"model.pruned_heads names layers, 0 to 1, alone or as in decoder.0 \(decoder\): got '2'",
        ),
        ({"pruned_heads": {"cross.0": [0]}}, "got 'cross.0'"),
        ({"pruned_heads": {0: [0, 1, 2]}}, r"must leave one on: got \[0, 1, 2\]"),
        ({"activation": "gelu_new"}, "did you mean"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        config_of(**config)


def test_the_inside_is_four_times_as_wide_unless_it_is_said():
    assert (config_of(width=24).ffn_width, config_of(ffn_width=7).ffn_width) == (96, 7)
    assert GPTConfig(**read_preset("gpt2")).ffn_width == 3072
