"""Extractive question answering: the stretch of a passage that answers a question, by any model that encodes.

The model reads `bos question eos passage eos`. A passage that is too long for that is read in windows that overlap
(Devlin et al. 2019, section 4.2 and the code that goes with it); the best span of all of them is the answer, the
passage's own text by its characters. A window that does not hold the answer is taught to point at bos, and so is the
whole passage of a question that has no answer (SQuAD 2.0).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import Field, model_validator

from weft.config.schema import Named, Run, Section
from weft.data.batching.packed import PackedItems
from weft.data.truncation import TruncationPolicy
from weft.errors import ConfigError, DataError
from weft.models.base import Role
from weft.tasks import base
from weft.tasks.base import IGNORE_INDEX, Answer, Batch, Item
from weft.tasks.label_task import Layers
from weft.tasks.qa.head import END, START, Candidate, Found, SpanBatch, SpanHead, SpanOptions, Window, total_score
from weft.tasks.qa.metrics import best_threshold, judge_answer, mean_scores
from weft.tasks.qa.windows import Cut, cut_windows
from weft.tokenization.trainable import Encoding, Tokenizer
from weft.tokens import Tokens, spell

_UNANSWERABLE = ("answerable_exact_match", "answerable_f1", "unanswerable", "best_exact_match", "best_f1")


class SpanConfig(Named):
    """How a passage is cut into windows, how long questions and answers are, and when there is no answer."""

    stride: int = Field(128, ge=1)  # tokens from the start of a window to that of the next, at most
    longest_question: int = Field(64, ge=1)  # tokens
    longest_answer: int = Field(30, ge=1)  # tokens
    unanswerable: bool | None = None  # whether questions may have no answer; None: if some of the training data have
    null_threshold: float = 0.0  # in that case, how far no answer must score above the best span
    dropout: float = Field(0.0, ge=0, lt=1)  # on what the body gives to the head
    layers: Layers = "last"  # of the body: mix is all of them, a list those named


class SpanExample(base.Example):
    """A question, a passage, and for training and evaluation the right answers: none, if it has no answer there."""

    question: str
    passage: str
    answers: list[str] | None = None
    starts: list[int] | None = None  # where each begins, in characters; without them, where it first stands
    id: str | int | None = None

    @model_validator(mode="before")
    @classmethod
    def _nested(cls, row: Any) -> Any:
        """Take answers as `datasets` has them, too: {"text": […], "answer_start": […]}."""
        told = row.get("answers") if isinstance(row, dict) else None
        if not isinstance(told, dict) or told.keys() != {"text", "answer_start"}:
            return row
        return {**row, "answers": told["text"], "starts": told["answer_start"]}

    @model_validator(mode="after")
    def _is_there(self) -> "SpanExample":
        if self.starts is not None and len(self.starts) != len(self.answers or ()):
            raise ValueError(f"must have a start an answer, and has {len(self.starts)} for {len(self.answers or ())}")
        for answer, start in zip(self.answers or (), self.starts or (), strict=False):
            if start < 0 or self.passage[start : start + len(answer)] != answer:
                near = self.passage[max(start, 0) : max(start, 0) + len(answer)]
                raise ValueError(f"at {start} of the passage stands {near[:40]!r}, not {answer[:40]!r}; count from 0")
        return self

    def label_fields(self) -> tuple[int, int] | None:
        """Return the characters of the first answer; None if there is no answer."""
        if not self.answers:
            return None
        answer = self.answers[0]
        start = self.passage.find(answer) if self.starts is None else self.starts[0]
        if start < 0 or not answer.strip():
            raise DataError(f"answers: the passage does not have {answer[:60]!r}; correct it, or skip such rows")
        lead = len(answer) - len(answer.lstrip())
        return start + lead, start + len(answer.rstrip())


class Span(base.Task):
    """Items are (bos question eos passage eos; where the passage begins, its size, and which tokens are its own).

    Then come, of a question to learn from, where the answer starts and ends; of one to answer, the characters of each
    token; and the spelling, if the model asks for it.
    """

    Config: ClassVar[type[Named]] = SpanConfig
    Example = SpanExample
    Options: ClassVar[type[Section]] = SpanOptions
    needs = frozenset({Role.ENCODER})
    metrics: tuple[str, ...] = ("exact_match", "f1", *_UNANSWERABLE)
    metric = "f1"
    form = '{"question": "…", "passage": "…"}'
    label_fields = ("answers",)
    num_token_arrays = 1
    config: SpanConfig

    def check(self, run: Run) -> None:
        """A window must have room for a passage beside the question."""
        if run.data.longest <= self.config.longest_question:
            raise ConfigError(
                f"data.longest: {run.data.longest} tokens, question and passage, leave no room for a passage beside a "
                f"question of task.longest_question={self.config.longest_question}; raise it, or lower that"
            )

    def resolve_config(self, examples: Iterable[Any]) -> Named:
        """Say whether there may be no answer: if that is so of a question in the data."""
        if self.config.unanswerable is not None:
            return self.config
        return self.config.model_copy(update={"unanswerable": any(not example.answers for example in examples)})

    def texts(self, example: SpanExample) -> tuple[list[str], list[str]]:
        """Both texts train the one tokenizer."""
        return [example.question, example.passage], []

    def encode(self, example: SpanExample, tokenizer: Tokenizer, limit: TruncationPolicy) -> list[Item]:
        """Encode one question, in as many windows as it takes."""
        return self.encode_batch([example], tokenizer, limit)[0]

    def encode_batch(
        self, examples: Sequence[SpanExample], tokenizer: Tokenizer, limit: TruncationPolicy
    ) -> list[list[Item]]:
        """Encode many; a passage that several ask about is cut into tokens once."""
        passages = {text: _read(text, tokenizer) for text in dict.fromkeys(one.passage for one in examples)}
        return [list(self._items(one, *passages[one.passage], tokenizer, limit)) for one in examples]

    def _items(
        self,
        example: SpanExample,
        passage: Encoding,
        offsets: np.ndarray,
        tokenizer: Tokenizer,
        limit: TruncationPolicy,
    ) -> Iterator[Item]:
        question = self._question(example, tokenizer, limit)
        right = None if example.answers is None else self._right(example, offsets, limit)
        begin, before, after = [tokenizer.specials.bos], tokenizer.between, [tokenizer.specials.eos]
        first = 1 + len(question.ids) + len(before)
        for cut in self._cuts(len(question.ids), len(passage.ids), limit):
            inside = slice(cut.start, cut.stop)
            ids = [*begin, *question.ids, *before, *passage.ids[inside], *after]
            shape = first, cut.stop - cut.start, cut.low - cut.start, cut.high - cut.start
            gold = () if example.answers is None else _placed(right, cut, first)
            places = () if example.answers is not None else offsets[inside].ravel()
            item: Item = tuple(np.array(part, np.int32) for part in (ids, shape, gold, places))
            if self.uses_chars:
                words = [_word(example.question, one) for one in question.offsets]
                inner = [_word(example.passage, one) for one in passage.offsets[inside]]
                item = (*item, spell(["", *words, *("" for _ in before), *inner, ""]))
            yield item

    def _question(self, example: SpanExample, tokenizer: Tokenizer, limit: TruncationPolicy) -> Encoding:
        found, most = tokenizer.encode(example.question), self.config.longest_question
        if len(found.ids) <= most:
            return found
        if limit.policy == "error":
            raise DataError(
                f"the question has {len(found.ids):,} tokens, task.longest_question is {most}; raise it, or have such "
                "cut, by any data.too_long but error"
            )
        limit.note("cut", "question", f"to task.longest_question={most} tokens")
        return Encoding(found.ids[:most], found.offsets[:most], found.tokens[:most])

    def _cuts(self, question: int, passage: int, limit: TruncationPolicy) -> list[Cut]:
        fits = limit.apply(range(question + passage))  # counts what is too long, or refuses it
        room = limit.longest - question
        if limit.policy == "window" or question + passage <= limit.longest:
            return cut_windows(passage, max(room, 1), self.config.stride, self.config.longest_answer)
        return [Cut(0, room, 0, room)] if fits else []

    def _right(self, example: SpanExample, offsets: np.ndarray, limit: TruncationPolicy) -> tuple[int, int] | None:
        """Return the first and last token of the answer; what tokens make of it is counted."""
        taught = example.label_fields()
        if taught is None:
            return None
        start, end = taught
        written = offsets[:, 0] < offsets[:, 1]
        held = np.flatnonzero(written & (offsets[:, 1] > start) & (offsets[:, 0] < end))
        if not len(held):
            limit.note("taught", "question", "to have no answer, since the tokenizer leaves nothing of it")
            return None
        first, last = int(held[0]), int(held[-1])
        if (int(offsets[first, 0]), int(offsets[last, 1])) != (start, end):
            limit.note("taught", "answer", "with the whole of the tokens at either end")
        if last - first >= self.config.longest_answer:
            limit.note("taught", "answer", f"longer than task.longest_answer={self.config.longest_answer} tokens")
        return first, last

    @property
    def num_special_tokens(self) -> int:
        """One before the texts, one after them, and what stands between."""
        return 2 + len(self.tokenizer.between)

    def sequence_lengths(self, data: PackedItems) -> np.ndarray | None:
        """An item brings one sequence; texts that are spelt out have no one shape."""
        return None if self.uses_chars else data.sizes[None]

    def collate(self, items: Sequence[Item], rng: np.random.Generator) -> Batch:
        """Join windows; there are targets, one a token, where all answers are known."""
        tokens = Tokens.pack([item[0] for item in items])
        kinds = np.concatenate([np.arange(len(item[0])) >= item[1][0] for item in items])
        tokens = replace(tokens, segments=torch.from_numpy(kinds.astype(np.int64)))
        if self.uses_chars:
            tokens = tokens.spelt([item[4] for item in items])
        known = all(len(item[2]) for item in items)
        targets = torch.from_numpy(np.concatenate([_targets(item) for item in items])) if known else None
        windows = [] if known else [_window(item) for item in items]
        return SpanBatch(tokens, targets, {"windows": len(items)}, windows=windows)

    def head(self, model: Any) -> SpanHead:
        """Put the two scores on a body."""
        return SpanHead(model, self.config.layers, self.config.dropout, self.config.longest_answer)

    def options(self) -> SpanOptions:
        """The recipe's threshold, where there may be no answer."""
        return SpanOptions(null_threshold=self.config.null_threshold if self.config.unanswerable else None)

    def answer(self, example: SpanExample, outputs: list[Found]) -> Answer:
        """Give the best span of all windows, or none; its score is its share of all that could be answered."""
        options, null = outputs[0].options, min(found.null for found in outputs)
        threshold = options.null_threshold
        total = total_score([*(found.total for found in outputs), *([] if threshold is None else [null])])
        spans = _ranked(outputs)
        ranked = [_candidate(example.passage, span, total) for span in spans]
        nothing = {"answer": "", "start": None, "end": None, "score": 0.0 if threshold is None else _share(null, total)}
        over = round(null - spans[0].score, 6) if spans else None  # how far no answer scores above the best
        refused = over is None or (threshold is not None and over > threshold)
        answer = dict(nothing if refused else ranked[0])
        if threshold is not None:
            answer |= {"null": over, "best": ranked[0]["answer"] if ranked else ""}
        if options.top > 1:
            pool = ranked if threshold is None else sorted([*ranked, nothing], key=lambda one: -one["score"])
            answer["candidates"] = pool[: options.top]
        return answer

    def line(self, answer: Answer) -> str:
        """The answer's text."""
        return " ".join(str(answer["answer"]).split())

    def preview(self, example: SpanExample) -> tuple[str, str]:
        """The question, and its first answer."""
        return example.question, (example.answers or [""])[0]

    def unavailable_metric(self, metric: str, examples: Sequence[SpanExample]) -> str:
        """Some are of questions that may have no answer."""
        if metric in _UNANSWERABLE and all(example.answers for example in examples):
            return "every question has an answer there"
        return ""

    def score(self, answers: Sequence[Answer], examples: Sequence[SpanExample]) -> dict[str, float]:
        """Exact match and F1 as SQuAD's script has them; where questions have no answer, that of SQuAD 2.0."""
        right, texts = [example.answers or [] for example in examples], [str(answer["answer"]) for answer in answers]
        hard = not all(right)
        judged = [judge_answer(text, one, hard) for text, one in zip(texts, right, strict=True)]
        found = mean_scores(judged)
        if not hard:
            return found
        some = [one for one, is_there in zip(judged, right, strict=True) if is_there]
        none = [one for one, is_there in zip(judged, right, strict=True) if not is_there]
        found |= mean_scores(some, "answerable_") | {"unanswerable": mean_scores(none)["exact_match"]}
        return found | (self._best(answers, right) if all("null" in answer for answer in answers) else {})

    def _best(self, answers: Sequence[Answer], right: Sequence[Sequence[str]]) -> dict[str, float]:
        """Say what the best threshold would give, and which it is for F1."""
        judged = [judge_answer(str(one["best"]), there, True) for one, there in zip(answers, right, strict=True)]
        nulls = [float("inf") if answer["null"] is None else answer["null"] for answer in answers]
        there = list(map(bool, right))
        exact, _ = best_threshold([one.exact for one in judged], nulls, there)
        f1, threshold = best_threshold([one.f1 for one in judged], nulls, there)
        return {"best_exact_match": exact, "best_f1": f1, "best_threshold": threshold}

    def teacher_forced(self, items: list[Item], outputs: list[Found]) -> tuple[list[str], list[str], Batch]:
        """Read a question with the answer chosen for it, as if it were right."""
        (ids, shape, _, *rest), spans = items[0], outputs[0].spans
        chosen = np.array(spans[0][3:] if spans else (0, 0), np.int32)
        names = [self.tokenizer.token(int(id)) for id in ids]
        batch = self.collate([(ids, shape, chosen, *rest)], np.random.default_rng(0))
        return names, names[chosen[0] : chosen[1] + 1], batch


def _read(text: str, tokenizer: Tokenizer) -> tuple[Encoding, np.ndarray]:
    """Cut a text into tokens; say which characters each stands for, (P, 2), without spaces around them, if any are."""
    encoding = tokenizer.encode(text)
    found = np.zeros((len(encoding.offsets), 2), np.int32)
    for row, (start, end) in zip(found, encoding.offsets, strict=True):
        piece = text[start:end]
        lead = len(piece) - len(piece.lstrip())
        row[:] = start + lead, start + max(lead, len(piece.rstrip()))
    return encoding, found


def _word(text: str, place: tuple[int, int]) -> str:
    return text[slice(*place)].strip()


def _placed(right: tuple[int, int] | None, cut: Cut, first: int) -> tuple[int, int]:
    """Say where in a window's sequence the answer is; at bos, if it is not whole in it."""
    if right is None or right[0] < cut.start or right[1] >= cut.stop:
        return 0, 0
    return right[0] - cut.start + first, right[1] - cut.start + first


def _targets(item: Item) -> np.ndarray:
    """Say of each token whether the answer starts or ends there; bos and the passage are where it can."""
    first, size = item[1][:2].tolist()
    found = np.full(len(item[0]), IGNORE_INDEX, np.int64)
    found[0] = found[first : first + size] = 0
    found[item[2][0]] += START
    found[item[2][1]] += END
    return found


def _window(item: Item) -> Window:
    first, _, low, high = item[1].tolist()
    return Window(first, (low, high), item[3].reshape(-1, 2))


def _ranked(outputs: Iterable[Found]) -> list[Candidate]:
    """Rank the spans of all windows, the best first; bytes of one character are one place, which counts once."""
    spans = sorted((span for found in outputs for span in found.spans), key=lambda span: -span.score)
    places = {(span.start, span.end): span for span in reversed(spans)}
    return [places[place] for place in dict.fromkeys((span.start, span.end) for span in spans)]


def _candidate(passage: str, span: Candidate, total: float) -> Answer:
    text = passage[span.start : span.end]
    return {"answer": text, "start": span.start, "end": span.end, "score": _share(span.score, total)}


def _share(score: float, total: float) -> float:
    return round(float(np.exp(score - total)), 6)
