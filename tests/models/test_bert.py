"""BERT and its family against a plain reference of the equations, and the particulars of each member."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import transformer_equations as paper
from tests.equations import Weights, agree, below, weights_of
from torch import Tensor
from torch.nn import functional as F

from weft.checkpoint import contents
from weft.config.recipes import read_preset
from weft.config.schema import read_section
from weft.data.batching.static_shape import StaticShape
from weft.errors import ConfigError, DataError, RoleError
from weft.models.base import Role
from weft.models.bert import BERT, BERTConfig
from weft.nn.attention.capture import capture
from weft.tasks.batch import IGNORE_INDEX, Batch
from weft.testing import PROPERTIES, check_model
from weft.tokens import Tokens

quick = settings(deadline=None, derandomize=True, max_examples=15)
VOCAB = 13
SMALL = {"width": 12, "heads": 3, "layers": 2, "ffn_width": 20, "max_positions": 24, "dropout": 0.0, "eps": 1e-5}
KINDS = {
    "bert": {},
    "roberta": {"offset": 2, "segments": 1},
    "distilbert": {"segments": 0, "pooler": "relu"},
    "albert": {"shared": True, "embedding": 6, "activation": "gelu-tanh"},
    "electra": {"embedding": 6, "pooler": "gelu", "tie": False},
    "bare": {"pooler": "none", "pruned_heads": {"0": [1]}},
}


def config_of(**config: object) -> BERTConfig:
    return read_section(BERTConfig, {"name": "bert", **SMALL, **config}, "model")


def make(seed: int = 0, **config: object) -> BERT:
    torch.manual_seed(seed)
    model = BERT(config_of(**config), VOCAB).double().eval()
    paper.spread_weights(model)
    return model


def draw(lengths: list[int], seed: int = 5) -> Tokens:
    torch.manual_seed(seed)
    tokens = Tokens.flat(torch.randint(VOCAB, (sum(lengths),)), torch.tensor(lengths))
    return Tokens(**{**vars(tokens), "segments": torch.randint(2, (sum(lengths),))})


def layers_of(w: Weights, config: BERTConfig, ids: Tensor, segments: Tensor) -> list[Tensor]:
    """Return the embeddings and each layer's output of one sequence, by the papers' equations."""
    x = w["embed.weight"][ids] + w["positions.table.weight"][config.offset + torch.arange(len(ids))]
    if config.segments:
        x = x + w["segments.weight"][segments if config.segments > 1 else torch.zeros_like(segments)]
    x = paper.layer_norm(below(w, "norm"), x)
    states = [paper.affine(w, "project", x) if config.embedding else x]
    kind = paper.Kind(config.heads, "post", config.activation)
    for layer in range(config.layers):
        held = below(w, f"encoder.blocks.{0 if config.shared else layer}")
        states.append(paper.block(held, kind, ("encoder", layer), states[-1]))
    return states


def reference(model: BERT, tokens: Tokens, config: BERTConfig) -> list[Tensor]:
    """Return all hidden states, pooled outputs and logits of a batch, computed one sequence at a time."""
    w = weights_of(model)
    rows = list(zip(tokens.split(), tokens.split(tokens.segments), strict=True))
    each = [layers_of(w, config, *row) for row in rows]
    last = torch.cat([states[-1] for states in each])
    first = torch.stack([states[-1][0] for states in each])
    act = {"tanh": torch.tanh, "relu": torch.relu, "gelu": lambda x: x * (1 + torch.erf(x / 2**0.5)) / 2}
    pooled = first if config.pooler == "none" else act[config.pooler](paper.affine(w, "pooler", first))
    near = F.gelu(paper.affine(w, "transform", last), approximate="tanh" if "tanh" in config.activation else "none")
    logits = paper.layer_norm(below(w, "transform_norm"), near) @ w["output.weight"].T + w["output.bias"]
    return [torch.stack([torch.cat(parts) for parts in zip(*each, strict=True)]), pooled, logits]


def check_against_reference(model: BERT, lengths: list[int], config: BERTConfig | None = None) -> None:
    tokens = draw(lengths)
    actual = [model.encode(tokens, model.mixable_layers), model.pooled_output(tokens), model.logits(tokens)]
    agree(actual, reference(model, tokens, config or model.config), dict(model.named_parameters()))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "bare"])
def test_each_of_the_family_is_its_equations(kind):
    check_against_reference(make(**KINDS[kind]), [4, 1, 19, 2])


@quick
@given(
    st.fixed_dictionaries(
        {
            "segments": st.integers(0, 3),
            "offset": st.integers(0, 3),
            "embedding": st.sampled_from([None, 5, 12]),
            "shared": st.booleans(),
            "pooler": st.sampled_from(["tanh", "relu", "gelu", "none"]),
            "activation": st.sampled_from(["gelu", "gelu-tanh"]),
            "layers": st.integers(1, 3),
        }
    ),
    st.lists(st.integers(1, 20), min_size=1, max_size=4),
)
def test_it_is_so_for_any_configuration_and_lengths(config, lengths):
    check_against_reference(make(**config), lengths)


@pytest.mark.parametrize("change", [{"offset": 1}, {"activation": "gelu-tanh"}, {"pooler": "relu"}, {"segments": 1}])
def test_another_configuration_is_caught(change):
    """Negative control: the reference gets another configuration."""
    with pytest.raises(AssertionError, match="not close"):
        check_against_reference(make(), [4, 7], config_of(**change))


@pytest.mark.usefixtures("narrow_bound")
@pytest.mark.parametrize("kind", KINDS)
def test_it_keeps_what_every_model_keeps(kind):
    passed = check_model(BERT, {**SMALL, **KINDS[kind]}, VOCAB)
    assert BERT.roles(config_of()) == {Role.ENCODER, Role.MASKED_LM}
    assert len(passed) == sum(needs <= {Role.ENCODER, Role.MASKED_LM, "masked"} for needs in PROPERTIES.values())


class Causal(BERT):
    """Broken: its attention is causal."""

    def __init__(self, *given):
        super().__init__(*given)
        for block in self.encoder.blocks:
            block.attention.causal = True


class Mingled(BERT):
    """Broken: sequences of a batch influence each other."""

    def _hidden_states(self, *args):
        return [state + state.max(0).values for state in super()._hidden_states(*args)]


@pytest.mark.usefixtures("wide_bound")
@pytest.mark.parametrize("kind", [Causal, Mingled])
def test_one_that_does_not_keep_it_is_caught(kind):
    """The negative control."""
    with pytest.raises(AssertionError, match="not so: "):
        check_model(kind, SMALL, VOCAB)


@pytest.mark.parametrize(
    ("preset", "vocab", "numbers"),
    [
        ("bert-tiny", 30522, 4_385_920),
        ("bert-mini", 30522, 11_170_560),
        ("bert-small", 30522, 28_763_648),
        ("bert-medium", 30522, 41_373_184),
        ("bert-base", 30522, 109_482_240),
        ("bert-large", 30522, 335_141_888),
        ("roberta-base", 50265, 124_645_632),
        ("roberta-large", 50265, 355_359_744),
        ("albert-base", 30000, 11_683_584),
        ("minilm", 30522, 22_713_216),
    ],
)
def test_the_presets_have_the_published_sizes(preset, vocab, numbers):
    """With the pooler and without the masked-LM head, as the papers' code counts."""
    with torch.device("meta"):
        model = BERT(read_section(BERTConfig, read_preset(preset), "model"), vocab)
    model.prune_unused({Role.ENCODER})
    assert sum(parameter.numel() for parameter in model.parameters()) == numbers


def test_shared_layers_are_one():
    model = make(shared=True, layers=5)
    names = {name for name in contents.weights(model) if name.startswith("encoder")}
    assert {name.split(".")[2] for name in names} == {"0"}
    assert len(model.layer_groups()) == 2
    with torch.no_grad():
        model.encoder.blocks[3].feed_forward.fc1.weight.zero_()
    assert not model.encoder.blocks[0].feed_forward.fc1.weight.any()
    with capture() as maps:
        model.encode(draw([4, 2]))
    assert {layer for _, layer in maps.weights} == set(range(5))


def test_what_a_task_does_not_need_is_dropped():
    model = make()
    model.prune_unused({Role.ENCODER})
    model.drop_pooler()
    assert not {name.split(".")[0] for name, _ in model.named_parameters()} & {"pooler", "transform", "output"}
    assert model.encode(draw([3])).shape == (1, 3, 12)


def test_the_loss_of_chosen_places_is_that_of_their_logits():
    model, tokens = make(), draw([4, 9, 2])
    at, targets = torch.tensor([0, 3, 8, 14, 0]), torch.tensor([1, 5, 2, 7, IGNORE_INDEX])
    loss, pooled = model.masked_lm_loss(tokens, at, targets)
    expected = F.cross_entropy(model.logits(tokens)[at], targets, ignore_index=IGNORE_INDEX, reduction="sum")
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(pooled, model.pooled_output(tokens))


def test_what_fills_a_batch_up_changes_nothing():
    model, tokens = make(), draw([4, 9, 2])
    filled = Batch(tokens).to_static_shape(StaticShape((24,), (12,), 6, 2)).tokens
    torch.testing.assert_close(model.encode(filled)[:, :15], model.encode(tokens))
    torch.testing.assert_close(model.pooled_output(filled)[:3], model.pooled_output(tokens))


def test_the_layer_groups_hold_all_but_what_stands_on_top():
    model = make(embedding=6)
    held = {id(weight) for group in model.layer_groups() for part in group for weight in part.parameters()}
    above = {name.split(".")[0] for name, weight in model.named_parameters() if id(weight) not in held}
    assert len(model.layer_groups()) == 3
    assert above == {"pooler", "transform", "transform_norm", "output"}


def test_what_cannot_be_is_refused():
    with pytest.raises(DataError, match="23 tokens, but the model has learned 22 positions"):
        make(offset=2).encode(draw([23]))
    with pytest.raises(ConfigError, match="layers: a bert has 0, the embeddings, to 2 here, but \\[3\\] is asked for"):
        make().encode(draw([2]), [3])
    with pytest.raises(RoleError, match="a bert fills what is masked, but 'forward' is asked for"):
        make().logits(draw([2]), direction="forward")
    with pytest.raises(ConfigError, match="layers that share their weights have the same heads"):
        config_of(shared=True, pruned_heads={"0": [1]})
    with pytest.raises(ConfigError, match="model.offset must be below model.max_positions"):
        config_of(offset=24)
