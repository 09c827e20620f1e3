"""Sequences that join and leave a running batch: each gets what it gets alone."""

import pytest
import torch

from weft.decoding.config import DecodingConfig
from weft.decoding.continuous import ContinuousBatch, GenerationRequest
from weft.decoding.generate import generate
from weft.models.gpt import GPT, GPTConfig
from weft.models.rnn import RNN, RNNConfig
from weft.models.seq2seq.model import Seq2Seq, Seq2SeqConfig
from weft.models.transformer import Transformer, TransformerConfig
from weft.nn.attention.pooled_kv_cache import PooledKVCache
from weft.tokens import Tokens

VOCAB, BOS, EOS = 23, 0, 1


def make_gpt():
    return GPT(GPTConfig(name="gpt", width=16, layers=2, heads=2, max_positions=160), VOCAB)


def make_transformer(**changes):
    config = TransformerConfig(name="transformer", width=16, layers=2, heads=2, ffn_width=32, **changes)
    return Transformer(config, VOCAB)


def make_seq2seq(**changes):
    return Seq2Seq(Seq2SeqConfig(name="seq2seq", width=12, **changes), VOCAB)


def make_rnn(**changes):
    return RNN(RNNConfig(name="rnn", width=12, layers=2, **changes), VOCAB)


MODELS = {
    "gpt": make_gpt,
    "transformer": make_transformer,
    "seq2seq": make_seq2seq,
    "fixed vector": lambda: make_seq2seq(attention="none"),
    "input feeding": lambda: make_seq2seq(attention="general", place="after", input_feeding=True),
    "location": lambda: make_seq2seq(attention="location"),
    "copying seq2seq": lambda: make_seq2seq(copying=True),
    "copying transformer": lambda: make_transformer(copying=True),
    "rnn": make_rnn,
    "gru": lambda: make_rnn(cell="gru"),
    "self-attentive": lambda: make_rnn(attention="dot"),
}


@pytest.fixture(params=MODELS)
def model(request):
    torch.manual_seed(0)
    model = MODELS[request.param]().eval()
    for parameter in model.parameters():  # sharp, varied distributions
        torch.nn.init.normal_(parameter, std=0.5)
    return model


OPTIONS = [
    {},
    {"sample": True, "seed": 3, "temperature": 1.5},
    {"sample": True, "seed": 4, "top_k": 5, "num_return_sequences": 3},
    {"beam": 3, "num_return_sequences": 2},
    {"min_length": 5},
    {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
    {"finish": True, "max_length": 5},
    {"beam": 4, "no_repeat_ngram_size": 2, "length_penalty": "average"},
]


def make_requests(model, count):
    generator = torch.Generator().manual_seed(1)
    requests = []
    for number in range(count):
        length = 1 + number * 7 % 11
        ids = torch.randint(2, VOCAB, (length,), generator=generator).tolist()
        options = DecodingConfig(**{"max_length": 6 + number % 9, **OPTIONS[number % len(OPTIONS)]})
        takes_source = isinstance(model, Seq2Seq | Transformer)
        prompt, source = ([BOS], Tokens.pack([ids])) if takes_source else ([BOS, *ids], None)
        requests.append(GenerationRequest(Tokens.pack([prompt]), EOS, options, source, forbid=(BOS,), row=number))
    return requests


def alone(model, request):
    with torch.no_grad():
        return generate(
            model,
            request.prompt,
            EOS,
            request.options,
            request.source,
            request.forbid,
            [request.row],
            request.bad_words,
        )[0]


def run(batch, groups, steps_between):
    """Let groups of requests join with some steps in between; return the search of each request, once all are done."""
    searches = []
    for group in groups:
        searches += batch.join(group)
        for _ in range(steps_between):
            batch.step()
    while batch.searches:
        batch.step()
    return searches


def check(searches, requests, model, step=1):
    """Compare every so many of the searches with those alone."""
    for search, request in list(zip(searches, requests, strict=True))[::step]:
        expected = alone(model, request)
        assert [own.ids for own in search.hypotheses()] == [own.ids for own in expected], request.options
        for own, other in zip(search.hypotheses(), expected, strict=True):
            assert own.score == pytest.approx(other.score, abs=1e-4)
            assert own.finished == other.finished


def test_each_gets_what_it_gets_alone_beside_63_others_and_joining_late(model):
    requests = make_requests(model, 64)
    groups = [requests[:1], requests[1:6], requests[6:40], requests[40:41], requests[41:]]
    check(run(ContinuousBatch(model), groups, steps_between=2), requests, model, step=5)  # all groups and options


def test_all_join_at_once(model):
    requests = make_requests(model, 9)
    check(run(ContinuousBatch(model), [requests], 0), requests, model)


def test_one_that_is_stopped_leaves_before_the_next_step(model):
    requests = make_requests(model, 8)
    batch = ContinuousBatch(model)
    searches = batch.join(requests)
    batch.step()
    stopped = next(search for search in searches if not search.done)
    stopped.stopped, rows = True, batch.rows
    others = [search for search in searches if search is not stopped]
    assert stopped not in batch.step()
    assert batch.rows < rows
    while batch.searches:
        batch.step()
    check(others, [search.request for search in others], model)
    assert batch.rows == 0


def test_log_probabilities_of_the_best_tokens_come_with_each_token(model):
    (request, *_) = make_requests(model, 1)
    batch = ContinuousBatch(model)
    (search,) = run(batch, [[GenerationRequest(**{**vars(request), "top_logprobs": 3})]], 0)
    (sequence,) = search.sequences
    assert len(sequence.top) == len(sequence.ids)
    for id, logprob, top in zip(sequence.ids, sequence.logprobs, sequence.top, strict=True):
        assert top[0] == (id, pytest.approx(logprob))  # greedily, it is the best
        assert len(top) == 3


class NotJoinable:
    """A generator whose state cannot be joined."""

    def __init__(self, model):
        self.model = model

    def start(self, prompt, source=None):
        logits, state = self.model.start(prompt, source)
        return logits, OnlySelect(state)

    def step(self, ids, state):
        logits, state = self.model.step(ids, state.state)
        return logits, OnlySelect(state)


class OnlySelect:
    def __init__(self, state):
        self.state = state

    def select(self, rows):
        return OnlySelect(self.state.select(rows))


def test_a_state_that_cannot_be_joined_is_one_batch_after_the_other():
    torch.manual_seed(0)
    model = make_rnn().eval()
    requests, batch = make_requests(model, 6), ContinuousBatch(NotJoinable(model))
    assert batch.can_join
    searches = batch.join(requests[:3])
    assert not batch.can_join
    while batch.searches:
        batch.step()
    assert batch.can_join
    searches += batch.join(requests[3:])
    while batch.searches:
        batch.step()
    check(searches, requests, model)


def test_rows_of_the_cache_are_used_again():
    torch.manual_seed(0)
    model = make_gpt().eval()
    batch = ContinuousBatch(model)
    sizes = []
    for _ in range(4):
        requests = make_requests(model, 16)
        run(batch, [requests[:8]], 3)
        searches = batch.join(requests[8:])
        searches += batch.join(requests[:8])
        assert isinstance(batch._state, PooledKVCache)
        while batch.searches:
            state = batch._state
            batch.step()
        sizes.append(state.storage.rows)
    assert len(set(sizes)) == 1


def test_rows_that_are_given_to_two_hypotheses_are_noticed(monkeypatch):
    torch.manual_seed(0)
    model = MODELS["gpt"]().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    monkeypatch.setattr(PooledKVCache, "_assign_rows", lambda cache, kept, families: (cache.rows[0],) * len(kept))
    requests = make_requests(model, 16)
    with pytest.raises(AssertionError):
        check(run(ContinuousBatch(model), [requests[:3], requests[3:]], 2), requests, model)
