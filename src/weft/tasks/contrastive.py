"""Contrastive learning of sentence vectors: SimCSE (Gao, Yao and Chen 2021), by any encoder.

A batch has texts x_i, each with a positive y_i, and perhaps hard negatives z_k. With the pooled vectors f, their cosine
and the temperature τ, the loss of text i is (equations 1 and 5)

    -log exp(cos(f(x_i), f(y_i)) / τ) / Σ_c exp(cos(f(x_i), f(c)) / τ),   c over all y_j and z_k of the batch

Without a pair, y_i is x_i itself: the two are told apart by their dropout masks alone (section 3, unsupervised). With
`pool: cls`, a dense layer with tanh follows the pooling in training, and is left out afterwards (section 6.3).

Departures: texts of a batch that are equal, or linked by pairs (a ~ b and a ~ c), are not negatives of each other. The
negatives of a text are those of its own batch on its own process: neither `train.accumulate` nor more processes add
any.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from pydantic import BeforeValidator, Field
from torch import Tensor, nn
from torch.nn import functional as F

from weft.config.run import Run
from weft.config.schema import Named, Section
from weft.data.batching.loader import plan_batches
from weft.data.batching.packed_items import PackedItems
from weft.data.labels import parse_number
from weft.data.truncation import TruncationPolicy
from weft.errors import ConfigError, DataError
from weft.models.base import num_matrix_parameters
from weft.nn.layers.losses import contrastive_sum
from weft.nn.layers.pooling import PoolingMode, pool_tokens
from weft.tasks import base
from weft.tasks.base import Answer
from weft.tasks.batch import Batch, Item
from weft.tasks.capabilities import CustomEvaluation, Metrics
from weft.tasks.encoding import EvaluationData
from weft.tasks.head import Head, Sums
from weft.tasks.inference_batches import map_in_threads
from weft.tasks.metrics import pearson, spearman
from weft.tasks.sharding import share, sum_over_ranks
from weft.tasks.text_pairs import TextTokens, add_special_tokens, tokenize_texts
from weft.tokenization.trainable import Tokenizer
from weft.tokens import Tokens, char_ids

EVALUATION_TOKENS = 2048  # in a batch of an evaluation
EVALUATION_ROWS = 1024  # rows among which a text's pair is to be found
SIDES = 3  # arrays of tokens in an item: the text, its pair and its hard negative
SCORE_METRICS = ("spearman", "pearson")

PairOutput = float | list[float]  # the cosine of a pair, or the vector of a text alone


class ContrastiveConfig(Named):
    """The temperature of the loss, and the pooling of tokens to a vector, which `Pipeline.embed` then uses, too."""

    temperature: float = Field(0.05, gt=0)  # cosines are divided by it
    pool: PoolingMode = "mean"  # cls: the first token; in training a dense layer with tanh follows it


def _read_score(value: object) -> float:
    return parse_number(value, "must be a number, how alike the pair is")


class ContrastiveExample(base.Example):
    """A text and a text that means the same (none: the text itself), perhaps one that does not.

    For evaluation a pair may have a score, how alike the two are; training takes pairs that are alike only.
    """

    text: str
    pair: str | None = None
    negative: str | None = None
    score: Annotated[float, BeforeValidator(_read_score)] | None = None


class ContrastiveHead(Head):
    """The body's hidden states, pooled to one vector of length 1 a text.

    The sequences of a batch are its B texts, the B positives and the hard negatives; `targets` has the group of each.
    """

    def __init__(self, body: Any, config: ContrastiveConfig) -> None:
        super().__init__(body)
        body.drop_pooler()
        self.pool, self.temperature = config.pool, config.temperature
        self.projection = nn.Linear(body.width, body.width) if config.pool == "cls" else None

    def vectors(self, tokens: Tokens) -> Tensor:
        """Return the vector of each sequence, of length 1, in float32 or wider: (B, D)."""
        vectors = pool_tokens(self.body.encode(tokens)[0], tokens, self.pool)
        if self.training and self.projection is not None:
            vectors = self.projection(vectors).tanh()
        return F.normalize(vectors.to(torch.promote_types(vectors.dtype, torch.float32)), dim=-1)

    def forward(self, batch: Batch, carry: Any = None) -> tuple[Sums, Any]:
        """Return the loss, summed over the texts."""
        assert batch.targets is not None
        pairs, vectors = batch.counts["pairs"], self.vectors(batch.tokens)
        groups = batch.targets[:pairs], batch.targets[pairs:]
        return {"pairs": contrastive_sum(vectors[:pairs], vectors[pairs:], *groups, self.temperature)}, None

    def predict(self, batch: Batch, options: Section) -> list[PairOutput]:
        """Return the cosine of each pair; of a text without one, its vector."""
        assert batch.labels is not None
        first, second = self.vectors(batch.tokens)[: 2 * len(batch.labels)].chunk(2)
        cosines, vectors = (first * second).sum(-1).tolist(), first.cpu()
        return [cosines[row] if is_pair else vectors[row].tolist() for row, is_pair in enumerate(batch.labels.tolist())]

    def flops(self, batch: Batch) -> int:
        """Return the FLOPs of the body, of the projection and of the cosines."""
        pairs, sequences = batch.counts["pairs"], len(batch.tokens)
        projection = 0 if self.projection is None else num_matrix_parameters(self.projection)
        cosines: int = pairs * (sequences - pairs) * self.body.width
        return super().flops(batch) + 2 * (projection * sequences + cosines)


class Contrastive(CustomEvaluation):
    """Items are (bos text eos; bos pair eos; bos negative eos), empty where there is none.

    Then come the characters of each, if the model reads them.
    """

    Config: ClassVar[type[Named]] = ContrastiveConfig
    Example = ContrastiveExample
    metrics: tuple[str, ...] = (*SCORE_METRICS, "accuracy")  # alignment and uniformity alone select no model
    metric: str = "accuracy"  # where the pairs of the validation data have scores, spearman
    json_fields = frozenset({"text", "pair"})
    num_token_arrays: int = SIDES
    config: ContrastiveConfig

    @property
    def input_fields(self) -> tuple[str, ...]:
        """A text or a pair of texts."""
        return ("text", "pair")

    @property
    def num_special_tokens(self) -> int:
        """One before a text, one after it."""
        return 2

    def check(self, run: Run) -> None:
        """Raise an error for `truncation: window`: a text has one vector."""
        if run.data.truncation == "window":
            raise ConfigError("data.truncation: task 'contrastive' cannot use 'window'; try cut, drop or error")

    def resolve_config(self, examples: Iterable[ContrastiveExample]) -> Named:
        """Return the configuration as it is; raise if the first example to train on has a score."""
        first = next(iter(examples), None)
        if first is not None and first.score is not None:
            raise DataError(
                f"data.train: its pairs have a score, the first {first.score:g}, but task 'contrastive' learns from "
                "pairs that are alike; keep those, without the score, or learn the scores by task classify, regression"
            )
        return self.config

    def texts(self, example: ContrastiveExample) -> tuple[list[str], list[str]]:
        """Return all texts: they share one tokenizer."""
        texts = (example.text, example.pair, example.negative)
        return [text for text in texts if text is not None], []

    def without_labels(self, example: ContrastiveExample) -> ContrastiveExample:
        """Return the text or the pair alone."""
        return example.model_copy(update={"negative": None, "score": None})

    def encode_batch(
        self, examples: Sequence[ContrastiveExample], tokenizer: Tokenizer, limit: TruncationPolicy
    ) -> list[list[Item]]:
        """Encode many examples with one call of the tokenizer."""
        texts = [text for example in examples for text in self.texts(example)[0]]
        encoded = iter(tokenize_texts(texts, tokenizer, self.uses_chars, limit))
        sides = (
            [None if text is None else next(encoded) for text in (example.text, example.pair, example.negative)]
            for example in examples
        )
        return [self._items(texts, tokenizer, limit) for texts in sides]

    def _items(self, texts: Sequence[TextTokens | None], tokenizer: Tokenizer, limit: TruncationPolicy) -> list[Item]:
        """Truncate each text by itself; the example is dropped if one of them is."""
        sequences: list[TextTokens] = []
        for text in texts:
            fits = [[]] if text is None else limit.apply(text.ids, windows=False)
            if not fits:
                return []
            empty = TextTokens([], [])
            sequences.append(
                empty if text is None else add_special_tokens(text.truncate(len(fits[0])), None, tokenizer)[0]
            )
        chars = [char_ids(sequence.words or ()) for sequence in sequences] if self.uses_chars else []
        return [(*(np.array(sequence.ids, np.int32) for sequence in sequences), *chars)]

    def collate(self, items: Sequence[Item], rng: np.random.Generator) -> Batch:
        """Join the texts, their positives and the hard negatives; `labels` says which texts have a pair."""
        sides = [(item, 0) for item in items]
        sides += [(item, 1 if len(item[1]) else 0) for item in items]
        sides += [(item, 2) for item in items if len(item[2])]
        sequences = [item[side] for item, side in sides]
        tokens = Tokens.pack(sequences)
        if self.uses_chars:
            tokens = tokens.with_chars([item[SIDES + side] for item, side in sides])
        has_pair = torch.tensor([len(item[1]) > 0 for item in items])
        groups = torch.from_numpy(group_sequences(sequences, len(items)))
        return Batch(tokens, groups, {"pairs": len(items)}, labels=has_pair)

    def max_sequence_length(self, data: PackedItems) -> int | None:
        """Return the length of the longest text."""
        firsts = data.items[:-1] + np.arange(SIDES)[:, None]
        return int((data.starts[firsts + 1] - data.starts[firsts]).max(initial=0))

    def head(self, model: Any) -> ContrastiveHead:
        """Return the body with the pooling."""
        return ContrastiveHead(model, self.config)

    def answer(self, example: ContrastiveExample, outputs: list[PairOutput]) -> Answer:
        """Return the cosine of a pair, or the vector of a text."""
        (output,) = outputs
        if isinstance(output, float):
            return {"score": round(output, 6)}
        return {"vector": [round(value, 6) for value in output]}

    def preview(self, example: ContrastiveExample) -> tuple[str, str]:
        """Return the texts, and the score if there is one."""
        return " | ".join(self.texts(example)[0]), "" if example.score is None else f"{example.score:g}"

    def evaluate(self, head: Head, data: EvaluationData) -> Metrics:
        """Return the correlation of cosines with scores; without scores, how well texts find their pairs.

        The metric that selects the best model is the one that the data allows.
        """
        assert isinstance(head, ContrastiveHead)
        scores = [example.score for example in data.examples if example.score is not None]
        if scores and len(scores) < len(data.examples):
            raise DataError(
                f"score: given for {len(scores):,} of {len(data.examples):,} examples; give one to all, or to none"
            )
        vectors = self._vectors(head, data.items)
        if not scores:
            self.metric = "accuracy"
            return Metrics(self._retrieval(vectors, data.items))
        self.metric = "spearman"
        cosines = (vectors[0] * vectors[1]).sum(-1).tolist()
        return Metrics({"spearman": spearman(cosines, scores), "pearson": pearson(cosines, scores)})

    def unavailable_metric(self, metric: str, examples: Sequence[ContrastiveExample]) -> str:
        """Return why a metric is not given: correlations need scores, and all others are of pairs without them."""
        scored = any(example.score is not None for example in examples)
        if (metric in SCORE_METRICS) == scored:
            return ""
        return "its pairs have scores, to correlate with" if scored else "its rows have no score to correlate with"

    def _vectors(self, head: ContrastiveHead, data: PackedItems) -> Tensor:
        """Return the vectors of all texts, positives and hard negatives, (3, items, D), 0 where there is none."""
        device = head.device

        def encode(rows: np.ndarray) -> Tensor:
            batch = self.collate([data[row] for row in rows.tolist()], np.random.default_rng(0))
            with torch.inference_mode():
                return head.vectors(batch.tokens.to(device)).cpu()

        batches = share(plan_batches(data, EVALUATION_TOKENS, seed=None))
        encoded = map_in_threads(encode, batches) if device.type == "cpu" else map(encode, batches)
        vectors = torch.zeros(SIDES, len(data), head.body.width)
        for rows, part in zip(batches, encoded, strict=True):
            negatives = [row for row in rows.tolist() if len(data[row][2])]
            vectors[0, rows], vectors[1, rows] = part[: 2 * len(rows)].chunk(2)
            vectors[2, negatives] = part[2 * len(rows) :]
        return sum_over_ranks(vectors)

    def _retrieval(self, vectors: Tensor, data: PackedItems) -> dict[str, float]:
        """Return loss, accuracy, alignment and uniformity, within blocks of `EVALUATION_ROWS` rows."""
        sums = dict.fromkeys(("loss", "accuracy", "alignment", "uniformity"), 0.0)
        for start in range(0, len(data), EVALUATION_ROWS):
            rows = range(start, min(start + EVALUATION_ROWS, len(data)))
            batch = self.collate([data[row] for row in rows], np.random.default_rng(0))
            negatives = [row for row in rows if len(data[row][2])]
            block = torch.cat([vectors[0, rows], vectors[1, rows], vectors[2, negatives]])
            for name, value in self._block_sums(block, batch).items():
                sums[name] += value
        means = {name: value / len(data) for name, value in sums.items()}
        return {**means, "uniformity": float(np.log(means["uniformity"])) if means["uniformity"] else 0.0}

    def _block_sums(self, vectors: Tensor, batch: Batch) -> dict[str, float]:
        """Return the sums over the texts of a block; of the uniformity, of the mean before the logarithm."""
        assert batch.targets is not None
        pairs, groups = batch.counts["pairs"], batch.targets
        first, candidates = vectors[:pairs], vectors[pairs:]
        same = groups[:pairs, None] == groups[pairs:]
        cosines = (first @ candidates.T).masked_fill(same.fill_diagonal_(False), -torch.inf)
        between = groups[:pairs, None] != groups[:pairs]
        potential = (4 * (first @ first.T) - 4).exp()[between]  # exp(-2 |x - y|²), of vectors of length 1
        return {
            "loss": float(contrastive_sum(first, candidates, groups[:pairs], groups[pairs:], self.config.temperature)),
            "accuracy": float((cosines.argmax(-1) == torch.arange(pairs)).sum()),
            "alignment": float((first - candidates[:pairs]).square().sum()),
            "uniformity": float(potential.mean()) * pairs if len(potential) else 0.0,
        }


def group_sequences(sequences: Sequence[np.ndarray], pairs: int) -> np.ndarray:
    """Return the group of each sequence: equal ones share it, and so do sequences i and i + pairs of each pair."""
    numbers: dict[bytes, int] = {}
    nodes = [numbers.setdefault(sequence.tobytes(), len(numbers)) for sequence in sequences]
    parents = list(range(len(numbers)))

    def root(node: int) -> int:
        while parents[node] != node:
            parents[node] = parents[parents[node]]
            node = parents[node]
        return node

    for text, positive in zip(nodes[:pairs], nodes[pairs : 2 * pairs], strict=True):
        parents[root(positive)] = root(text)
    return np.array([root(node) for node in nodes], np.int64)
