"""Transformer-XL against its equations, query by query; its memory: cuts, lengths, gradients, generation, resume."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import transformer_equations as paper
from tests.equations import Weights, agree, below, weights_of
from torch import Tensor

import weft
from weft.config.schema import read_section
from weft.errors import ConfigError, RoleError
from weft.models.base import Role
from weft.models.transformer_xl import TransformerXL, TransformerXLConfig, XLMemory, relative_shift
from weft.nn.attention.capture import capture
from weft.testing import PROPERTIES, check_model
from weft.tokens import Tokens

quick = settings(deadline=None, derandomize=True, max_examples=12)
VOCAB, RAGGED = 13, [4, 1, 6, 2]
SMALL = {"width": 12, "heads": 3, "layers": 2, "ffn_width": 20, "mem_len": 3}


def config_of(**config: object) -> TransformerXLConfig:
    return read_section(TransformerXLConfig, {"name": "transformer-xl", **SMALL, **config}, "model")


def make(seed: int = 0, **config: object) -> TransformerXL:
    """Return a model in which no weight is zero or one, or equal to another."""
    torch.manual_seed(seed)
    model = TransformerXL(config_of(**config), VOCAB).double().eval()
    paper.spread_weights(model)
    return model


def draw(lengths: list[int], seed: int = 5) -> Tokens:
    torch.manual_seed(seed)
    return Tokens.flat(torch.randint(VOCAB, (sum(lengths),)), torch.tensor(lengths))


def head_of(w: Weights, head: int, size: int, q: Tensor, keys: Tensor, behind: list[Tensor]) -> Tensor:
    """Section 3.3 for one query and one head: the four terms for each key, softmax, and the mean of the values."""
    rows = slice(head * size, (head + 1) * size)
    W_q, W_kR = w["q_proj.weight"][rows], w["r_proj.weight"][rows]
    W_kE, W_v = (half[rows] for half in w["kv_proj.weight"].chunk(2))
    u, v = w["content_bias"][head], w["position_bias"][head]
    query = W_q @ q
    scores = [
        query @ (W_kE @ key) + query @ (W_kR @ R) + u @ (W_kE @ key) + v @ (W_kR @ R)
        for key, R in zip(keys, behind, strict=True)
    ]
    exps = torch.exp(torch.stack(scores) / size**0.5)
    return (exps / exps.sum()) @ torch.stack([W_v @ key for key in keys])


def reference(model: TransformerXL, ids: Tensor, segment: int | None = None) -> Tensor:
    """Return the logits of one text, in segments whose states get no gradient from later ones."""
    config, w = model.config, weights_of(model)
    size, R = config.width // config.heads, model.positions(torch.arange(len(ids) + 1)).double()
    x = w["embed.weight"][ids] * config.width**0.5
    for layer in range(config.layers):
        own = below(w, f"blocks.{layer}")
        rows = []
        for here in range(len(ids)):
            first = max(0, here - config.mem_len)
            begin = here // segment * segment if segment else 0
            keys = [x[at].detach() if at < begin else x[at] for at in range(first, here + 1)]
            behind = [R[here - at] for at in range(first, here + 1)]
            heads = [
                head_of(below(own, "attention"), head, size, x[here], torch.stack(keys), behind)
                for head in range(config.heads)
            ]
            rows.append(own["attention.out_proj.weight"] @ torch.cat(heads))
        x = paper.layer_norm(below(own, "attention_residual.norm"), x + torch.stack(rows))
        fed = paper.feed(below(own, "feed_forward"), paper.Kind(config.heads), x)
        x = paper.layer_norm(below(own, "feed_forward_residual.norm"), x + fed)
    return x @ w["output.weight"].T


def read_in_segments(model: TransformerXL, tokens: Tokens, sizes: list[int]) -> Tensor:
    """Return the logits of one text that is read on from segment to segment."""
    state, parts = None, []
    for ids in tokens.ids.split(sizes):
        logits, state = model.read(Tokens.flat(ids, torch.tensor([len(ids)])), state)
        state = model.carried(state)
        parts.append(logits)
    return torch.cat(parts)


# The equations.


@pytest.mark.parametrize("config", [{}, {"mem_len": 20, "tie": False}, {"heads": 1, "layers": 1}], ids=str)
def test_it_is_its_equations(config):
    model, tokens = make(**config), draw(RAGGED)
    expected = torch.cat([reference(model, ids) for ids in tokens.split()])
    agree([model.logits(tokens)], [expected], dict(model.named_parameters()))


def test_a_memory_is_attended_to_without_a_gradient():
    """Section 3.2: values and gradients by each parameter are those of the equations with SG."""
    model, tokens = make(mem_len=5), draw([10])
    sizes, by = [4, 4, 2], dict(model.named_parameters())
    agree([read_in_segments(model, tokens, sizes)], [reference(model, tokens.ids, segment=4)], by)
    with pytest.raises(AssertionError, match="gradient by"):  # negative control
        agree([read_in_segments(model, tokens, sizes)], [reference(model, tokens.ids)], by)


@pytest.mark.parametrize("name", ["content_bias", "position_bias", "r_proj.weight"])
def test_a_term_that_is_left_out_is_caught(name):
    """Negative control: the reference without u, v or W_kR is another one."""
    model, tokens = make(), draw([6])
    before = model.logits(tokens)
    with torch.no_grad():
        model.blocks[0].attention.get_parameter(name).zero_()
    with pytest.raises(AssertionError):
        torch.testing.assert_close(before, reference(model, tokens.ids))


def test_positions_are_sinusoids_of_the_distance():
    distances = make().positions(torch.arange(40)).double()
    torch.testing.assert_close(distances, paper.positions(40, 12), rtol=0, atol=1e-5)


@quick
@given(st.integers(1, 6), st.integers(0, 5))
def test_the_shift_gives_each_pair_the_score_of_its_distance(steps, past):
    keys = steps + past
    scores = torch.randn(2, steps, keys)
    shifted = relative_shift(scores)
    for query in range(steps):
        for key in range(past + query + 1):
            distance = past + query - key
            assert torch.equal(shifted[:, query, key], scores[:, query, keys - 1 - distance])


# The memory.


@torch.no_grad()
@quick
@given(st.lists(st.integers(1, 7), min_size=1, max_size=5), st.integers(0, 9))
def test_where_a_text_is_cut_changes_nothing(sizes, mem_len):
    model, tokens = make(mem_len=mem_len), draw([sum(sizes)])
    torch.testing.assert_close(read_in_segments(model, tokens, sizes), model.logits(tokens), rtol=0, atol=1e-11)


@torch.no_grad()
def test_ragged_texts_are_read_on_each_by_itself():
    model, sizes = make(mem_len=4), [[3, 1, 6], [5, 2, 1], [1, 4, 2]]
    texts = draw([sum(row) for row in zip(*sizes, strict=True)]).split()
    state, parts = None, [[] for _ in texts]
    for number, lengths in enumerate(sizes):
        starts = [sum(part[row] for part in sizes[:number]) for row in range(3)]
        segment = Tokens.pack([text[a : a + n].tolist() for text, a, n in zip(texts, starts, lengths, strict=True)])
        logits, state = model.read(segment, state)
        for part, rows in zip(parts, segment.split(logits), strict=True):
            part.append(rows)
    for text, part in zip(texts, parts, strict=True):
        torch.testing.assert_close(torch.cat(part), model.logits(Tokens.pack([text.tolist()])), rtol=0, atol=1e-11)
    assert [part.shape[1] for part in state.parts] == [4, 4, 4]  # no more than mem_len is kept


@torch.no_grad()
def test_a_layer_sees_mem_len_positions_back_and_a_longer_memory_more():
    tokens = draw([12])
    changed = Tokens.flat(torch.cat([(tokens.ids[:1] + 1) % VOCAB, tokens.ids[1:]]), tokens.lengths)
    for mem_len in (1, 3):
        model = make(mem_len=mem_len)
        differs = (model.logits(tokens) - model.logits(changed)).abs().amax(1) > 1e-9
        assert differs.nonzero().flatten().tolist() == list(range(2 * mem_len + 1))  # of two layers


@torch.no_grad()
def test_memories_are_joined_and_chosen_by_row():
    model = make(mem_len=4)
    short, long = draw([2]), draw([7], seed=6)
    joined = model.start(short)[1].join(model.start(long)[1])
    ids = torch.tensor([3, 5])
    logits, _ = model.step(ids, joined.select(torch.tensor([1, 0])))
    for row, text in enumerate((long, short)):
        alone, _ = model.step(ids[row : row + 1], model.start(text)[1])
        torch.testing.assert_close(logits[row : row + 1], alone)
    assert isinstance(joined, XLMemory)
    assert joined.padding.tolist() == [[True, True, False, False], [False] * 4]


# What every model keeps.


@pytest.mark.parametrize("mem_len", [0, 2, 40])
def test_it_keeps_what_every_model_keeps(mem_len):
    roles = {Role.ENCODER, Role.LANGUAGE_MODEL, Role.GENERATOR}
    passed = check_model(TransformerXL, {**SMALL, "mem_len": mem_len}, VOCAB)
    assert TransformerXL.roles(config_of()) == roles
    assert len(passed) == sum(needs <= {*roles, "forward"} for needs in PROPERTIES.values())


class Forgets(TransformerXL):
    """Broken: the memory is as if it were empty."""

    def read(self, tokens, state=None):
        return super().read(tokens)


@pytest.mark.usefixtures("wide_bound")
def test_one_that_forgets_is_caught():
    with pytest.raises(AssertionError, match="not so: .* differs by"):
        check_model(Forgets, SMALL, VOCAB)


@torch.no_grad()
def test_layers_attention_and_errors():
    model, tokens = make(), draw([5, 3])
    states = model.encode(tokens, (0, 2, -1))
    assert torch.equal(states[1], states[2])
    assert torch.equal(model.output(states[1]), model.logits(tokens))
    assert torch.equal(model.pooled_output(tokens), states[1][[4, 7]])
    with capture() as maps:
        model.logits(tokens)
    (weights,) = maps.weights["decoder", 1]
    assert weights.shape == (2, 3, 5, 5)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 5), check_dtype=False)
    assert not weights[:, :, 4, 0].any()  # beyond mem_len
    with pytest.raises(ConfigError, match=r"this transformer-xl has 0, the embeddings, to 2"):
        model.encode(tokens, [3])
    with pytest.raises(ConfigError, match="got 5 and 12; try"):
        config_of(heads=5)
    with pytest.raises(RoleError, match="reads forward, but 'backward'"):
        model.logits(tokens, direction="backward")


def test_a_training_resumes_to_the_bit_and_evaluates_with_a_longer_memory(tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(f"the {word} sat on the {word} mat" for word in "abcdefghijklmnop") * 3)
    recipe = {
        "task": {"name": "lm", "bptt": 6},
        "data": {"train": str(tmp_path / "a.txt"), "valid": str(tmp_path / "a.txt")},
        "tokenizer": {"name": "bytes"},
        "model": {"name": "transformer-xl", **SMALL},
        "train": {"steps": 7, "batch_tokens": 48, "lr": 0.01, "save_every": 4, "eval_every": 7},
    }
    whole = weft.train(recipe, out=tmp_path / "whole")
    weft.train(recipe, ["train.steps=4"], out=tmp_path / "parts")
    resumed = weft.train(recipe, out=tmp_path / "parts", resume=True)
    pairs = zip(resumed.head.parameters(), whole.head.parameters(), strict=True)
    assert all(torch.equal(own, other) for own, other in pairs)
    longer = weft.load(tmp_path / "whole", overrides=["model.mem_len=30"])
    assert longer.evaluate()["perplexity"] != whole.evaluate()["perplexity"]
    assert longer("the", {"max_length": 4, "seed": 1})[0]["text"]
