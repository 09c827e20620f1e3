"""Translation: sequence to sequence, by any model that encodes a source and generates a target."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import BeforeValidator, Field, field_validator

from weft.config.run import Run
from weft.config.schema import Named, Section
from weft.data.batching.packed_items import PackedItems
from weft.data.truncation import TruncationPolicy
from weft.decoding.config import DecodingConfig
from weft.decoding.continuous import GenerationRequest
from weft.decoding.generate import Hypothesis, generate
from weft.errors import ConfigError
from weft.models.base import Role
from weft.nn.layers.losses import cross_entropy_sum
from weft.tasks import base
from weft.tasks.bad_words import BadWords, bad_word_ids
from weft.tasks.base import Answer, format_candidates
from weft.tasks.batch import Batch, Item
from weft.tasks.capabilities import ErrorAnalysis, StaticBatches, TeacherForcing, TextGeneration, WrongAnswer
from weft.tasks.head import Head, Sums
from weft.tasks.incremental_text import grown
from weft.tasks.text_metrics import TEXT_METRICS, sentence_bleu
from weft.tasks.unknown_words import numbered_ids, unknown_words, with_unknown_words
from weft.tokenization.trainable import Tokenizer
from weft.tokens import Tokens

Metric = Literal["exact_match", "bleu", "rouge1", "rouge2", "rougeL", "token_error_rate", "recall"]
METRICS: tuple[Metric, ...] = ("exact_match", "bleu")  # unless the recipe names others


class TranslateConfig(Named):
    """Label smoothing, the metrics, and the default decoding options."""

    label_smoothing: float = Field(0.0, ge=0, lt=1)  # probability spread over all tokens in the loss
    lowercase: bool = False  # metrics ignore case
    # of evaluations (weft.tasks.text_metrics), the first selects the best model; None: exact_match, bleu
    metrics: Annotated[tuple[Metric, ...], Field(min_length=1)] | None = None
    group_references: bool = False  # rows of one text are one example with several references, in metrics
    # put before each text, with a space, to say what is asked of a model that does several things: `2fr`
    prefix: str | None = Field(None, max_length=1000)
    unknown: bool = False  # whether the unknown token may be generated
    decode: DecodingConfig = DecodingConfig()


def _join(value: object) -> object:
    """Return a list of texts as one, with spaces between them; anything else as it is."""
    return " ".join(value) if isinstance(value, list) and all(isinstance(part, str) for part in value) else value


class TranslateExample(base.Example):
    """A text, and for training and evaluation its translation, or several of them, each a reference.

    A text in parts, such as the sentences of an article or the turns of a dialogue, is joined. Of several translations
    those that are empty, such as the missing ones in a table, are left out.
    """

    text: Annotated[str, BeforeValidator(_join)]
    target: str | list[str] | None = None

    @field_validator("target")
    @classmethod
    def _drop_empty(cls, target: str | list[str] | None) -> str | list[str] | None:
        if not isinstance(target, list):
            return target
        if not any(target):
            raise ValueError("must have a text, but has none")
        return [text for text in target if text]

    @property
    def references(self) -> list[str]:
        """The translations, of which there may be several."""
        return self.target if isinstance(self.target, list) else [self.target or ""]


class TranslateHead(Head):
    """The body alone: its own output layer gives the logits of the target vocabulary."""

    def __init__(
        self, body: Any, eos: int, forbid: Sequence[int], label_smoothing: float, bad_words: BadWords | None = None
    ) -> None:
        super().__init__(body)
        self.eos, self.forbid, self.label_smoothing = eos, tuple(forbid), label_smoothing
        self.bad_words = bad_words  # the tokens of texts

    def forward(self, batch: Batch, carry: Any = None) -> tuple[Sums, Any]:
        """Return the summed cross-entropy of the target's tokens, under teacher forcing."""
        assert batch.targets is not None
        logits = self.body.logits(batch.tokens, batch.source)
        return {
            "tokens": cross_entropy_sum(logits, batch.targets, self.label_smoothing if self.training else 0.0)
        }, None

    def predict(self, batch: Batch, options: Section) -> list[list[Hypothesis]]:
        """Return the best hypotheses of each source."""
        assert isinstance(options, DecodingConfig)
        rows = batch.rows or range(len(batch.tokens))
        bad_words = bad_word_ids(self.bad_words, options)
        prompt, source = self.generator_inputs(batch)
        return generate(self.body, prompt, self.eos, options, source, self.forbid, rows, bad_words)

    def logits_per_item(self, options: Section) -> int:
        """The vocabulary, for each hypothesis."""
        assert isinstance(options, DecodingConfig)
        vocab: int = self.body.target_vocab
        return vocab * max(options.beam, options.num_return_sequences)

    def generation_request(self, batch: Batch, options: DecodingConfig) -> GenerationRequest:
        """Return what to generate for a batch of one source."""
        bad_words = tuple(bad_word_ids(self.bad_words, options))
        row = batch.rows[0] if batch.rows else 0
        prompt, source = self.generator_inputs(batch)
        return GenerationRequest(prompt, self.eos, options, source, self.forbid, bad_words, row)

    def generator_inputs(self, batch: Batch) -> tuple[Tokens, Tokens | None]:
        """Return what generation begins with, the first token of each target, its start symbol; and the source."""
        starts = batch.tokens.starts[:-1].long()
        return Tokens.flat(batch.tokens.ids[starts], torch.ones(len(batch.tokens))), batch.source


class Translate(StaticBatches, TextGeneration, TeacherForcing, ErrorAnalysis):
    """Items are (source ids + eos, bos + target ids + eos)."""

    Config: ClassVar[type[Named]] = TranslateConfig
    Example: type[base.Example] = TranslateExample
    Options = DecodingConfig
    required_roles = frozenset({Role.SEQ2SEQ, Role.GENERATOR})
    metrics: tuple[str, ...] = METRICS
    metric = "exact_match"
    label_fields = ("target",)
    config: TranslateConfig

    def configure(self, config: Named) -> None:
        """Set the configuration, and the metrics that it names."""
        super().configure(config)
        if self.config.metrics:
            self.metrics, self.metric = self.config.metrics, self.config.metrics[0]

    def check(self, run: Run) -> None:
        """Raise an error for `truncation: window`: translating windows is not translating the text."""
        if (run.train.metric or self.metric) == "token_error_rate":
            self.lower_is_better = True
        if run.data.truncation == "window":
            raise ConfigError("data.truncation: task 'translate' cannot use 'window'; try cut, drop or error")

    @property
    def special_token_affixes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return what stands around a source: eos alone."""
        return (), (self.tokenizer.specials.eos,)

    def texts(self, example: TranslateExample) -> tuple[list[str], list[str]]:
        """Return both sides."""
        return [self._source(example)], [] if example.target is None else example.references

    def _source(self, example: TranslateExample) -> str:
        """Return what the model reads: the text, after the prefix (Johnson et al. 2017, section 3)."""
        return f"{self.config.prefix} {example.text}" if self.config.prefix else example.text

    def encode_batch(
        self, examples: Sequence[TranslateExample], tokenizer: Tokenizer, limit: TruncationPolicy
    ) -> list[list[Item]]:
        """Encode many pairs with one call of the tokenizer for each side; there is an item for each reference."""
        encoded = self._encode_sides(examples, tokenizer, limit.needed)
        return [
            [item for target in targets for item in self._items(source, target, tokenizer, limit)]
            for source, targets in encoded
        ]

    def _encode_sides(
        self, examples: Sequence[TranslateExample], tokenizer: Tokenizer, needed: int | None
    ) -> list[tuple[list[int], list[list[int]]]]:
        """Return the ids of each source and of its references."""
        if tokenizer.joint and tokenizer.unknown_slots:
            return [numbered_ids(tokenizer, self._source(example), example.references, needed) for example in examples]
        references = [example.references for example in examples]
        sources = tokenizer.ids([self._source(example) for example in examples], needed)
        targets = iter(tokenizer.target.ids([text for own in references for text in own], needed))
        return [(source, list(islice(targets, len(own)))) for source, own in zip(sources, references, strict=True)]

    def _unknown_words(self, example: TranslateExample) -> list[str]:
        return unknown_words(self.tokenizer, self._source(example)) if self.tokenizer.joint else []

    def _items(self, source: list[int], target: list[int], tokenizer: Tokenizer, limit: TruncationPolicy) -> list[Item]:
        specials = tokenizer.target.specials
        kept_source, kept_target = limit.apply(source, windows=False), limit.apply(target, windows=False)
        if not kept_source or not kept_target:
            return []
        source_ids = np.array([*kept_source[0], tokenizer.specials.eos], np.int32)
        return [(source_ids, np.array([specials.bos, *kept_target[0], specials.eos], np.int32))]

    def collate(self, items: Sequence[Item], rng: np.random.Generator) -> Batch:
        """Join pairs: the decoder's input is the target without its last token, the labels are without its first."""
        tokens = Tokens.pack([item[1][:-1] for item in items])
        targets = torch.from_numpy(np.concatenate([item[1][1:] for item in items]).astype(np.int64))
        source = Tokens.pack([item[0] for item in items])
        return Batch(tokens, targets, {"tokens": len(targets)}, source)

    def sequence_lengths(self, data: PackedItems) -> np.ndarray | None:
        """Return the lengths of the source and of the decoder's input, the target without its last token."""
        target, source = data.shapes
        return np.stack([source, target - 1])

    def head(self, model: Any) -> TranslateHead:
        """Return the body with the loss and the decoding."""
        specials = self.tokenizer.target.specials
        forbidden = (specials.pad, specials.mask, None if self.config.unknown else specials.unk)
        forbid = [specials.bos, *(id for id in forbidden if id is not None)]
        bad_words = BadWords(self.tokenizer.target)
        return TranslateHead(model, specials.eos, forbid, self.config.label_smoothing, bad_words)

    def options(self) -> Section:
        """Return the recipe's decoding options."""
        return self.config.decode

    def answer(self, example: TranslateExample, outputs: list[Any]) -> Answer:
        """Return the text of the best hypothesis, and the others where several were requested."""
        words = self._unknown_words(example)
        candidates = [
            {"text": self._decode(hypothesis.ids, words), "score": round(hypothesis.score, 6)}
            for hypothesis in outputs[0]
        ]
        answer: Answer = dict(candidates[0])
        if len(candidates) > 1:
            answer["candidates"] = candidates
        return answer

    def teacher_forced(self, items: list[Item], outputs: list[Any]) -> tuple[list[str], list[str], Batch]:
        """Return the tokens of both sides, and the batch with the best hypothesis as the target."""
        specials, source = self.tokenizer.target.specials, items[0][0]
        best = outputs[0][0]
        target = [*best.ids, specials.eos] if best.finished else list(best.ids)
        item = (source, np.array([specials.bos, *target], np.int32))
        names = [self.tokenizer.token(int(id)) for id in source]
        return names, [self.tokenizer.target.token(id) for id in target], self.collate([item], np.random.default_rng(0))

    def stream(
        self, head: Head, example: TranslateExample, limit: TruncationPolicy, options: Section, row: int = 0
    ) -> Iterator[str]:
        """Yield the translation as it grows."""
        request = self.generation_request(head, example, limit, options, row)
        # Not under inference_mode: between two increments it would hold for the caller's code too.
        return grown(request.stream(head.body), self.incremental_text(request))

    def generation_request(
        self, head: Head, example: TranslateExample, limit: TruncationPolicy, options: Section, row: int = 0
    ) -> GenerationRequest:
        """Return what to generate for a text."""
        assert isinstance(head, TranslateHead)
        assert isinstance(options, DecodingConfig)
        items = self.encode(self.without_labels(example), self.tokenizer, limit)
        request = head.generation_request(self.collate(items, np.random.default_rng(0)).numbered([row]), options)
        return replace(request, unknown_words=tuple(self._unknown_words(example)))

    def decode_generated(self, request: GenerationRequest, ids: Sequence[int]) -> str:
        """Return the text of a translation."""
        return self._decode(ids, request.unknown_words)

    def _decode(self, ids: Sequence[int], unknown_words: Sequence[str]) -> str:
        target = self.tokenizer.target
        return with_unknown_words(target, target.decode(list(ids)), unknown_words)

    def format_answer(self, answer: Answer) -> str:
        """Return the translation on one line: a line break would look like the next answer."""
        return " ".join(str(answer["text"]).splitlines())

    def format_alternatives(self, answer: Answer) -> str:
        """Return all translations that were asked for on one line, with tabs between them."""
        return format_candidates(answer)

    def score(self, answers: Sequence[Answer], examples: Sequence[TranslateExample]) -> dict[str, float]:
        """Compute the metrics against all references of each example."""
        references = self._references(examples)
        candidates = (answers[number].get("candidates", [answers[number]]) for number in references)
        texts = [self._compared(str(candidate["text"]) for candidate in group) for group in candidates]
        targets = [self._compared(group) for group in references.values()]
        return {name: TEXT_METRICS[name](texts, targets) for name in self.config.metrics or METRICS}

    def _compared(self, texts: Iterable[str]) -> list[str]:
        """Return texts as metrics compare them."""
        return [text.lower() if self.config.lowercase else text for text in texts]

    def _references(self, examples: Sequence[TranslateExample]) -> dict[int, list[str]]:
        """Return the references of each example by its number; of rows that are grouped, by that of the first."""
        groups: dict[int, list[str]] = defaultdict(list)
        first: dict[str, int] = {}
        for number, example in enumerate(examples):
            owner = first.setdefault(example.text, number) if self.config.group_references else number
            groups[owner] += example.references
        return groups

    def errors(self, answers: Sequence[Answer], examples: Sequence[TranslateExample]) -> list[WrongAnswer | None]:
        """Return the texts that are no reference, each with its own BLEU: the lowest comes first."""
        errors: list[WrongAnswer | None] = [None] * len(examples)
        for number, references in self._references(examples).items():
            errors[number] = self._error(answers[number], references)
        return errors

    def _error(self, answer: Answer, references: list[str]) -> WrongAnswer | None:
        predicted, gold = str(answer["text"]), references[0] if len(references) == 1 else references
        (text,), targets = self._compared([predicted]), self._compared(references)
        if text in targets:
            return None
        quality = sentence_bleu(text, targets)
        return WrongAnswer(gold, predicted, answer["score"], quality, {"bleu": round(quality, 4)})
