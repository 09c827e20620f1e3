"""The search with static state, step by step without a graph, against the search whose states are values.

On CUDA, the graphs against both, and the Triton kernels against the eager implementation.
"""

import gc
import weakref
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from weft.decoding import cuda_graph, static_state
from weft.decoding import generate as generation
from weft.decoding.beam_search import Beam, Hypothesis
from weft.decoding.config import DecodingConfig
from weft.decoding.cuda_graph import PaddedSizes, round_up_size
from weft.decoding.generate import generate
from weft.decoding.static_state import BeamState, DecodingState, GreedyRules, GreedyState
from weft.errors import ConfigError, DataError, WeftError
from weft.models.transformer import Transformer, TransformerConfig
from weft.nn.attention.capture import capture
from weft.nn.attention.kv_cache import StaticKVCache
from weft.nn.kernels import dispatch
from weft.tokens import Tokens

EOS = 0
NEVER = float("-inf")
steady = settings(max_examples=50, deadline=None, derandomize=True)
needs_gpu = pytest.mark.skipif(
    not (torch.cuda.is_available() and dispatch.has_triton()), reason="needs CUDA and Triton"
)


@pytest.fixture(autouse=True, scope="module")
def small() -> Iterator[None]:
    """Small capacities and a poll each step, so that searches outgrow the one and act on the other."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"INITIAL_CAPACITY": 4, "MAX_INITIAL_TOKENS": 8, "MIN_ROWS": 2, "POLL_INTERVAL": 1}.items():
            patch.setattr(cuda_graph, name, value)
        yield


def in_place(*args: Any, **named: Any) -> list[list[Hypothesis]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation, "capturable", lambda model, prompt: True)
        return generate(*args, **named)


def make_model(seed: int = 0, sharp: float = 4.0, **config: Any) -> Transformer:
    torch.manual_seed(seed)
    chosen = {"width": 8, "heads": 2, "layers": 1, "ffn_width": 8, **config}
    model = Transformer(TransformerConfig(name="transformer", **chosen), 9, 7).double().eval()
    with torch.no_grad():
        model.output.weight.mul_(sharp)  # so that texts end, and differ
    return model.requires_grad_(False)


MODELS = [
    make_model(0),
    make_model(1, norm="pre", positions="learned", max_positions=40),
    make_model(2, pruned_heads={"0": [1]}),
]


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tokens, Tokens]:
    """Prompts of any length and a source each."""
    rows, longest = draw(st.integers(1, 6)), draw(st.sampled_from([1, 3]))
    prompts = [draw(st.lists(st.integers(0, 6), min_size=1, max_size=longest)) for _ in range(rows)]
    sources = [draw(st.lists(st.integers(0, 8), min_size=1, max_size=5)) for _ in range(rows)]
    return Tokens.pack(prompts), Tokens.pack(sources)


@st.composite
def options(draw: st.DrawFn) -> DecodingConfig:
    method = draw(st.sampled_from(["greedy", "sample", "beam"]))
    beam, longest = draw(st.integers(2, 5)) if method == "beam" else 1, draw(st.integers(1, 14))
    return DecodingConfig(
        beam=beam,
        sample=method == "sample",
        num_return_sequences=draw(st.integers(1, {"greedy": 1, "sample": 3, "beam": beam}[method])),
        length_penalty=draw(st.sampled_from(["none", "gnmt", "average"])),
        max_length=longest,
        min_length=draw(st.integers(0, longest)),
        temperature=draw(st.sampled_from([0.7, 1.0])),
        top_k=draw(st.sampled_from([None, 3])),
        top_p=draw(st.sampled_from([None, 0.8])),
    )


def assert_same(hypotheses: list[list[Hypothesis]], must: list[list[Hypothesis]], tolerance: float = 1e-9) -> None:
    results = [[[(text.ids, text.finished) for text in group] for group in groups] for groups in (hypotheses, must)]
    assert results[0] == results[1]
    for actual, expected in zip(chain(*hypotheses), chain(*must), strict=True):
        assert actual.logprob == pytest.approx(expected.logprob, abs=tolerance)
        assert actual.score == pytest.approx(expected.score, abs=tolerance)


class TestSearch:
    @steady
    @given(st.sampled_from(MODELS), batches(), options(), st.lists(st.integers(0, 6), max_size=2), st.booleans())
    def test_finds_what_the_search_with_values_finds(
        self,
        model: Transformer,
        batch: tuple[Tokens, Tokens],
        chosen: DecodingConfig,
        forbid: list[int],
        inference: bool,
    ) -> None:
        prompt, source = batch
        must = generate(model, prompt, EOS, chosen, source, forbid)
        with torch.inference_mode(inference):
            assert_same(in_place(model, prompt, EOS, chosen, source, forbid), must)

    batch = Tokens.pack([[1], [2], [3], [4], [5]]), Tokens.pack([[1, 2], [3], [4, 5, 6], [7, 8], [2]])

    @pytest.mark.parametrize(
        ("owner", "name", "wrong"),
        [
            (StaticKVCache, "select", lambda self, rows: self),  # hypotheses keep their own keys and values
            (DecodingState, "copy_from", lambda self, other, groups: None),  # a group that moves forgets its tokens
            (BeamState, "reset", lambda self: None),  # the state of the last search is kept
            (
                cuda_graph,
                "_weight_addresses",
                lambda model: (),
            ),  # new weights are taken for the old ones
        ],
    )
    def test_what_is_forgotten_or_kept_wrongly_is_caught(
        self, owner: Any, name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The negative control; without the fault it holds."""
        chosen = DecodingConfig(beam=3, num_return_sequences=3, max_length=12)

        def searches() -> None:
            model = make_model(5)
            for batch in (self.batch, (self.batch[0], Tokens.pack([[8]] * 5))):
                must = generate(model, batch[0], EOS, chosen, batch[1])
                assert_same(in_place(model, batch[0], EOS, chosen, batch[1]), must)
            steps, model.output.weight = (
                list(cuda_graph._graph_cache[model]),
                nn.Parameter(model.output.weight.clone() * 0.1),
            )
            in_place(model, *self.batch[:1], EOS, chosen, self.batch[1])
            assert not set(steps) & set(cuda_graph._graph_cache[model])

        searches()
        monkeypatch.setattr(owner, name, wrong)
        with pytest.raises(AssertionError):
            searches()

    def test_groups_that_are_done_leave_and_the_rest_moves_to_a_smaller_turn(self) -> None:
        model, (prompt, source), chosen = make_model(31), self.batch, DecodingConfig(max_length=30)
        must = generate(model, prompt, EOS, chosen, source)
        assert [len(group[0].ids) for group in must] == [1, 0, 30, 1, 7]
        assert_same(in_place(model, prompt, EOS, chosen, source), must)
        assert {step.groups for step in cuda_graph._graph_cache[model]} == {6, 2, 1}

    def test_a_turn_serves_the_next_batch_of_about_its_size(self) -> None:
        model, chosen = make_model(7), DecodingConfig(beam=2, min_length=3, max_length=3)
        for rows in (5, 6, 5):
            prompt, source = Tokens.pack([[1]] * rows), Tokens.pack([[row, 2] for row in range(rows)])
            assert_same(in_place(model, prompt, EOS, chosen, source), generate(model, prompt, EOS, chosen, source))
            assert len(cuda_graph._graph_cache[model]) == 1

    def test_not_too_many_turns_are_kept_and_none_outlives_its_model(self) -> None:
        model = make_model(8)
        for width in range(2, cuda_graph.CACHE_SIZE + 4):
            in_place(model, self.batch[0], EOS, DecodingConfig(beam=width, min_length=2, max_length=2), self.batch[1])
        assert len(cuda_graph._graph_cache[model]) == cuda_graph.CACHE_SIZE
        step = weakref.ref(cuda_graph._graph_cache[model][0])
        del model
        gc.collect()
        assert step() is None

    def test_weights_that_change_in_place_count(self) -> None:
        model, chosen, (prompt, source) = make_model(9), DecodingConfig(beam=3, max_length=9), self.batch
        in_place(model, prompt, EOS, chosen, source)
        with torch.no_grad():
            model.output.weight.mul_(-1)
        assert_same(in_place(model, prompt, EOS, chosen, source), generate(model, prompt, EOS, chosen, source))

    @pytest.mark.parametrize(
        "chosen", [DecodingConfig(beam=2, min_length=20, max_length=20), DecodingConfig(min_length=20, max_length=20)]
    )
    def test_a_text_beyond_the_learned_positions_is_refused(self, chosen: DecodingConfig) -> None:
        model, (prompt, source) = make_model(positions="learned", max_positions=7), self.batch
        for search in (generate, in_place):
            with pytest.raises(DataError, match="8 tokens, but the model has learned 7 positions"):
                search(model, prompt, EOS, chosen, source)
        short = chosen.model_copy(update={"min_length": 7, "max_length": 7})
        assert_same(in_place(model, prompt, EOS, short, source), generate(model, prompt, EOS, short, source))

    def test_groups_leave_though_the_room_is_all_that_was_learned(self) -> None:
        model, chosen = make_model(8, positions="learned", max_positions=8), DecodingConfig(beam=2, max_length=8)
        prompt = Tokens.pack([[1]] * 12)
        source = Tokens.pack([[1 + number % 8] * (1 + number % 5) for number in range(12)])
        assert_same(in_place(model, prompt, EOS, chosen, source), generate(model, prompt, EOS, chosen, source))

    @pytest.mark.parametrize("chosen", [DecodingConfig(beam=2, max_length=5), DecodingConfig(max_length=5)])
    def test_what_is_not_a_number_is_told(self, chosen: DecodingConfig) -> None:
        model, (prompt, source) = make_model(3), self.batch
        model.output.weight.fill_(float("nan"))
        with pytest.raises(WeftError, match="not numbers"):
            in_place(model, prompt, EOS, chosen, source)

    def test_an_id_that_is_not_there_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="vocabulary"):
            in_place(make_model(3), self.batch[0], 99, DecodingConfig(max_length=5), self.batch[1])

    def test_nothing_is_captured_on_the_cpu(self) -> None:
        assert not cuda_graph.capturable(make_model(), self.batch[0])


class TestTexts:
    @given(st.integers(1, 5000))
    def test_few_sizes_serve_all_counts(self, count: int) -> None:
        assert count <= round_up_size(count) <= max(count * 3 // 2, count + 1)
        assert len({round_up_size(size) for size in range(1, count + 1)}) <= 2 * count.bit_length()

    @steady
    @given(st.lists(st.lists(st.integers(0, 8), max_size=90), min_size=1, max_size=9), st.sampled_from([None, 90, 100]))
    def test_what_is_filled_up_holds_the_texts_first(self, sources: list[list[int]], reads: int | None) -> None:
        prompt, source = Tokens.pack([[1, 2]] * len(sources)), Tokens.pack(sources)
        texts = PaddedSizes.of(prompt, source, reads)
        prompts, filled = texts.pad(prompt, source)
        assert filled is not None
        assert [ids.tolist() for ids in filled.split()][: len(sources)] == sources
        assert [ids.tolist() for ids in prompts.split()][: len(sources)] == [[1, 2]] * len(sources)
        assert len(prompts) == len(filled) == texts.rows >= texts.prompts >= len(sources)
        assert len(filled.ids) == texts.tokens
        assert source.longest <= int(filled.lengths.max()) <= filled.longest == texts.longest or not len(source.ids)
        assert texts.longest <= (reads or 10**9)


def beam_of(width: int, keep: int) -> Beam:
    penalty = DecodingConfig(beam=2).penalty
    return Beam(eos=2, width=width, keep=keep, max_length=6, penalty=penalty, min_length=2, forbid=(1,))


def make_states(kind: Any, rules: Any, logits: Tensor, groups: int) -> list[Any]:
    states = [kind(rules, logits, groups, 8) for _ in range(2)]
    for state in states:
        state.set_rules(rules, torch.arange(groups - 1, device=logits.device))
        state.reset()
    return states


def assert_states_equal(actual: Any, expected: Any) -> None:
    alive = (
        actual.logprob != NEVER if isinstance(actual, BeamState) else torch.ones_like(actual.token, dtype=torch.bool)
    )
    for mine, theirs in zip(actual.group_tensors, expected.group_tensors, strict=True):
        if mine.is_floating_point():
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
        elif mine.shape == alive.shape:
            assert torch.equal(mine[alive], theirs[alive])
        elif mine.dim() == 3:
            at = int(actual.written[0]) - 1
            assert torch.equal(mine[:, at][alive], theirs[:, at][alive])
        else:
            assert torch.equal(mine, theirs)
    assert torch.equal(actual.row[alive], expected.row[alive])


@needs_gpu
class TestCuda:
    @pytest.mark.parametrize(
        ("vocab", "width", "keep", "groups"),
        [(7, 3, 2, 2), (7, 9, 9, 2), (3000, 5, 3, 4), (32000, 5, 1, 32), (50, 16, 4, 2), (100_000, 4, 2, 3)],
    )
    def test_the_kernels_keep_a_board_as_it_is_kept_without_them(
        self, vocab: int, width: int, keep: int, groups: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        torch.manual_seed(0)
        like = torch.zeros(groups * width, vocab, device="cuda")
        rules = GreedyRules(2, 6, DecodingConfig().penalty, 2, (1,))
        pairs = [
            make_states(BeamState, beam_of(width, keep), like, groups),
            make_states(GreedyState, rules, like, groups * width),
        ]
        for _ in range(6):
            logits = torch.randn_like(like) * 2
            logits[:, 2] += 3
            for kernels, plain in pairs:
                with torch.no_grad():
                    kernels.choose(logits)
                    with monkeypatch.context() as patch:
                        patch.setattr(static_state, "decodes_on_triton", lambda x: False)
                        plain.choose(logits)
                assert_states_equal(plain, kernels)

    @pytest.mark.parametrize(
        "config", [{}, {"norm": "pre", "positions": "learned", "max_positions": 100, "activation": "gelu"}]
    )
    @pytest.mark.parametrize(
        "chosen",
        [
            DecodingConfig(beam=5, num_return_sequences=3, max_length=70),
            DecodingConfig(beam=2, max_length=9, min_length=3),
            DecodingConfig(max_length=70),
            DecodingConfig(sample=True, num_return_sequences=3, max_length=20, top_k=8, top_p=0.9, temperature=0.8),
        ],
    )
    def test_the_graphs_find_what_the_search_with_values_finds(
        self, config: dict[str, Any], chosen: DecodingConfig
    ) -> None:
        torch.manual_seed(0)
        shape = {"width": 64, "heads": 4, "layers": 2, "ffn_width": 96, **config}
        model = Transformer(TransformerConfig(name="transformer", **shape), 40, 30).cuda().eval().requires_grad_(False)
        model.output.weight.mul_(20)
        for rows in (1, 7, 40, 7):
            sources = [torch.randint(40, (1 + 3 * row % 90,)).tolist() for row in range(rows)]
            prompt = Tokens.pack([torch.randint(3, 30, (1 + row % 3,)).tolist() for row in range(rows)]).to("cuda")
            source = Tokens.pack(sources).to("cuda")
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(generation, "capturable", lambda model, prompt: False)
                must = generate(model, prompt, 2, chosen, source, [1])
            assert cuda_graph.capturable(model, prompt)
            assert_same(generate(model, prompt, 2, chosen, source, [1]), must, 2e-4)  # of logits up to 100

    def test_in_half_precision_what_is_found_is_as_probable_as_is_said(self) -> None:
        torch.manual_seed(0)
        model = Transformer(TransformerConfig(name="transformer", layers=2), 500).cuda().eval().requires_grad_(False)
        source = Tokens.pack([torch.randint(3, 500, (5 + row,)).tolist() for row in range(33)]).to("cuda")
        prompt, half = Tokens.pack([[1]] * 33).to("cuda"), model.bfloat16()
        for _ in range(2):  # the second time all is captured, the reading of the source too
            hypotheses = generate(half, prompt, 2, DecodingConfig(beam=4, min_length=20, max_length=20), source)
        read = Tokens.pack([(1, *group[0].ids[:-1]) for group in hypotheses]).to("cuda")
        logits = model.float().logits(read, source).log_softmax(-1)
        must = logits.gather(1, torch.tensor([id for group in hypotheses for id in group[0].ids]).cuda()[:, None])
        for group, exact in zip(hypotheses, read.split(must), strict=True):
            assert group[0].logprob == pytest.approx(float(exact.sum()), abs=0.5)

    def test_nobody_looks_and_nothing_is_dropped_in_a_graph(self) -> None:
        model, prompt = make_model().cuda(), Tokens.pack([[1]]).to("cuda")
        assert cuda_graph.capturable(model, prompt)
        with capture():
            assert not cuda_graph.capturable(model, prompt)
        with torch.autocast("cuda", torch.bfloat16):
            assert not cuda_graph.capturable(model, prompt)
        assert not cuda_graph.capturable(model.train(), prompt)
