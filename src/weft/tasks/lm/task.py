"""Language modelling: log-probabilities of texts and continuations of prompts, by any language model.

A text is bos w_1 … w_n eos. A forward model reads it without eos and predicts each next token; a backward model reads
it without bos and predicts each previous token; a model with both contexts, or with both directions (ELMo), reads the
whole, and a token at an end has no target in the direction that ends there. What is read as one sequence:
`weft.tasks.lm.sequences`.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import Field

from weft.config.run import Run
from weft.config.schema import Named, Section
from weft.data.batching.lm_stream import BPTTSegments, LMWindows, SpanSampler, TokenStream
from weft.data.batching.packed_items import PackedItems
from weft.data.corpus.format import CorpusSplit
from weft.data.truncation import TruncationPolicy
from weft.decoding.continuous import GenerationRequest
from weft.decoding.generate import Hypothesis
from weft.errors import ConfigError, DataError
from weft.models.base import LMDirection, Role, SelfFitted
from weft.registry import resolve
from weft.tasks import base
from weft.tasks.bad_words import BadWords
from weft.tasks.base import Answer, format_candidates
from weft.tasks.batch import IGNORE_INDEX, Batch, Item
from weft.tasks.capabilities import (
    Metrics,
    PreparedEvaluation,
    SelfFitting,
    StreamReading,
    TeacherForcing,
    TextGeneration,
)
from weft.tasks.char_inputs import Spelling
from weft.tasks.encoding import EvaluationData
from weft.tasks.head import Head
from weft.tasks.incremental_text import IncrementalText, find_stop_word, grown
from weft.tasks.lm import scoring
from weft.tasks.lm.head import Continuation, ContinuationConfig, LMHead, loss_names
from weft.tasks.lm.sequences import Sequences, check_stride, choose_sequences
from weft.tasks.lm.text_losses import TextLosses, num_bytes, sums_by_text, texts_of_items
from weft.tokenization.trainable import Tokenizer
from weft.tokens import Tokens


class LMConfig(Named):
    """`stride`: in `windows`, the distance of two windows in evaluation: if smaller, each token has more context."""

    # what is read at a time; None: by what the model can do
    sequences: Sequences | None = None
    bptt: int = Field(64, ge=1)  # in `bptt`, tokens a row and batch
    stride: int | None = Field(None, ge=1)  # None: the window size, data.max_length
    decode: ContinuationConfig = ContinuationConfig()


class LMExample(base.Example):
    """A text: to train on, to evaluate on, or to continue."""

    text: str


class LM(StreamReading, SelfFitting, TextGeneration, TeacherForcing, PreparedEvaluation):
    """Items are pairs (inputs, targets) or, of streams, whole documents (bos w_1 … w_n)."""

    Config: ClassVar[type[Named]] = LMConfig
    Example = LMExample
    Options = ContinuationConfig
    required_roles = frozenset({Role.LANGUAGE_MODEL})
    metrics = ("perplexity", "bits_per_byte")
    metric = "perplexity"
    lower_is_better = True
    num_token_arrays = 1
    forces_input = True
    config: LMConfig
    sequences: Sequences = "documents"
    fitted = False

    @property
    def eos(self) -> int:
        """The id of eos, which the ids of a document leave out."""
        return self.tokenizer.specials.eos

    def roles_for(self, roles: frozenset[Role]) -> frozenset[Role]:
        """Return the roles needed: a masked language model will do as well."""
        masked = Role.MASKED_LM in roles and Role.LANGUAGE_MODEL not in roles
        return frozenset({Role.MASKED_LM}) if masked else self.required_roles

    def check(self, run: Run) -> None:
        """Set how the corpus is read, and raise for settings that the model does not support."""
        model = resolve("model", run.model.name)
        self.directions: tuple[LMDirection, ...] = model.directions(run.model)
        if self.directions == ("masked",):
            raise ConfigError(
                f"task.name: 'lm' needs a model that scores what comes next; {run.model.name!r} fills masks: try mlm"
            )
        if run.train.metric == "bits_per_byte" and "both" in self.directions:
            raise ConfigError("train.metric: a model that sees both sides of a word has no bits_per_byte; try loss")
        self.fitted, self.longest = issubclass(model, SelfFitted), run.data.max_length
        self.sequences = choose_sequences(self.config.sequences, model, self.directions, run)
        check_stride(self.config.stride, self.longest, self.sequences)

    @property
    def special_token_affixes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return bos and eos as far as the model has read them: forward no eos, backward no bos, fitted neither."""
        before, after = super().special_token_affixes
        if self.fitted:
            return (), ()
        return () if self.directions == ("backward",) else before, () if self.directions == ("forward",) else after

    @property
    def num_special_tokens(self) -> int:
        """Zero: `data.max_length` counts bos, and eos is only a target."""
        return 0

    def char_ids(self, texts: Sequence[str], needed: int | None = None) -> list[list[np.ndarray]]:
        """Return the characters of tokens: as in the vocabulary, of unknown ones as in the text."""
        return Spelling.of(self.tokenizer).of_texts(texts, needed)

    def encode_batch(
        self, examples: Sequence[LMExample], tokenizer: Tokenizer, limit: TruncationPolicy
    ) -> list[list[Item]]:
        """Encode many texts: to documents, or for `documents` to pairs (inputs, targets)."""
        texts = [example.text for example in examples]
        bos, eos = tokenizer.specials.bos, tokenizer.specials.eos
        if self.sequences != "documents":
            return [[(np.array([bos, *ids], np.int32),)] for ids in tokenizer.ids(texts)]
        documents = [np.array([bos, *ids, eos], np.int32) for ids in tokenizer.ids(texts, limit.needed)]
        chars = Spelling.of(tokenizer).of_texts(texts, limit.needed) if self.uses_chars else None
        return [
            self._split_document(document, limit, chars[row] if chars else None)
            for row, document in enumerate(documents)
        ]

    def _split_document(
        self, document: np.ndarray, limit: TruncationPolicy, chars: list[np.ndarray] | None
    ) -> list[Item]:
        """Split a document at its limit: a window begins with the last token of the one before."""
        windows: list[Item] = []
        for positions in limit.apply(np.arange(len(document) - 1)):
            start, end = int(positions[0]), int(positions[-1]) + 2
            item: Item = (document[start : end - 1], document[start + 1 : end])
            windows.append((*item, np.concatenate(chars[start:end])) if chars else item)
        return windows

    def collate(self, items: Sequence[Item], rng: np.random.Generator) -> Batch:
        """Return a batch of pairs, with the targets of each of the model's directions."""
        pairs = [self._pair(item) for item in items]
        inputs, following = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        if self.directions == ("forward",):
            return _batch(Tokens.pack(inputs), [np.concatenate(following)], self.directions)
        if self.directions == ("backward",):
            return _batch(Tokens.pack(following), [np.concatenate(inputs)], self.directions)
        tokens = Tokens.pack([np.append(x, y[-1:]) for x, y in pairs])
        if self.uses_chars and all(len(item) > 2 for item in items):  # else the characters are those of the vocabulary
            tokens = tokens.with_chars([item[2] for item in items])
        next_tokens = np.concatenate([np.append(y, IGNORE_INDEX) for y in following])
        previous_tokens = np.concatenate([np.append(IGNORE_INDEX, x) for x in inputs])
        own_tokens = np.concatenate([np.concatenate([[IGNORE_INDEX], x[1:], [IGNORE_INDEX]]) for x in inputs])
        targets = {"forward": next_tokens, "backward": previous_tokens, "both": own_tokens}
        return _batch(tokens, [targets[direction] for direction in self.directions], self.directions)

    def _pair(self, item: Item) -> tuple[np.ndarray, np.ndarray]:
        return (item[0], item[1]) if len(item) > 1 else (item[0], np.append(item[0][1:], self.tokenizer.specials.eos))

    def sequence_lengths(self, data: PackedItems) -> np.ndarray | None:
        """Return the lengths of documents, for `documents` and a unidirectional model."""
        return (
            data.sizes[None]
            if self.sequences == "documents" and len(self.directions) == 1 and not self.uses_chars
            else None
        )

    def sampler(self, data: PackedItems, run: Run, streams: int) -> SpanSampler | None:
        """Return how to read the documents as one stream, None for `documents`."""
        if self.sequences == "documents":
            return None
        stream = self._stream(data.ids)
        if self.sequences == "bptt":
            return BPTTSegments.of(stream, self.config.bptt, run.train.tokens_per_batch(self.config.bptt), streams)
        return LMWindows.of(stream, self.longest, run.train.tokens_per_batch(self.longest))

    def _stream(self, ids: np.ndarray) -> TokenStream:
        return TokenStream(ids, self.tokenizer.specials.bos, self.tokenizer.specials.eos)

    def head(self, model: Any) -> LMHead:
        """Return the head, with loss and search, of a body."""
        specials = self.tokenizer.specials
        special = {specials.bos, specials.unk, specials.pad, specials.mask} - {None, specials.eos}
        forbid = sorted(id for id in special if id is not None)
        return LMHead(model, specials.eos, forbid, self.sequences == "bptt", BadWords(self.tokenizer))

    def options(self) -> Section:
        """Return the recipe's decoding options."""
        return self.config.decode

    def answer(self, example: LMExample, outputs: list[Any]) -> Answer:
        """Decode the best continuation, and the other candidates if there are several."""
        candidates = [self._answer(continuation) for continuation in outputs[-1]]
        answer: Answer = dict(candidates[0])
        if len(candidates) > 1:
            answer["candidates"] = candidates
        return answer

    def _answer(self, continuation: Continuation) -> Answer:
        """Cut a continuation at its first stop word: its tokens count in the log-probability, its text is left out."""
        ids, stop = list(continuation.ids), continuation.options.stop
        text = self.decode_continuation(continuation.prompt, ids)
        logprob = continuation.logprob
        if (end := find_stop_word(text, stop)) is not None:
            texts = (self.decode_continuation(continuation.prompt, ids[:size]) for size in range(len(ids) + 1))
            size = next(size for size, text in enumerate(texts) if find_stop_word(text, stop) is not None)
            ids, text, logprob = ids[:size], text[:end], sum(continuation.logprobs[:size])
        answer: Answer = {"text": text, "logprob": round(logprob, 6)}
        if continuation.options.logprobs:
            shown_ids = ids if end is not None or not continuation.finished else [*ids, self.tokenizer.specials.eos]
            names = [self.tokenizer.token(id) for id in shown_ids]
            pairs = zip(names, continuation.logprobs, strict=end is None)
            answer["tokens"] = [[name, round(value, 6)] for name, value in pairs]
        return answer

    def decode_continuation(self, prompt: Sequence[int], ids: Sequence[int]) -> str:
        """Return the text that `ids` add to a prompt: decoded with the prompt, whose own text is removed."""
        prompt_text = self.tokenizer.decode(list(prompt))
        return self.tokenizer.decode([*prompt, *ids]).removeprefix(prompt_text)

    def stream(
        self, head: Head, example: LMExample, limit: TruncationPolicy, options: Section, row: int = 0
    ) -> Iterator[str]:
        """Yield the text of the continuation as it is generated."""
        assert isinstance(options, ContinuationConfig)
        request = self.generation_request(head, example, limit, options, row)
        return grown(request.stream(head.body), self.incremental_text(request, options.stop))

    def generation_request(
        self, head: Head, example: LMExample, limit: TruncationPolicy, options: Section, row: int = 0
    ) -> GenerationRequest:
        """Return what to generate for a prompt."""
        assert isinstance(head, LMHead)
        assert isinstance(options, ContinuationConfig)
        batch = self._collate(self.encode(example, self.tokenizer, limit)[-1:])
        return head.generation_request(batch.numbered([row]), options)

    def decode_generated(self, request: GenerationRequest, ids: Sequence[int]) -> str:
        """Return the text of a continuation."""
        return self.decode_continuation(request.prompt.ids.tolist(), ids)

    def incremental_text(self, request: GenerationRequest, stop: Sequence[str] = ()) -> IncrementalText:
        """Return the text of a continuation as it grows."""
        return IncrementalText(self.tokenizer.decode, stop, request.prompt.ids.tolist())

    def generated_outputs(self, head: Head, request: GenerationRequest, candidates: Sequence[Hypothesis]) -> list[Any]:
        """Return continuations, with the log-probabilities of their tokens where they are asked for."""
        assert isinstance(head, LMHead)
        return [[head.continuation(request, candidate) for candidate in candidates]]

    def teacher_forced(self, items: list[Item], outputs: list[Any]) -> tuple[list[str], list[str], Batch]:
        """Return the names of the tokens and the batch of the text itself: its tokens are the targets."""
        batch = self._collate(items)
        names = [self.tokenizer.token(id) for id in batch.tokens.ids.tolist()]
        return names, names, batch

    def format_answer(self, answer: Answer) -> str:
        """Return the continuation on one line: a line break would be taken for the next answer."""
        if "text" not in answer:
            return f"log-probability {answer['logprob']:.2f}"
        return " ".join(str(answer["text"]).splitlines())

    def format_alternatives(self, answer: Answer) -> str:
        """Return all continuations that were asked for on one line, with tabs between them."""
        return format_candidates(answer) if "text" in answer else self.format_answer(answer)

    def log_probs(self, head: Head, texts: Sequence[str]) -> list[float]:
        """Return the log-probability of each text; of a model with both contexts, the sum of its tokens'."""
        documents = [self._add_bos_eos(ids) for ids in self.tokenizer.ids(texts)]
        longest = max((len(document) - 1 for document in documents), default=0)
        max_positions = getattr(head.body, "max_positions", None)
        if max_positions is not None and longest > max_positions:
            raise DataError(f"a text has {longest} tokens, but the model reads {max_positions}; give a shorter one")
        items: list[Item] = [(document[:-1], document[1:]) for document in documents]
        if self.uses_chars:
            chars = Spelling.of(self.tokenizer).of_texts(texts)
            items = [(*item, np.concatenate(spellings)) for item, spellings in zip(items, chars, strict=True)]
        scores = scoring.score_items(head, items, self._collate, self.directions)
        logprobs: list[float] = scores.mean(0).tolist()
        return logprobs

    def _add_bos_eos(self, ids: Sequence[int]) -> np.ndarray:
        return np.array([self.tokenizer.specials.bos, *ids, self.tokenizer.specials.eos], np.int32)

    def _collate(self, items: Sequence[Item]) -> Batch:
        return self.collate(items, np.random.default_rng(0))

    def unavailable_metric(self, metric: str, examples: Sequence[LMExample]) -> str:
        """Return why bits per byte are not given: the tokens do not determine the whole text."""
        if metric != "bits_per_byte" or self.tokenizer.lossless:
            return ""
        texts = [example.text for example in examples]
        lossless = texts and scoring.unknown_word_cost(texts, self.tokenizer) is not None
        return "" if lossless else "the tokenizer loses some of the text"

    def evaluate(self, head: Head, data: EvaluationData) -> Metrics:
        """Return the metrics on texts."""
        texts = [example.text for example in data.examples]
        size = int(num_bytes(texts, self.tokenizer.lossless).sum())
        return self._metrics(head, data.items, scoring.unknown_word_cost(texts, self.tokenizer), size, len(texts))

    def text_losses(self, head: Head, data: EvaluationData) -> TextLosses | None:
        """Return what each text costs, in the model's first direction; None where the model gives texts no probability.

        The sums are those of `evaluate`.
        """
        owners = None if "both" in self.directions else texts_of_items(data, self.eos)
        if owners is None:
            return None
        texts = [example.text for example in data.examples]
        scores, counts = self._item_log_probs(head, data.items)
        nats, tokens = (sums_by_text(values, owners, len(texts)) for values in (-scores[0], counts))
        complete = self.sequences != "documents" or scoring.are_complete(data.items, self.eos, len(texts))
        spelling = scoring.unknown_word_costs(texts, self.tokenizer) if complete else None
        return TextLosses(nats, tokens, num_bytes(texts, self.tokenizer.lossless), spelling)

    def evaluate_prepared(self, head: Head, data: CorpusSplit) -> Metrics:
        """Return the metrics on a prepared corpus, which has tokens and the number of bytes of each text."""
        unknown_cost = 0.0 if self.tokenizer.lossless else None
        return self._metrics(head, data, unknown_cost, int(data.bytes.sum()) + len(data.bytes), len(data.bytes))

    def _metrics(
        self, head: Head, data: PackedItems, unknown_cost: float | None, num_bytes: int, num_texts: int
    ) -> Metrics:
        """Return the metrics; `unknown_cost` is that of unknown words in nats, None if text is lost."""
        sums, counts = self._sum_log_probs(head, data)
        losses = [-total / max(1, count) for total, count in zip(sums, counts, strict=True)]
        metrics = {"loss": sum(losses), "perplexity": _exp(losses[0])}
        if len(losses) > 1:
            metrics["backward_perplexity"] = _exp(losses[1])
        if "both" in self.directions:
            return Metrics(metrics, "perplexity: of each token given all the others, which is not that of the text")
        if unknown_cost is None:
            return Metrics(metrics, "bits_per_byte: not given, since the tokenizer loses some of the text")
        if self.sequences == "documents" and not scoring.are_complete(data, self.eos, num_texts):
            return Metrics(metrics, "bits_per_byte: not given, since data.truncation leaves out some of the text")
        return Metrics({**metrics, "bits_per_byte": (unknown_cost - sums[0]) / math.log(2) / num_bytes})

    def _sum_log_probs(self, head: Head, data: PackedItems) -> tuple[list[float], list[int]]:
        """Return the summed log-probability of each direction, and the number of its targets."""
        scores, counts = self._item_log_probs(head, data)
        return scores.sum(1).tolist(), [int(counts.sum())] * len(scores)

    def _item_log_probs(self, head: Head, data: PackedItems) -> tuple[np.ndarray, np.ndarray]:
        """Return each item's log-probability in each direction, (directions, items), and its number of targets.

        Of streams an item is a document, which is read after the one before it.
        """
        if self.sequences == "documents" or self.fitted:
            items = [data[number] for number in range(len(data))]
            untargeted = 1 if "both" in self.directions else 0  # the last token has a left context alone
            counts = np.array([len(item[0]) - untargeted for item in items])
            return scoring.score_items(head, items, self._collate, self.directions), counts
        stream = self._stream(data.ids)
        if self.sequences == "bptt":
            logprobs = scoring.stream_log_probs(head, stream, self.config.bptt)
        else:
            width = min(self.longest, len(stream))
            stride = min(self.config.stride or width, width)
            logprobs = scoring.window_log_probs(head, stream, width, stride, self.directions[0])
        return np.add.reduceat(logprobs, data.starts[data.items[:-1]])[None], data.sizes


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


def _batch(tokens: Tokens, targets: Sequence[np.ndarray], directions: Sequence[LMDirection]) -> Batch:
    stacked = torch.from_numpy(np.stack(targets).astype(np.int64))
    counts = [int((row != IGNORE_INDEX).sum()) for row in stacked]
    flat = stacked[0] if len(directions) == 1 else stacked
    return Batch(tokens, flat, dict(zip(loss_names(directions), counts, strict=True)))
