"""check_model holds for weft's models and a user's own, and each kind of broken model fails by the right property."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from pydantic import model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from weft import testing
from weft.config.schema import Named
from weft.errors import ConfigError
from weft.models.base import Model, Role
from weft.models.seq2seq.model import Seq2Seq, Seq2SeqConfig
from weft.testing import check_model, properties
from weft.tokens import Tokens


@dataclass(frozen=True)
class Sums:
    total: Tensor  # (B, D)
    count: Tensor  # (B, 1)

    def select(self, rows):
        return Sums(self.total[rows], self.count[rows])


class RunningConfig(Named):
    width: int = 6


class Running(Model):
    """A user's own: what follows is scored from the mean of all that was read."""

    Config: ClassVar[type[Named]] = RunningConfig

    def __init__(self, config: RunningConfig, vocab: int) -> None:
        super().__init__(config, vocab)
        self.width = config.width
        self.embed = nn.Embedding(vocab, config.width)
        self.output = nn.Linear(config.width, vocab)

    @classmethod
    def roles(cls, config):
        return {Role.ENCODER, Role.LANGUAGE_MODEL, Role.GENERATOR}

    def means(self, tokens: Tokens) -> Tensor:
        parts = tokens.split(self.embed(tokens.ids))
        return torch.cat([part.cumsum(0) / (1 + torch.arange(len(part)))[:, None] for part in parts])

    def encode(self, tokens, layers=(-1,)):
        return torch.stack([self.means(tokens) for _ in layers])

    def ends(self, tokens: Tokens) -> Tensor:
        return torch.stack([part[-1] for part in tokens.split(self.means(tokens))])

    def pooled_output(self, tokens):
        return self.ends(tokens)

    def logits(self, tokens, at=None):
        means = self.means(tokens)
        return self.output(means if at is None else means[at])

    def start(self, prompt, source=None):
        count = prompt.lengths[:, None]
        state = Sums(self.ends(prompt) * count, count)
        return self.output(state.total / state.count), state

    def step(self, ids, state):
        state = Sums(state.total + self.embed(ids), state.count + 1)
        return self.output(state.total / state.count), state


class Filling(Running):
    """Another: a place is filled from the mean of all the others."""

    @classmethod
    def roles(cls, config):
        return frozenset({Role.MASKED_LM})

    def means(self, tokens):
        parts = tokens.split(self.embed(tokens.ids))
        return torch.cat([(part.sum(0) - part) / max(len(part) - 1, 1) for part in parts])


class Answering(Running):
    """Another: the mean is moved by that of a source; it only generates."""

    @classmethod
    def roles(cls, config):
        return {Role.GENERATOR, Role.SEQ2SEQ}

    def start(self, prompt, source):
        asked = torch.stack([part.mean(0) for part in source.split(self.embed(source.ids))])
        state = Sums(super().start(prompt)[1].total + self.shift(asked), prompt.lengths[:, None])
        return self.output(state.total / state.count), state

    def shift(self, asked):
        return asked


@pytest.mark.usefixtures("narrow_bound")
@pytest.mark.parametrize(
    ("config", "target_vocab"),
    [
        ({"attention": "additive"}, None),
        ({"attention": "cosine"}, None),
        ({"attention": "location"}, None),
        ({"attention": "location", "locations": 3}, None),
        ({"attention": "general", "layers": 2}, 31),
        ({"attention": "dot", "bridge": False}, None),
        ({"attention": "scaled-dot"}, 31),
        ({"attention": "none"}, 11),
        ({"attention": "additive", "layers": 3, "tie": True, "dropout": 0.3}, 31),
        ({"attention": "none", "layers": 2, "tie": True, "bridge": False, "dropout": 0.3}, None),
    ],
)
def test_seq2seq_keeps_every_property(config, target_vocab):
    names = check_model(Seq2Seq, {"width": 8, **config}, target_vocab=target_vocab)
    elsewhere = [needs for needs in testing.PROPERTIES.values() if needs & {"backward", "both", "masked"}]
    assert len(names) == len(testing.PROPERTIES) - len(elsewhere)  # it is promised all that can be of what it reads


def test_models_of_the_users_own_are_checked_by_their_roles():
    encodes, fills, answers = check_model(Running), check_model(Filling, {"width": 4}), check_model(Answering)
    assert "future tokens change nothing" in encodes
    assert "future tokens change nothing" not in fills
    assert "the source matters" in answers
    assert set(fills) < set(encodes)
    assert "at gives the rows of the whole" not in answers


def test_a_config_may_be_given_whole_or_not_at_all():
    config = Seq2SeqConfig(name="mine", width=4)
    assert check_model(Seq2Seq, config, vocab=5, seed=3) == check_model(Seq2Seq, {"name": "mine", "width": 4}, vocab=5)


def test_a_wrong_config_is_refused_as_in_a_recipe():
    with pytest.raises(ConfigError, match=r"model\.widht: unknown key; did you mean 'width'\?"):
        check_model(Seq2Seq, {"widht": 4})


def test_the_callers_random_numbers_are_left_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    check_model(Running)
    assert torch.equal(torch.rand(3), expected)


# From here on, one mistake a model.


class Unstable(RunningConfig):
    @model_validator(mode="before")
    @classmethod
    def _grow(cls, raw):
        return {**raw, "width": raw.get("width", 6) + 1}


class GrowsItsConfig(Running):
    Config = Unstable


class SaysAnotherWidth(Running):
    def __init__(self, config, vocab):
        super().__init__(config, vocab)
        self.width += 1


class NamesItsRoles(Running):
    @classmethod
    def roles(cls, config):
        return frozenset({"encodes"})


class HasNaN(Running):
    def __init__(self, config, vocab):
        super().__init__(config, vocab)
        nn.init.constant_(self.output.bias, float("nan"))


class ScoresTooMany(Running):
    def logits(self, tokens, at=None):
        return F.pad(super().logits(tokens, at), (0, 1))


class IgnoresLayers(Running):
    def encode(self, tokens, layers=(-1,)):
        return super().encode(tokens)


class HasALooseParameter(Running):
    def __init__(self, config, vocab):
        super().__init__(config, vocab)
        self.loose = nn.Parameter(torch.ones(3))


class Detaches(Running):
    def means(self, tokens):
        return super().means(tokens).detach()


class HasANaNGradient(Running):
    def means(self, tokens):
        means = super().means(tokens)
        return means + (means - means).square().sum(-1, keepdim=True).sqrt()


class AlwaysDropsOut(Running):
    def means(self, tokens):
        return F.dropout(super().means(tokens), 0.5, training=True)


class KeepsATensorOfItsOwn(Running):
    def __init__(self, config, vocab):
        super().__init__(config, vocab)
        self.offset = torch.rand(config.width, dtype=torch.float64)

    def means(self, tokens):
        return super().means(tokens) + self.offset


class MixesTheBatch(Running):
    def means(self, tokens):
        means = super().means(tokens)
        return means - 0.01 * means.mean(0)


class SummarisesByTheBatch(Running):
    def pooled_output(self, tokens):
        summary = super().pooled_output(tokens)
        return summary / summary.norm()


class MixesWhatItFills(Filling):
    def means(self, tokens):
        return super().means(tokens) * len(tokens)


class CountsPadding(Running):
    def flops(self, tokens, source=None):
        return 2 * self.output.weight.numel() * tokens.longest * len(tokens)


class PeeksAtTheFuture(Running):
    def means(self, tokens):
        parts = tokens.split(self.embed(tokens.ids))
        return torch.cat([part.mean(0, keepdim=True).expand_as(part) for part in parts])


class PeeksAtTheLength(Running):
    def logits(self, tokens, at=None):
        scores = super().logits(tokens) * tokens.lengths.repeat_interleave(tokens.lengths)[:, None]
        return scores if at is None else scores[at]


class IgnoresAt(Running):
    def logits(self, tokens, at=None):
        return super().logits(tokens)


class CountsAtFromOne(Running):
    def logits(self, tokens, at=None):
        return super().logits(tokens, None if at is None else at - 1)


class IgnoresItsSource(Answering):
    def shift(self, asked):
        return asked * 0


class ForgetsTheCount(Running):
    def step(self, ids, state):
        return super().step(ids, replace(state, count=state.count - 1))


class StartsAtTheLongest(Running):
    def start(self, prompt, source=None):
        _, state = super().start(prompt)
        state = replace(state, count=torch.where(state.count > 6, state.count + 1, state.count))
        return self.output(state.total / state.count), state


@dataclass(frozen=True)
class Forgetful(Sums):
    def select(self, rows):
        return Forgetful(self.total[: len(rows)], self.count[rows]) if len(rows) <= len(self.total) else self


class ForgetsToReorder(Running):
    def start(self, prompt, source=None):
        logits, state = super().start(prompt)
        return logits, Forgetful(state.total, state.count)

    def step(self, ids, state):
        logits, after = super().step(ids, state)
        return logits, Forgetful(after.total, after.count)


class StepsInPlace(Running):
    def step(self, ids, state):
        state.total.add_(self.embed(ids))
        state.count.add_(1)
        return self.output(state.total / state.count), Sums(state.total.clone(), state.count.clone())


@dataclass(frozen=True)
class Moved(Sums):
    def select(self, rows):
        picked = Sums(self.total[rows], self.count[rows])
        self.total.zero_()
        return picked


class SelectsInPlace(Running):
    def start(self, prompt, source=None):
        logits, state = super().start(prompt)
        return logits, Moved(state.total, state.count)


@dataclass(frozen=True)
class Cache:
    """All hypotheses that come of one start write to one buffer, each row's next token at its own place."""

    buffer: Tensor  # (B, T)
    lengths: Tensor  # (B,)

    def select(self, rows):
        return Cache(self.buffer[rows], self.lengths[rows])


class SharesACache(Running):
    def start(self, prompt, source=None):
        buffer = torch.zeros(len(prompt), 32, dtype=torch.long)
        for row, ids in enumerate(prompt.split()):
            buffer[row, : len(ids)] = ids
        return super().start(prompt)[0], Cache(buffer, prompt.lengths)

    def step(self, ids, state):
        state.buffer[torch.arange(len(ids)), state.lengths] = ids
        after = Cache(state.buffer, state.lengths + 1)
        rows = [row[:length].tolist() for row, length in zip(after.buffer, after.lengths, strict=True)]
        return super().start(Tokens.pack(rows))[0], after


@pytest.mark.parametrize(
    ("kind", "broken", "told"),
    [
        (GrowsItsConfig, properties.the_config_reads_back_from_what_it_dumps, "width=8"),
        (NamesItsRoles, properties.the_roles_are_a_set_of_roles, "encodes"),
        (HasNaN, properties.every_parameter_is_finite, "output.bias is not"),
        (ScoresTooMany, properties.every_answer_has_its_shape, r"must be \(4, 23\), but is \(4, 24\)"),
        (IgnoresLayers, properties.every_answer_has_its_shape, r"encode of 4 tokens must be \(2, 4, 6\)"),
        (SaysAnotherWidth, properties.every_answer_has_its_shape, r"must be \(2, 4, 7\), but is \(2, 4, 6\)"),
        (HasALooseParameter, properties.every_parameter_gets_a_gradient, "loose gets no gradient"),
        (Detaches, properties.every_parameter_gets_a_gradient, "embed.weight gets no gradient"),
        (HasANaNGradient, properties.every_parameter_gets_a_gradient, "the gradient of embed.weight is not finite"),
        (
            AlwaysDropsOut,
            properties.the_same_input_twice_gives_the_same_answers,
            r"by [\d.]+ of its magnitude, where 0 is",
        ),
        (KeepsATensorOfItsOwn, properties.saved_weights_give_the_same_answers, r"differs by 0\.\d+"),
        (
            MixesTheBatch,
            properties.a_sequence_alone_answers_as_in_any_batch,
            r"by 0\.\d+ of its magnitude, where 1e-06 is",
        ),
        (SummarisesByTheBatch, properties.a_sequence_alone_answers_as_in_any_batch, "summary of sequence 0"),
        (MixesWhatItFills, properties.a_sequence_alone_answers_as_in_any_batch, "logits of sequence 0 in a batch of 4"),
        (
            CountsPadding,
            properties.the_flops_of_a_batch_are_those_of_its_sequences,
            "are 7728 for the batch, 4140 for",
        ),
        (PeeksAtTheFuture, properties.future_tokens_change_nothing, "before position 1, when the ids"),
        (PeeksAtTheLength, properties.future_tokens_change_nothing, "before position 1, when sequences end"),
        (IgnoresAt, properties.at_gives_the_rows_of_the_whole, r"must have the shape \(5, 23\), but has \(15, 23\)"),
        (CountsAtFromOne, properties.at_gives_the_rows_of_the_whole, "differs by"),
        (IgnoresItsSource, properties.the_source_matters, "start of sequence 0 is the same"),
        (ForgetsTheCount, properties.start_and_step_agree_with_reading_all_at_once, "step 1 differs by"),
        (StartsAtTheLongest, properties.start_and_step_agree_with_reading_all_at_once, "start differs by"),
        (ForgetsToReorder, properties.select_reorders_repeats_and_drops_rows, r"step after select\(\[2, 0, 3, 1\]\)"),
        (StepsInPlace, properties.a_state_is_a_value_that_nothing_changes, "a second step from a state"),
        (SelectsInPlace, properties.a_state_is_a_value_that_nothing_changes, "a selection from it differs by"),
        (SharesACache, properties.a_state_is_a_value_that_nothing_changes, "after a step from a sibling"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
@pytest.mark.usefixtures("wide_bound")
def test_a_broken_model_fails_by_the_right_property(kind, broken, told):
    name = broken.__name__.replace("_", " ")
    with pytest.raises(AssertionError, match=rf"^{kind.__name__}: not so: {name}: .*{told}.*Likely: ."):
        check_model(kind)


class ReadsFromTheWrongEnd(Running):
    @classmethod
    def roles(cls, config):
        return {Role.LANGUAGE_MODEL}

    @classmethod
    def directions(cls, config):
        return ("backward",)

    def logits(self, tokens, at=None, direction="backward"):
        return super().logits(tokens, at)


class SeesItself(ReadsFromTheWrongEnd):
    @classmethod
    def roles(cls, config):
        return {Role.MASKED_LM}

    @classmethod
    def directions(cls, config):
        return ("both",)


class SeesOneSide(SeesItself):
    def means(self, tokens):
        parts = tokens.split(super().means(tokens))
        return torch.cat([F.pad(part[:-1], (0, 0, 1, 0)) for part in parts])


@pytest.mark.usefixtures("wide_bound")
@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (ReadsFromTheWrongEnd, "past tokens change nothing: the logits from position 1 on, when the ids"),
        (SeesItself, "a position depends .* not on itself: the logits of position 0, when it changes, differs"),
        (SeesOneSide, "a position depends .* not on itself: position 0 does not depend on position 1"),
    ],
)
def test_a_model_of_another_direction_than_it_says_fails(kind, told):
    with pytest.raises(AssertionError, match=told):
        check_model(kind)


class LooksAtEveryonesSource(Answering):
    def shift(self, asked):
        return asked.mean(0)


@pytest.mark.usefixtures("wide_bound")
def test_the_sources_of_others_are_told_apart_from_ones_own():
    check = properties.the_sources_of_others_change_nothing
    testing.prove(check, testing.Case(Answering, RunningConfig(name="answering"), 23))
    with pytest.raises(AssertionError, match="start of sequence 0 differs by"):
        testing.prove(check, testing.Case(LooksAtEveryonesSource, RunningConfig(name="looks"), 23))


class PeeksALittle(Running):
    """What stands at the end of a sequence moves every score by a share of itself."""

    share: ClassVar[float]

    def means(self, tokens):
        parts = tokens.split(super().means(tokens))
        return torch.cat([part + self.share * part[-1] for part in parts])


@pytest.mark.parametrize(("share", "caught"), [(1e-15, False), (1e-6, True)])
def test_what_rounding_explains_is_no_difference_and_what_it_does_not_is(share, caught, monkeypatch):
    check = properties.future_tokens_change_nothing
    monkeypatch.setattr(PeeksALittle, "share", share, raising=False)
    case = testing.Case(PeeksALittle, RunningConfig(name="peeks"), 23)
    if not caught:
        testing.prove(check, case)
        return
    with pytest.raises(AssertionError, match="future tokens change nothing: .* differs by"):
        testing.prove(check, case)


class HardlyReadsItsSource(Answering):
    def shift(self, asked):
        return asked * 1e-14


def test_a_difference_that_rounding_explains_is_none():
    case = testing.Case(HardlyReadsItsSource, RunningConfig(name="hardly"), 23)
    before, after = (case.answers(case.rows, read)["start"] for read in (case.sources, case.other_sources))
    assert not torch.equal(torch.stack(before), torch.stack(after))
    with pytest.raises(AssertionError, match="the source matters: start of sequence 0 is the same"):
        testing.prove(properties.the_source_matters, case)


class Crashes(Running):
    def logits(self, tokens, at=None):
        raise IndexError("out of range")


def test_a_model_that_crashes_fails_with_its_own_error_as_the_cause():
    with pytest.raises(AssertionError, match="every answer has its shape: IndexError: out of range") as caught:
        check_model(Crashes)
    assert isinstance(caught.value.__cause__, IndexError)
