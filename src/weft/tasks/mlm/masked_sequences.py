"""Sequences of a corpus with tokens chosen at random: what masked language modelling and ELECTRA are trained on.

What a sequence is (`task.sequences`):

| sequences   | a sequence is                                                                          |
|-------------|----------------------------------------------------------------------------------------|
| `windows`   | `data.max_length` tokens of the concatenated documents (RoBERTa), or segment pairs     |
|             | bos A eos B eos of at most as many tokens (BERT)                                       |
| `documents` | a text                                                                                 |

`data.max_length` counts bos and eos.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from pydantic import Field

from weft.config.run import Run
from weft.config.schema import Named, Share, position_remedy
from weft.data.batching.lm_stream import Spans, SpanSampler, SpanSource
from weft.data.batching.loader import plan_batches
from weft.data.batching.mlm_sequences import (
    BoundaryTokens,
    DocumentStream,
    MLMWindows,
    SentencePairs,
    SequenceStream,
    join_consecutive,
    join_pairs,
)
from weft.data.batching.packed_items import PackedItems
from weft.data.batching.static_shape import StaticShape
from weft.data.corpus.format import CorpusSplit
from weft.data.truncation import TruncationPolicy
from weft.errors import ConfigError, DataError
from weft.registry import resolve
from weft.tasks import base
from weft.tasks.batch import Batch, Item
from weft.tasks.capabilities import Metrics, PreparedEvaluation, StreamReading
from weft.tasks.encoding import EvaluationData
from weft.tasks.head import Head, missing_method
from weft.tasks.mlm.cloze import MASK
from weft.tasks.mlm.masking import MaskingVocabulary, choose_positions, max_chosen_tokens
from weft.tasks.sharding import iterate_share
from weft.tokenization.trainable import Tokenizer
from weft.tokens import Specials, Tokens

# Segment B follows A; or half of the time it is of another document, or in the place of A.
Pairing = Literal["consecutive", "random", "swapped"]
EVALUATION_BATCH_TOKENS = 1 << 13  # constant, so that the masks do not depend on the machine
POSITIONS_MULTIPLE = 64  # of the chosen positions of a batch of static shape: matrix units prefer it


class MaskedSequencesConfig(Named):
    """`mask_probability`: share of tokens chosen, by `whole_words` if set. `short_sequence_probability`: share of
    segment pairs that are made shorter.
    """

    sequences: Literal["windows", "documents"] = "windows"  # documents end to end, or each by itself
    mask_probability: float = Field(0.15, gt=0, le=1)  # the share of tokens chosen
    whole_words: bool = False  # choose all tokens of a word together
    short_sequence_probability: Share = 0.1  # the share of segment pairs that are made shorter


class TextExample(base.Example):
    """A text: to train on, to evaluate on, or to ask about."""

    text: str


class Question(TextExample):
    """A text that is asked about."""


class MaskedSequences(StreamReading, PreparedEvaluation):
    """Items are documents (bos w_1 … w_n) for `windows`, or texts (bos w_1 … w_n eos) for `documents`."""

    Example = TextExample
    config: MaskedSequencesConfig
    pairs = False  # whether sequences are segment pairs
    pairing: Pairing = "consecutive"
    longest = 512

    def check(self, run: Run) -> None:
        """Raise an error for settings that the model or the tokenizer does not support."""
        if resolve("model", run.model.name).uses_chars(run.model):
            raise ConfigError(f"model.name: {run.model.name!r} reads how words are spelt, which a mask does not hide")
        if "mask" not in resolve("tokenizer", run.tokenizer.name).special_tokens_map(run.tokenizer):
            raise ConfigError(
                f"tokenizer.specials: task {run.task.name!r} hides words behind a mask, but {run.tokenizer.name!r} has "
                f"none; add tokenizer.specials: {{mask: '{MASK}'}}, or use wordpiece"
            )
        self._check_longest(run)

    def makes_pairs(self, run: Run, key: str) -> bool:
        """Return whether the task's `key` asks for segment pairs; None does if the model has segment embeddings."""
        in_windows, value = self.config.sequences == "windows", getattr(self.config, key)
        if value and not in_windows:
            raise ConfigError(f"task.{key}: pairs come from windows of documents; set task.sequences: windows")
        return in_windows and (getattr(run.model, "segments", 0) or 0) > 1 if value is None else value

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

    @property
    def num_special_tokens(self) -> int:
        """Zero: `data.max_length` counts bos and eos."""
        return 0

    @property
    def min_special_tokens(self) -> int:
        """The least number of special tokens of a sequence."""
        return 2 + (len(self.boundaries.separator) if self.pairs else 0)

    def without_labels(self, example: TextExample) -> Question:
        """Return the example as a question; elsewhere it is a text of the corpus."""
        return Question(text=example.text)

    def encode_batch(
        self, examples: Sequence[TextExample], tokenizer: Tokenizer, limit: TruncationPolicy
    ) -> list[list[Item]]:
        """Encode many texts: to documents, or for `documents` to texts between bos and eos."""
        if examples and isinstance(examples[0], Question):
            return self.encode_questions([example.text for example in examples], limit)
        documents = self.config.sequences == "documents"
        encoded = tokenizer.ids([example.text for example in examples], limit.needed if documents else None)
        if documents:
            return [windows_of(ids, tokenizer.specials, limit) for ids in encoded]
        return [[(np.array([tokenizer.specials.bos, *ids], np.int32),)] for ids in encoded]

    def encode_questions(self, texts: Sequence[str], limit: TruncationPolicy) -> list[list[Item]]:
        """Encode texts that are asked about, each between bos and eos."""
        return [windows_of(ids, self.tokenizer.specials, limit) for ids in self.tokenizer.ids(texts, limit.needed)]

    def join(self, items: Sequence[Item], rng: np.random.Generator) -> tuple[Tokens, np.ndarray | None]:
        """Return the sequences of items; of segment pairs also their labels (B,), 0 where B follows A."""
        if len(items[0]) == 1:
            return Tokens.pack([item[0] for item in items]), None
        if self.pairing == "random":
            return join_pairs(items, self.boundaries, rng)
        return join_consecutive([item[1] for item in items], self.boundaries, rng, swap=self.pairing == "swapped")

    def choose(self, tokens: Tokens, rng: np.random.Generator) -> np.ndarray:
        """Return the sorted flat positions (M,) of tokens chosen at random."""
        share, whole_words = self.config.mask_probability, self.config.whole_words
        return choose_positions(tokens.ids.numpy(), tokens.lengths.numpy(), self.vocabulary, share, whole_words, rng)

    def sequence_lengths(self, data: PackedItems) -> np.ndarray | None:
        """Return the lengths of texts, for `documents`."""
        return data.sizes[None] if self.config.sequences == "documents" else None

    def num_positions(self, frame: StaticShape) -> int:
        """Return the most positions that can be chosen in a batch of this shape."""
        max_chosen = max_chosen_tokens(
            self.config.mask_probability, frame.sizes[-1], frame.rows, self.min_special_tokens
        )
        return min(-(-max_chosen // POSITIONS_MULTIPLE) * POSITIONS_MULTIPLE, frame.sizes[-1])

    def sampler(self, data: PackedItems, run: Run, streams: int) -> SpanSampler | None:
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
            partners=self.pairing == "random",
        )

    def evaluate(self, head: Head, data: EvaluationData) -> Metrics:
        """Return the metrics on texts, with the same masks each time."""
        return self.evaluate_items(head, data.items)

    def evaluate_prepared(self, head: Head, data: CorpusSplit) -> Metrics:
        """Return the metrics on a prepared corpus, which has tokens alone."""
        return self.evaluate_items(head, data)

    def evaluate_items(self, head: Head, data: PackedItems) -> Metrics:
        """Return the metrics on items."""
        raise missing_method(self, "evaluate_items")

    def evaluation_batches(self, data: PackedItems) -> Iterator[tuple[int, Batch]]:
        """Yield numbered batches of all data, in a fixed order and with fixed masks; processes share them."""
        for number, items in iterate_share(enumerate(self._batch_items(data))):
            yield number, self.collate(items, np.random.default_rng((0, number)))

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


def add_bos_eos(ids: Iterable[int], specials: Specials) -> np.ndarray:
    """Return the ids between bos and eos."""
    return np.array([specials.bos, *ids, specials.eos], np.int32)


def windows_of(ids: Sequence[int], specials: Specials, limit: TruncationPolicy) -> list[Item]:
    """Split a text at its limit, which includes bos and eos; an empty text gives nothing."""
    if not ids or not limit.apply(range(len(ids) + 2)):
        return []
    width = limit.max_length - 2
    windows = [ids[start : start + width] for start in range(0, len(ids), width)]
    return [(add_bos_eos(window, specials),) for window in (windows[:1] if limit.policy == "cut" else windows)]


def flat_positions(at: np.ndarray, tokens: Tokens) -> Tokens:
    """Return flat positions as `Tokens`, with their number in each sequence."""
    ends = np.searchsorted(at, tokens.starts.numpy())
    return Tokens.flat(torch.from_numpy(at), torch.from_numpy(np.diff(ends)))
