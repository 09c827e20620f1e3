"""Translation: sequence to sequence, by any model that encodes a source and generates a target."""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import Field

from weft.config.schema import Named, Run, Section
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
from weft.tasks.metrics import bleu, exact_match, sentence_bleu
from weft.tokenization.trainable import Tokenizer
from weft.tokens import Tokens


class TranslateConfig(Named):
    """Label smoothing, and the default decoding options."""

    label_smoothing: float = Field(0.0, ge=0, lt=1)  # probability spread over all tokens in the loss
    lowercase: bool = False  # metrics ignore case
    unknown: bool = False  # whether the unknown token may be generated
    decode: DecodingConfig = DecodingConfig()


class TranslateExample(base.Example):
    """A text, and for training and evaluation its translation."""

    text: str
    target: str | None = None


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
    metrics: tuple[str, ...] = ("exact_match", "bleu")
    metric = "exact_match"
    label_fields = ("target",)
    config: TranslateConfig

    def check(self, run: Run) -> None:
        """Raise an error for `truncation: window`: translating windows is not translating the text."""
        if run.data.truncation == "window":
            raise ConfigError("data.truncation: task 'translate' cannot use 'window'; try cut, drop or error")

    @property
    def special_token_affixes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return what stands around a source: eos alone."""
        return (), (self.tokenizer.specials.eos,)

    def texts(self, example: TranslateExample) -> tuple[list[str], list[str]]:
        """Return both sides."""
        return [example.text], [] if example.target is None else [example.target]

    def encode_batch(
        self, examples: Sequence[TranslateExample], tokenizer: Tokenizer, limit: TruncationPolicy
    ) -> list[list[Item]]:
        """Encode many pairs with one call of the tokenizer for each side."""
        sources = tokenizer.ids([example.text for example in examples], limit.needed)
        targets = tokenizer.target.ids([example.target or "" for example in examples], limit.needed)
        return [self._items(*pair, tokenizer, limit) for pair in zip(sources, targets, strict=True)]

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
        candidates = [
            {"text": self.tokenizer.target.decode(hypothesis.ids), "score": round(hypothesis.score, 6)}
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
        return head.generation_request(self.collate(items, np.random.default_rng(0)).numbered([row]), options)

    def decode_generated(self, request: GenerationRequest, ids: Sequence[int]) -> str:
        """Return the text of a translation."""
        return self.tokenizer.target.decode(list(ids))

    def format_answer(self, answer: Answer) -> str:
        """Return the translation on one line: a line break would look like the next answer."""
        return " ".join(str(answer["text"]).splitlines())

    def format_alternatives(self, answer: Answer) -> str:
        """Return all translations that were asked for on one line, with tabs between them."""
        return format_candidates(answer)

    def score(self, answers: Sequence[Answer], examples: Sequence[TranslateExample]) -> dict[str, float]:
        """Compute exact match, and BLEU by sacreBLEU."""
        texts = [str(answer["text"]) for answer in answers]
        targets = [example.target or "" for example in examples]
        if self.config.lowercase:
            texts, targets = [text.lower() for text in texts], [target.lower() for target in targets]
        return {"exact_match": exact_match(texts, targets), "bleu": bleu(texts, targets)}

    def errors(self, answers: Sequence[Answer], examples: Sequence[TranslateExample]) -> list[WrongAnswer | None]:
        """Return the texts that are not the target, each with its own BLEU: the lowest comes first."""
        return [self._error(*pair) for pair in zip(answers, examples, strict=True)]

    def _error(self, answer: Answer, example: TranslateExample) -> WrongAnswer | None:
        text, target = str(answer["text"]), example.target or ""
        compared = (text.lower(), target.lower()) if self.config.lowercase else (text, target)
        if compared[0] == compared[1]:
            return None
        quality = sentence_bleu(*compared)
        return WrongAnswer(target, text, answer["score"], quality, {"bleu": round(quality, 4)})
