"""Extractive question answering: the span of a passage that answers a question, by any encoder.

The model reads `bos question eos passage eos`. A longer passage is split into overlapping windows (Devlin et al. 2019,
section 4.2 and its code); the best span over all windows is the answer, as characters of the passage. The target of a
window that does not contain the answer is bos, and so is that of every window of an unanswerable question (SQuAD 2.0).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import Field, model_validator

from weft.config.run import Run
from weft.config.schema import Named, Section
from weft.data.batching.packed_items import PackedItems
from weft.data.truncation import COUNTED, TruncationPolicy, count_tokens
from weft.errors import ConfigError, DataError
from weft.tasks import base
from weft.tasks.base import Answer
from weft.tasks.batch import IGNORE_INDEX, Batch, Item
from weft.tasks.capabilities import ErrorAnalysis, StaticBatches, TeacherForcing, WrongAnswer
from weft.tasks.label_task import MixedLayers
from weft.tasks.qa.head import END, START, Candidate, SpanBatch, SpanHead, SpanOptions, Window, WindowOutput, logsumexp
from weft.tasks.qa.metrics import best_threshold, mean_scores, score_answer
from weft.tasks.qa.windows import PassageWindow, cut_windows
from weft.tokenization.trainable import Encoding, Tokenizer
from weft.tokens import Tokens, char_ids

_UNANSWERABLE = ("answerable_exact_match", "answerable_f1", "unanswerable", "best_exact_match", "best_f1")


class SpanConfig(Named):
    """The windows of a passage, the lengths of questions and answers, and the threshold of no answer."""

    stride: int = Field(128, ge=1)  # maximum number of tokens between the starts of two windows
    max_question_length: int = Field(64, ge=1)  # tokens
    max_answer_length: int = Field(30, ge=1)  # tokens
    unanswerable: bool | None = None  # whether questions may have no answer; None: as in the training data
    null_threshold: float = 0.0  # in that case, by how much no answer must outscore the best span
    dropout: float = Field(0.0, ge=0, lt=1)  # on the body's output
    layers: MixedLayers = "last"  # of the body: mix is a weighted sum of all of them, a list of those named


class SpanExample(base.Example):
    """A question, a passage, and for training and evaluation the gold answers: [] for an unanswerable question."""

    question: str
    passage: str
    answers: list[str] | None = None
    starts: list[int] | None = None  # the first character of each answer; None: of its first occurrence
    id: str | int | None = None

    @model_validator(mode="before")
    @classmethod
    def _flatten_answers(cls, row: Any) -> Any:
        """Accept answers as in `datasets`, too: {"text": […], "answer_start": […]}."""
        answers = row.get("answers") if isinstance(row, dict) else None
        if not isinstance(answers, dict) or answers.keys() != {"text", "answer_start"}:
            return row
        return {**row, "answers": answers["text"], "starts": answers["answer_start"]}

    @model_validator(mode="after")
    def _check_starts(self) -> "SpanExample":
        if self.starts is not None and len(self.starts) != len(self.answers or ()):
            raise ValueError(f"must have a start an answer, and has {len(self.starts)} for {len(self.answers or ())}")
        for answer, start in zip(self.answers or (), self.starts or (), strict=False):
            if start < 0 or self.passage[start : start + len(answer)] != answer:
                text = self.passage[max(start, 0) : max(start, 0) + len(answer)]
                raise ValueError(f"at {start} of the passage stands {text[:40]!r}, not {answer[:40]!r}; count from 0")
        return self

    def answer_span(self) -> tuple[int, int] | None:
        """Return the characters of the first answer, start and end; None for an unanswerable question."""
        if not self.answers:
            return None
        answer = self.answers[0]
        start = self.passage.find(answer) if self.starts is None else self.starts[0]
        if start < 0 or not answer.strip():
            raise DataError(f"answers: the passage does not have {answer[:60]!r}; correct it, or skip such rows")
        lead = len(answer) - len(answer.lstrip())
        return start + lead, start + len(answer.rstrip())


class Span(StaticBatches, TeacherForcing, ErrorAnalysis):
    """Items are (bos question eos passage eos; the passage's start, length and own tokens; gold; offsets).

    gold: where the answer starts and ends, empty for prediction. offsets: the characters of each passage token, empty
    for training. Then the characters of the tokens, if the model reads them.
    """

    Config: ClassVar[type[Named]] = SpanConfig
    Example = SpanExample
    Options: ClassVar[type[Section]] = SpanOptions
    metrics: tuple[str, ...] = ("exact_match", "f1", *_UNANSWERABLE)
    metric = "f1"
    json_example = '{"question": "…", "passage": "…"}'
    label_fields = ("answers",)
    label_details = ("starts",)
    num_token_arrays = 1
    config: SpanConfig

    @property
    def input_fields(self) -> tuple[str, ...]:
        """A question and a passage."""
        return ("question", "passage")

    def check(self, run: Run) -> None:
        """Raise an error for a `longest` that leaves no room for a passage beside the question."""
        if run.data.max_length <= self.config.max_question_length:
            raise ConfigError(
                f"data.max_length: {run.data.max_length} tokens, question and passage, leave no room for a passage "
                f"beside a question of task.max_question_length={self.config.max_question_length}; raise it, or lower "
                "that"
            )

    def resolve_config(self, examples: Iterable[Any]) -> Named:
        """Return the configuration with `unanswerable` set: whether some question in the data has no answer."""
        if self.config.unanswerable is not None:
            return self.config
        return self.config.model_copy(update={"unanswerable": any(not example.answers for example in examples)})

    def texts(self, example: SpanExample) -> tuple[list[str], list[str]]:
        """Return both texts: they share one tokenizer."""
        return [example.question, example.passage], []

    def encode_batch(
        self, examples: Sequence[SpanExample], tokenizer: Tokenizer, limit: TruncationPolicy
    ) -> list[list[Item]]:
        """Encode many questions; a passage of several is tokenized once."""
        distinct = dict.fromkeys(example.passage for example in examples)
        # An answer to learn may be anywhere in its passage.
        needed = limit.needed if all(example.answers is None for example in examples) else None
        passages = {text: _tokenize(text, tokenizer, needed) for text in distinct}
        return [list(self._items(example, *passages[example.passage], tokenizer, limit)) for example in examples]

    def _items(
        self,
        example: SpanExample,
        passage: Encoding,
        offsets: np.ndarray,
        tokenizer: Tokenizer,
        limit: TruncationPolicy,
    ) -> Iterator[Item]:
        question = self._encode_question(example, tokenizer, limit)
        answer = None if example.answers is None else self._answer_tokens(example, offsets, limit)
        bos, between, eos = [tokenizer.specials.bos], tokenizer.pair_separator, [tokenizer.specials.eos]
        first = 1 + len(question.ids) + len(between)
        for window in self._windows(len(question.ids), len(passage.ids), limit):
            span = slice(window.start, window.stop)
            ids = [*bos, *question.ids, *between, *passage.ids[span], *eos]
            shape = first, window.stop - window.start, window.low - window.start, window.high - window.start
            gold = () if example.answers is None else _gold_positions(answer, window, first)
            char_offsets = () if example.answers is not None else offsets[span].ravel()
            item: Item = tuple(np.array(array, np.int32) for array in (ids, shape, gold, char_offsets))
            if self.uses_chars:
                words = [_surface(example.question, offset) for offset in question.offsets]
                passage_words = [_surface(example.passage, offset) for offset in passage.offsets[span]]
                item = (*item, char_ids(["", *words, *("" for _ in between), *passage_words, ""]))
            yield item

    def _encode_question(self, example: SpanExample, tokenizer: Tokenizer, limit: TruncationPolicy) -> Encoding:
        most = self.config.max_question_length
        question = tokenizer.encode(example.question, most + COUNTED)
        if len(question.ids) <= most:
            return question
        if limit.policy == "error":
            raise DataError(
                f"the question has {count_tokens(len(question.ids), most)} tokens, task.max_question_length is {most}; "
                "raise it, or have such cut, by any data.truncation but error"
            )
        limit.note("cut", "question", f"to task.max_question_length={most} tokens")
        return Encoding(question.ids[:most], question.offsets[:most], question.tokens[:most])

    def _windows(self, question: int, passage: int, limit: TruncationPolicy) -> list[PassageWindow]:
        fits = limit.apply(range(question + passage))  # counts sequences that are too long, or raises an error
        room = limit.max_length - question
        if limit.policy == "window" or question + passage <= limit.max_length:
            return cut_windows(passage, max(room, 1), self.config.stride, self.config.max_answer_length)
        return [PassageWindow(0, room, 0, room)] if fits else []

    def _answer_tokens(
        self, example: SpanExample, offsets: np.ndarray, limit: TruncationPolicy
    ) -> tuple[int, int] | None:
        """Return the first and last token of the answer; note where tokens do not match it exactly."""
        characters = example.answer_span()
        if characters is None:
            return None
        start, end = characters
        has_text = offsets[:, 0] < offsets[:, 1]
        tokens = np.flatnonzero(has_text & (offsets[:, 1] > start) & (offsets[:, 0] < end))
        if not len(tokens):
            limit.note("taught", "question", "to have no answer, since the tokenizer leaves nothing of it")
            return None
        first, last = int(tokens[0]), int(tokens[-1])
        if (int(offsets[first, 0]), int(offsets[last, 1])) != (start, end):
            limit.note("taught", "answer", "with the whole of the tokens at either end")
        if last - first >= self.config.max_answer_length:
            limit.note("taught", "answer", f"longer than task.max_answer_length={self.config.max_answer_length} tokens")
        return first, last

    @property
    def num_special_tokens(self) -> int:
        """One before the texts, one after them, and those between."""
        return 2 + len(self.tokenizer.pair_separator)

    def sequence_lengths(self, data: PackedItems) -> np.ndarray | None:
        """Return the length of each window's sequence; None with characters, which have no static shape."""
        return None if self.uses_chars else data.sizes[None]

    def collate(self, items: Sequence[Item], rng: np.random.Generator) -> Batch:
        """Join windows into a batch; it has targets, one a token, where all answers are known."""
        tokens = Tokens.pack([item[0] for item in items])
        segments = np.concatenate([np.arange(len(item[0])) >= item[1][0] for item in items])
        tokens = replace(tokens, segments=torch.from_numpy(segments.astype(np.int64)))
        if self.uses_chars:
            tokens = tokens.with_chars([item[4] for item in items])
        known = all(len(item[2]) for item in items)
        targets = torch.from_numpy(np.concatenate([_targets(item) for item in items])) if known else None
        windows = [] if known else [_window(item) for item in items]
        return SpanBatch(tokens, targets, {"windows": len(items)}, windows=windows)

    def head(self, model: Any) -> SpanHead:
        """Return the body with a linear layer for start and end."""
        return SpanHead(model, self.config.layers, self.config.dropout, self.config.max_answer_length)

    def options(self) -> SpanOptions:
        """Return the recipe's threshold, where there may be no answer."""
        return SpanOptions(null_threshold=self.config.null_threshold if self.config.unanswerable else None)

    def answer(self, example: SpanExample, outputs: list[WindowOutput]) -> Answer:
        """Return the best span over all windows, or none; its score is its softmax over all spans, and no answer."""
        options, null = outputs[0].options, min(output.null for output in outputs)
        threshold = options.null_threshold
        total = logsumexp([*(output.total for output in outputs), *([] if threshold is None else [null])])
        spans = _rank_spans(outputs)
        ranked = [_span_answer(example.passage, span, total) for span in spans]
        no_answer = {
            "answer": "",
            "start": None,
            "end": None,
            "score": 0.0 if threshold is None else _probability(null, total),
        }
        margin = round(null - spans[0].score, 6) if spans else None  # by how much no answer outscores the best span
        is_null = margin is None or (threshold is not None and margin > threshold)
        answer = dict(no_answer if is_null else ranked[0])
        if threshold is not None:
            answer |= {"null": margin, "best": ranked[0]["answer"] if ranked else ""}
        if options.top > 1:
            pool = (
                ranked if threshold is None else sorted([*ranked, no_answer], key=lambda candidate: -candidate["score"])
            )
            answer["candidates"] = pool[: options.top]
        return answer

    def format_answer(self, answer: Answer) -> str:
        """Return the answer's text."""
        return " ".join(str(answer["answer"]).split())

    def preview(self, example: SpanExample) -> tuple[str, str]:
        """Return the question, and its first answer."""
        return example.question, (example.answers or [""])[0]

    def unavailable_metric(self, metric: str, examples: Sequence[SpanExample]) -> str:
        """Return why metrics of unanswerable questions are missing: the examples have none."""
        if metric in _UNANSWERABLE and all(example.answers for example in examples):
            return "every question has an answer there"
        return ""

    def score(self, answers: Sequence[Answer], examples: Sequence[SpanExample]) -> dict[str, float]:
        """Compute exact match and F1 as in SQuAD's script; with unanswerable questions, as in SQuAD 2.0's."""
        gold, texts = [example.answers or [] for example in examples], [str(answer["answer"]) for answer in answers]
        has_unanswerable = not all(gold)
        scores = [
            score_answer(text, references, has_unanswerable) for text, references in zip(texts, gold, strict=True)
        ]
        metrics = mean_scores(scores)
        if not has_unanswerable:
            return metrics
        answerable = [score for score, references in zip(scores, gold, strict=True) if references]
        unanswerable = [score for score, references in zip(scores, gold, strict=True) if not references]
        metrics |= mean_scores(answerable, "answerable_") | {"unanswerable": mean_scores(unanswerable)["exact_match"]}
        return metrics | (self._threshold_metrics(answers, gold) if all("null" in answer for answer in answers) else {})

    def errors(self, answers: Sequence[Answer], examples: Sequence[SpanExample]) -> list[WrongAnswer | None]:
        """Return the answers that are no exact match, each with its own F1: the lowest comes first."""
        has_unanswerable = not all(example.answers for example in examples)
        return [self._error(*pair, has_unanswerable) for pair in zip(answers, examples, strict=True)]

    def _error(self, answer: Answer, example: SpanExample, has_unanswerable: bool) -> WrongAnswer | None:
        gold, text = example.answers or [], str(answer["answer"])
        score = score_answer(text, gold, has_unanswerable)
        details = {"f1": round(score.f1, 6)}
        return None if score.exact else WrongAnswer(gold, text, answer["score"], score.f1, details)

    def _threshold_metrics(self, answers: Sequence[Answer], gold: Sequence[Sequence[str]]) -> dict[str, float]:
        """Return exact match and F1 at their best thresholds, and the threshold that is best for F1."""
        scores = [score_answer(str(answer["best"]), texts, True) for answer, texts in zip(answers, gold, strict=True)]
        nulls = [float("inf") if answer["null"] is None else answer["null"] for answer in answers]
        answerable = list(map(bool, gold))
        exact, _ = best_threshold([score.exact for score in scores], nulls, answerable)
        f1, threshold = best_threshold([score.f1 for score in scores], nulls, answerable)
        return {"best_exact_match": exact, "best_f1": f1, "best_threshold": threshold}

    def teacher_forced(self, items: list[Item], outputs: list[WindowOutput]) -> tuple[list[str], list[str], Batch]:
        """Return the tokens, those of the predicted answer, and the batch with this answer as the target."""
        (ids, shape, _, *rest), spans = items[0], outputs[0].spans
        predicted = np.array(spans[0][3:] if spans else (0, 0), np.int32)
        names = [self.tokenizer.token(int(id)) for id in ids]
        batch = self.collate([(ids, shape, predicted, *rest)], np.random.default_rng(0))
        return names, names[predicted[0] : predicted[1] + 1], batch


def _tokenize(text: str, tokenizer: Tokenizer, needed: int | None) -> tuple[Encoding, np.ndarray]:
    """Return a text's tokens and the characters of each, (P, 2), without surrounding spaces: none for spaces alone."""
    encoding = tokenizer.encode(text, needed)
    offsets = np.zeros((len(encoding.offsets), 2), np.int32)
    for row, (start, end) in zip(offsets, encoding.offsets, strict=True):
        surface = text[start:end]
        lead = len(surface) - len(surface.lstrip())
        row[:] = start + lead, start + max(lead, len(surface.rstrip()))
    return encoding, offsets


def _surface(text: str, offset: tuple[int, int]) -> str:
    return text[slice(*offset)].strip()


def _gold_positions(answer: tuple[int, int] | None, window: PassageWindow, first: int) -> tuple[int, int]:
    """Return the answer's first and last position in a window's sequence; those of bos, if it is not whole in it."""
    if answer is None or answer[0] < window.start or answer[1] >= window.stop:
        return 0, 0
    return answer[0] - window.start + first, answer[1] - window.start + first


def _targets(item: Item) -> np.ndarray:
    """Return each token's target: START, END, their sum, or 0; IGNORE_INDEX outside bos and the passage."""
    first, size = item[1][:2].tolist()
    targets = np.full(len(item[0]), IGNORE_INDEX, np.int64)
    targets[0] = targets[first : first + size] = 0
    targets[item[2][0]] += START
    targets[item[2][1]] += END
    return targets


def _window(item: Item) -> Window:
    first, _, low, high = item[1].tolist()
    return Window(first, (low, high), item[3].reshape(-1, 2))


def _rank_spans(outputs: Iterable[WindowOutput]) -> list[Candidate]:
    """Return the spans of all windows, the best first; spans of the same characters (bytes of one character) once."""
    spans = sorted((span for output in outputs for span in output.spans), key=lambda span: -span.score)
    by_offsets = {(span.start, span.end): span for span in reversed(spans)}
    return [by_offsets[offsets] for offsets in dict.fromkeys((span.start, span.end) for span in spans)]


def _span_answer(passage: str, span: Candidate, total: float) -> Answer:
    text = passage[span.start : span.end]
    return {"answer": text, "start": span.start, "end": span.end, "score": _probability(span.score, total)}


def _probability(score: float, total: float) -> float:
    return round(float(np.exp(score - total)), 6)
