"""Masked language modelling: predict masked tokens from all others, by any masked language model.

`weft.tasks.mlm.masking` chooses the tokens, anew in each epoch. What a sequence is (`task.sequences`):

| sequences   | a sequence is                                                                          |
|-------------|----------------------------------------------------------------------------------------|
| `windows`   | `data.max_length` tokens of the concatenated documents (RoBERTa); with `next_sentence` |
|             | bos A eos B eos from one document or two, of at most as many tokens (BERT)             |
| `documents` | a text                                                                                 |

`data.max_length` counts bos and eos. With `next_sentence`, by default if the model has segment embeddings, it also
predicts whether B follows A (`weft.data.batching.mlm_sequences`).

A question is a text with masks, "[MASK]" or the tokenizer's own; the answer has the best tokens for each.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field

from weft.config.schema import Named, Run, Share, position_remedy
from weft.data.batching.lm_stream import Spans, SpanSampler, SpanSource
from weft.data.batching.loader import plan_batches
from weft.data.batching.mlm_sequences import (
    BoundaryTokens,
    DocumentStream,
    MLMWindows,
    SentencePairs,
    SequenceStream,
    join_pairs,
)
from weft.data.batching.packed_items import PackedItems
from weft.data.batching.static_shape import StaticShape
from weft.data.corpus.format import CorpusSplit
from weft.data.truncation import TruncationPolicy
from weft.errors import ConfigError, DataError
from weft.models.base import Role
from weft.registry import resolve
from weft.tasks import base
from weft.tasks.base import Answer
from weft.tasks.batch import IGNORE_INDEX, Batch, Item
from weft.tasks.capabilities import Metrics, PreparedEvaluation, StreamReading, TeacherForcing
from weft.tasks.encoding import EvaluationData
from weft.tasks.head import Head
from weft.tasks.lm.scoring import device_of
from weft.tasks.mlm.cloze import MASK, Blanks
from weft.tasks.mlm.head import FillMaskConfig, MaskPredictions, MLMHead
from weft.tasks.mlm.masking import MaskingVocabulary, choose_positions, mask_tokens, max_chosen_tokens
from weft.tokenization.trainable import Tokenizer
from weft.tokens import Specials, Tokens

EVALUATION_BATCH_TOKENS = 1 << 13  # constant, so that the masks do not depend on the machine
PSEUDO_TOKENS = 1 << 16  # read for the pseudo-perplexity in evaluation, a text once for each of its tokens
POSITIONS_MULTIPLE = 64  # of the chosen positions of a batch of static shape: matrix units prefer it


class MLMConfig(Named):
    """`mask_probability`: share of tokens chosen, by `whole_words` if set. `short_sequence_probability`: share of
    segment pairs that are made shorter.
    """

    sequences: Literal["windows", "documents"] = "windows"  # documents end to end, or each by itself
    mask_probability: float = Field(0.15, gt=0, lt=1)  # the share of tokens chosen
    whole_words: bool = False  # choose all tokens of a word together
    next_sentence: bool | None = None  # None: in windows, if the model has segment embeddings
    short_sequence_probability: Share = 0.1  # the share of segment pairs that are made shorter


class MLMExample(base.Example):
    """A text: to train on, to evaluate on, or to fill."""

    text: str


class Question(MLMExample):
    """A text whose masks are to be filled."""


class MLM(StreamReading, TeacherForcing, PreparedEvaluation):
    """Items are documents (bos w_1 … w_n) for `windows`, or texts (bos w_1 … w_n eos) for `documents`."""

    Config: ClassVar[type[Named]] = MLMConfig
    Example = MLMExample
    Options = FillMaskConfig
    required_roles = frozenset({Role.MASKED_LM})
    metrics: tuple[str, ...] = ("perplexity", "masked_accuracy", "next_accuracy", "pseudo_perplexity")
    metric = "perplexity"
    lower_is_better = True
    forces_input = True
    config: MLMConfig
    pairs = False  # whether sequences are segment pairs, for next-sentence prediction
    longest = 512

    def check(self, run: Run) -> None:
        """Set how the corpus is read, and raise for settings that the model or the tokenizer does not support."""
        segments = getattr(run.model, "segments", 0) or 0
        in_windows, next_sentence = self.config.sequences == "windows", self.config.next_sentence
        self.pairs = in_windows and segments > 1 if next_sentence is None else next_sentence
        if self.pairs and not in_windows:
            raise ConfigError("task.next_sentence: pairs come from windows of documents; set task.sequences: windows")
        if self.pairs and Role.ENCODER not in resolve("model", run.model.name).roles(run.model):
            raise ConfigError(f"task.next_sentence: {run.model.name!r} has no pooled output; set it to false")
        if resolve("model", run.model.name).uses_chars(run.model):
            raise ConfigError(f"model.name: {run.model.name!r} reads how words are spelt, which a mask does not hide")
        if "mask" not in resolve("tokenizer", run.tokenizer.name).special_tokens_map(run.tokenizer):
            raise ConfigError(
                f"tokenizer.specials: task 'mlm' hides words behind a mask, but {run.tokenizer.name!r} has none; add "
                f"tokenizer.specials: {{mask: '{MASK}'}}, or use wordpiece"
            )
        self._check_longest(run)
        self.lower_is_better = "accuracy" not in (run.train.metric or self.metric)
        if not self.pairs:
            self.metrics = tuple(name for name in self.metrics if name != "next_accuracy")

    def _check_longest(self, run: Run) -> None:
        self.longest, positions = run.data.max_length, getattr(run.model, "max_positions", None)
        max_length = None if positions is None else positions - getattr(run.model, "offset", 0)
        if max_length is not None and self.longest > max_length:
            raise ConfigError(
                f"data.max_length: sequences of {self.longest} tokens, but the model reads {max_length}; set it to "
                f"{max_length} or less{position_remedy(run.model)}"
            )
        if self.longest < 6:
            raise ConfigError(f"data.max_length: must have room for specials and words, 6 at least: got {self.longest}")

    @cached_property
    def vocabulary(self) -> MaskingVocabulary:
        """The properties of the vocabulary that masking needs."""
        vocabulary = MaskingVocabulary.of(self.tokenizer)
        if self.config.whole_words:
            vocabulary.check_words()
        return vocabulary

    @cached_property
    def boundaries(self) -> BoundaryTokens:
        """The special tokens around segments, and the tokens at which segments may be split."""
        bos, eos = self.tokenizer.specials.bos, self.tokenizer.specials.eos
        return BoundaryTokens(bos, self.tokenizer.pair_separator, eos, self.vocabulary.begins, self.vocabulary.ends)

    @cached_property
    def blanks(self) -> Blanks:
        """The masks of questions."""
        return Blanks(self.tokenizer, self.vocabulary.mask)

    @property
    def num_special_tokens(self) -> int:
        """Zero: `data.max_length` counts bos and eos."""
        return 0

    @property
    def min_special_tokens(self) -> int:
        """The least number of special tokens of a sequence."""
        return 2 + (len(self.boundaries.separator) if self.pairs else 0)

    def without_labels(self, example: MLMExample) -> Question:
        """Return the example as a question, whose masks are masks; elsewhere they are plain text."""
        return Question(text=example.text)

    def has_question(self, example: MLMExample) -> bool:
        """Return whether a text has masks."""
        return len(self.blanks.cut(example.text)) > 1

    def encode_batch(
        self, examples: Sequence[MLMExample], tokenizer: Tokenizer, limit: TruncationPolicy
    ) -> list[list[Item]]:
        """Encode many texts: to documents, or for `documents` to texts between bos and eos."""
        if examples and isinstance(examples[0], Question):
            return [self._question(self.blanks.ids(example.text), limit) for example in examples]
        encoded = tokenizer.ids([example.text for example in examples])
        if self.config.sequences == "documents":
            return [_windows_of(ids, tokenizer.specials, limit) for ids in encoded]
        return [[(np.array([tokenizer.specials.bos, *ids], np.int32),)] for ids in encoded]

    def _question(self, ids: Sequence[int], limit: TruncationPolicy) -> list[Item]:
        """Encode a text with masks; of several windows, those that have masks."""
        mask = self.vocabulary.mask
        if mask not in ids:
            raise DataError(f"the text has no {self.blanks.mask_strings[0]} to fill; put one where a word is asked for")
        return [item for item in _windows_of(ids, self.tokenizer.specials, limit) if mask in item[0]]

    def collate(self, items: Sequence[Item], rng: np.random.Generator) -> Batch:
        """Return a batch of texts, or of segment pairs, with masked tokens; texts with masks already are questions."""
        labels: np.ndarray | None = None
        if len(items[0]) > 1:
            tokens, labels = join_pairs(items, self.boundaries, rng)
        else:
            tokens = Tokens.pack([item[0] for item in items])
        ids, lengths = tokens.ids.numpy(), tokens.lengths.numpy()
        masks = np.flatnonzero(ids == self.vocabulary.mask)
        at = (
            masks
            if len(masks)
            else choose_positions(
                ids, lengths, self.vocabulary, self.config.mask_probability, self.config.whole_words, rng
            )
        )
        batch = Batch(tokens, positions=_positions(at, tokens))
        if len(masks):
            return batch
        counts = {"masked": len(at), **({} if labels is None else {"next": len(labels)})}
        return replace(
            batch,
            tokens=replace(tokens, ids=torch.from_numpy(mask_tokens(ids, at, self.vocabulary, rng))),
            targets=torch.from_numpy(ids[at]),
            counts=counts,
            labels=None if labels is None else torch.from_numpy(labels),
        )

    def sequence_lengths(self, data: PackedItems) -> np.ndarray | None:
        """Return the lengths of texts, for `documents`."""
        return data.sizes[None] if self.config.sequences == "documents" else None

    def num_positions(self, frame: StaticShape) -> int:
        """Return the most positions that can be chosen in a batch of this shape."""
        max_chosen = max_chosen_tokens(
            self.config.mask_probability, frame.sizes[-1], frame.rows, self.min_special_tokens
        )
        return min(-(-max_chosen // POSITIONS_MULTIPLE) * POSITIONS_MULTIPLE, frame.sizes[-1])

    def sampler(self, data: PackedItems, run: Run, world: int) -> SpanSampler | None:
        """Return how to read documents: in windows of the stream, or in segment pairs; None for `documents`."""
        if self.config.sequences == "documents":
            return None
        if not self.pairs:
            return self._windows(data, run.train.tokens_per_batch(self.longest))
        if run.train.batch_tokens is None:
            raise ConfigError("train.batch_size: sentence pairs are batched by tokens; give train.batch_tokens instead")
        return self._pairs(data, run.train.batch_tokens)

    def _windows(self, data: PackedItems, tokens: int) -> MLMWindows:
        specials = self.tokenizer.specials
        return MLMWindows.of(SequenceStream(data.ids, specials.bos, specials.eos), self.longest, tokens)

    def _pairs(self, data: PackedItems, tokens: int) -> SentencePairs:
        return SentencePairs.of(
            DocumentStream(data.ids, data.starts),
            self.longest,
            self.min_special_tokens,
            tokens,
            self.config.short_sequence_probability,
        )

    def head(self, model: Any) -> MLMHead:
        """Return the head, with loss and mask filling, of a body."""
        specials = [getattr(self.tokenizer.specials, role.name) for role in fields(Specials)]
        special_ids = sorted({id for id in specials if id is not None})
        return MLMHead(model, special_ids, self.vocabulary.mask, self.pairs)

    def answer(self, example: MLMExample, outputs: list[MaskPredictions]) -> Answer:
        """Return the best tokens for each mask, and the text filled with the first of each."""
        fills = [fill for window in outputs for fill in window]
        answers = [[{"token": self.tokenizer.token(id), "score": round(p, 6)} for id, p in fill] for fill in fills]
        return {"fills": answers, "text": self.blanks.filled(example.text, [fill[0][0] for fill in fills])}

    def format_answer(self, answer: Answer) -> str:
        """Return the text filled with the best tokens, on one line."""
        if "text" not in answer:
            return f"pseudo-log-likelihood {answer['logprob']:.2f}"
        return " ".join(str(answer["text"]).splitlines())

    def format_alternatives(self, answer: Answer) -> str:
        """Return the text and, after a tab for each mask, its best tokens with their probabilities."""
        if "fills" not in answer:
            return self.format_answer(answer)
        fills = (", ".join(f"{one['token'].strip()} {one['score']:.3f}" for one in fill) for fill in answer["fills"])
        return "\t".join([self.format_answer(answer), *fills])

    def teacher_forced(self, items: list[Item], outputs: list[Any]) -> tuple[list[str], list[str], Batch]:
        """Return the names of the tokens and the batch of the text itself, with all but its masks as targets."""
        (ids,), eos = items[0], self.tokenizer.specials.eos
        tokens = Tokens.pack([ids if len(ids) > 1 and ids[-1] == eos else np.append(ids, eos)])
        names = [self.tokenizer.token(id) for id in tokens.ids.tolist()]
        at = np.arange(1, len(tokens.ids) - 1)
        targets = tokens.ids[at]
        targets = targets.where(targets != self.vocabulary.mask, IGNORE_INDEX)
        return names, names, Batch(tokens, targets, positions=_positions(at, tokens))

    def log_probs(self, head: Head, texts: Sequence[str]) -> list[float]:
        """Return the pseudo-log-likelihood of each text."""
        assert isinstance(head, MLMHead)
        sequences = [_add_bos_eos(ids, self.tokenizer.specials) for ids in self.tokenizer.ids(texts)]
        longest, max_positions = max(map(len, sequences), default=0), getattr(head.body, "max_positions", None)
        if max_positions is not None and longest > max_positions:
            raise DataError(f"a text has {longest} tokens, but the model reads {max_positions}; give a shorter one")
        return head.log_probs(sequences)

    def unavailable_metric(self, metric: str, examples: Sequence[MLMExample]) -> str:
        """Return why next_accuracy is not given: one document makes no pairs."""
        return "there is but one document" if metric == "next_accuracy" and len(examples) == 1 else ""

    def evaluate(self, head: Head, data: EvaluationData) -> Metrics:
        """Return the metrics on texts, with the same masks each time."""
        return self._evaluate(head, data.items)

    def evaluate_prepared(self, head: Head, data: CorpusSplit) -> Metrics:
        """Return the metrics on a prepared corpus, which has tokens alone."""
        return self._evaluate(head, data)

    def _evaluate(self, head: Head, data: PackedItems) -> Metrics:
        assert isinstance(head, MLMHead)
        sums: dict[str, float] = {}
        for batch in self._evaluation_batches(data):
            for key, value in head.tally(batch.to(device_of(head))).items():
                sums[key] = sums.get(key, 0) + value
        if not sums.get("masked count"):
            raise DataError("not one word is left to evaluate on")
        parts = [part for part in ("masked", "next") if part in sums]
        losses = {part: sums[part] / sums[f"{part} count"] for part in parts}
        accuracies = {f"{part}_accuracy": sums[f"{part} right"] / sums[f"{part} count"] for part in parts}
        pseudo_perplexity, note = self._pseudo_perplexity(head, data)
        metrics = {"loss": sum(losses.values()), "perplexity": _exp(losses["masked"]), **accuracies}
        if self.pairs and "next" not in sums:
            note = f"next_accuracy: not given, since there is but one document; {note}"
        return Metrics({**metrics, "pseudo_perplexity": pseudo_perplexity}, note)

    def _evaluation_batches(self, data: PackedItems) -> Iterator[Batch]:
        """Yield batches of all data, in a fixed order and with fixed masks."""
        for number, items in enumerate(self._batch_items(data)):
            yield self.collate(items, np.random.default_rng((0, number)))

    def _batch_items(self, data: PackedItems) -> Iterator[list[Item]]:
        if self.config.sequences == "documents":
            yield from (
                [data[index] for index in batch.tolist()]
                for batch in plan_batches(data, EVALUATION_BATCH_TOKENS, seed=None)
            )
        elif len(data.ids):
            stream, batches = self._spans(data)
            yield from ([stream.item(*span) for span in batch.tolist()] for batch in batches)

    def _spans(self, data: PackedItems) -> tuple[SpanSource, Sequence[Spans]]:
        if self.pairs:
            with suppress(DataError):  # one document makes no pairs
                pairs = self._pairs(data, EVALUATION_BATCH_TOKENS)
                return pairs.stream, pairs.epoch(0, 0, 1)
        windows = self._windows(data, EVALUATION_BATCH_TOKENS)
        return windows.stream, windows.every()

    def _pseudo_perplexity(self, head: MLMHead, data: PackedItems) -> tuple[float, str]:
        """Return the pseudo-perplexity of the first texts, each cut at the limit: the cost of a text is quadratic."""
        inside = slice(1, -1) if self.config.sequences == "documents" else slice(1, None)
        texts, cost = list[np.ndarray](), 0
        for number in range(len(data)):
            ids = data[number][0][inside][: self.longest - 2]
            cost += len(ids) * (len(ids) + 2)
            if texts and cost > PSEUDO_TOKENS:
                break
            texts += [_add_bos_eos(ids, self.tokenizer.specials)] if len(ids) else []
        count = sum(len(text) - 2 for text in texts)
        mean = -sum(head.log_probs(texts)) / max(1, count)
        return _exp(mean), f"pseudo_perplexity: of the first {count:,} tokens, in {len(texts):,} of {len(data):,} texts"


def _add_bos_eos(ids: Iterable[int], specials: Specials) -> np.ndarray:
    return np.array([specials.bos, *ids, specials.eos], np.int32)


def _windows_of(ids: Sequence[int], specials: Specials, limit: TruncationPolicy) -> list[Item]:
    """Split a text at its limit, which includes bos and eos; an empty text gives nothing."""
    if not ids or not limit.apply(range(len(ids) + 2)):
        return []
    width = limit.max_length - 2
    windows = [ids[start : start + width] for start in range(0, len(ids), width)]
    return [(_add_bos_eos(window, specials),) for window in (windows[:1] if limit.policy == "cut" else windows)]


def _positions(at: np.ndarray, tokens: Tokens) -> Tokens:
    """Return flat positions as `Tokens`, with their number in each sequence."""
    ends = np.searchsorted(at, tokens.starts.numpy())
    return Tokens.flat(torch.from_numpy(at), torch.from_numpy(np.diff(ends)))


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf
