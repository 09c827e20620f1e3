"""Text embeddings: an encoder's hidden states, pooled to one vector a text, or one vector a token.

A text is tokenized as in the model's task, with special tokens around it where the task has them. With the layers h_0
(the embeddings) .. h_L of its T tokens, special tokens included, x_t is one layer, or the sum, the mean or the
concatenation of several, and the vector of the text is

    mean     1/T Σ_t x_t                        max   the elementwise maximum over the tokens
    cls      x_1, of the first token            last  x_T, of the last one
    pooler   the body's own pooled output, as for `classify`: BERT's pooler, an RNN's last hidden states
    tokens   all x_t, (T, D)

So mean and cls are those of sentence-transformers (Reimers and Gurevych 2019). A text without tokens, such as one of
unknown words only for word2vec, has the zero vector.

Texts are processed as a stream, some thousands at a time; each chunk is sorted by length, so that a batch has texts of
similar length, and its vectors are returned in the caller's order. Memory does not grow with the number of texts.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from operator import index
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from weft.data.truncation import COUNTED, count_tokens
from weft.errors import ConfigError, DataError, RoleError, did_you_mean
from weft.models.base import Role
from weft.nn.kernels.self_test import try_reading
from weft.nn.layers.packed_linear import frozen_weights
from weft.nn.layers.pooling import pool_tokens
from weft.tasks.base import Task
from weft.tasks.finite_answers import NOT_FINITE
from weft.tasks.head import Head
from weft.tasks.inference_batches import map_in_threads
from weft.tokens import Tokens

Pool = Literal["mean", "cls", "max", "last", "pooler", "tokens"]
Combine = Literal["sum", "mean", "concat"]
LayerSelection = int | str | Sequence[int]  # -1, "-4:", "1,3" or [1, 3]

CHUNK_SIZE, MAX_CHARS = 8192, 1 << 22  # texts in a chunk, and characters
MAX_CHARS_PER_TOKEN_VECTORS = 1 << 18  # characters in a chunk with pool="tokens"
BUDGET, BUDGET_ON_GPU = 1024, 1 << 16  # tokens in a batch
MIN_SHARE = 128  # tokens that are worth a thread of their own


@dataclass(frozen=True)
class EmbeddingOptions:
    """Which layers to use, how to combine them, how to pool the tokens, and whether to normalize to unit length."""

    pool: Pool = "mean"
    layers: LayerSelection = -1
    combine: Combine = "sum"
    normalize: bool = False

    def __post_init__(self) -> None:
        for name, given, known in (("pool", self.pool, get_args(Pool)), ("combine", self.combine, get_args(Combine))):
            if given not in known:
                raise ConfigError(f"{name}: there is no {given!r}; {did_you_mean(str(given), known)}")
        if self.pool == "pooler" and self.layers != -1:
            raise ConfigError(
                f"layers: the pooled output is the body's own, of its last layer, but {self.layers!r} is asked for; "
                "leave it out, or take another pool, such as mean"
            )


@dataclass(frozen=True)
class _TokenizedTexts:
    """A tokenized chunk: the distinct texts, longest first, and the row of each given text among them."""

    ids: np.ndarray  # (N,)
    lengths: np.ndarray  # (B,)
    rows: np.ndarray  # (texts given,)
    first: int  # the number of the first given text
    chars: list[list[np.ndarray]] | None
    failed: list[int]  # of the texts given, those that have no vector

    def batches(self, budget: int) -> Iterator[Tokens]:
        """Yield batches of at most `budget` tokens, or one text; texts without tokens are left out."""
        ends, last = self.lengths.cumsum(), int(np.count_nonzero(self.lengths))
        first = start = 0
        while first < last:
            stop = min(last, max(first + 1, int(np.searchsorted(ends, start + budget, side="right"))))
            end = int(ends[stop - 1])
            tokens = Tokens.flat(torch.from_numpy(self.ids[start:end]), torch.from_numpy(self.lengths[first:stop]))
            if self.chars is not None:
                tokens = tokens.with_chars(list(map(np.concatenate, self.chars[first:stop])))
            yield tokens
            first, start = stop, end


class Embedder:
    """Turns texts into vectors; `longest` is the maximum number of tokens of a text, special tokens included.

    With `on_error="nan"` a text that cannot be embedded has a vector of NaN, of tokens none, and its error is in
    `errors`, by its number in the stream, from 1.
    """

    def __init__(
        self,
        task: Task,
        head: Head,
        choice: EmbeddingOptions,
        longest: int | None = None,
        truncate: bool = False,
        lowercase: bool = False,
        on_error: Literal["raise", "nan"] = "raise",
    ) -> None:
        check_encodes(head)
        self.task, self.head, self.choice = task, head.eval(), choice
        self.layers = chosen_layers(choice.layers, head.body.mixable_layers)
        self.before, self.after = task.special_token_affixes
        self.longest, self.truncate, self.lowercase = longest, truncate, lowercase
        self.cut = 0  # number of truncated texts
        self.on_error = on_error
        self.errors: dict[int, DataError] = {}
        weight = next(head.parameters())
        self._device, self._half = weight.device, weight.dtype is not torch.float32
        self._budget = BUDGET if self._device.type == "cpu" else BUDGET_ON_GPU

    def stream(self, texts: Iterable[str | DataError]) -> Iterator[Any]:
        """Yield the vectors (B, D) of some thousands of texts at a time; with pool tokens, a list of (T, D).

        An error in the place of a text is treated as one of the text.
        """
        self.errors = {}
        with frozen_weights():
            yield from map(self._embed, self._tokenize_ahead(_chunk_texts(texts, self.chunk_chars)))

    @property
    def chunk_chars(self) -> int:
        """The characters after which a chunk of texts ends, if it does not by their number, `CHUNK_SIZE`."""
        return MAX_CHARS_PER_TOKEN_VECTORS if self.choice.pool == "tokens" else MAX_CHARS

    def _tokenize_ahead(self, chunks: Iterator[tuple[int, list[Any]]]) -> Iterator[_TokenizedTexts]:
        """Yield the tokenized chunks, one ahead of the model in a thread: the tokenizer releases the GIL."""
        first, second = next(chunks, None), next(chunks, None)
        if second is None:  # few texts: a thread would cost more than it saves
            yield from (self._tokenize(*chunk) for chunk in (first,) if chunk is not None)
            return
        assert first is not None
        pending: deque[Future[_TokenizedTexts]] = deque()
        with ThreadPoolExecutor(1) as pool:
            for chunk in chain((first, second), chunks):
                pending.append(pool.submit(self._tokenize, *chunk))
                if len(pending) > 1:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()

    def all(self, texts: Iterable[str | DataError]) -> Any:
        """Return the vectors of all texts: (B, D), or a list of (T, D)."""
        chunks = list(self.stream(texts))
        if self.choice.pool == "tokens":
            return list(chain.from_iterable(chunks))
        return np.concatenate(chunks) if chunks else np.zeros((0, self.width), np.float32)

    @property
    def width(self) -> int:
        """The dimension D of a vector."""
        return self._encode(_single_token(self.task)).shape[1]

    def tokens(self, text: str) -> list[str]:
        """Return the tokens of a text, special ones included: those that `pool="tokens"` has vectors for."""
        return [self.task.tokenizer.token(id) for id in self._tokenize(1, [text]).ids.tolist()]

    def _tokenize(self, first: int, chunk: Sequence[str | DataError]) -> _TokenizedTexts:
        """Tokenize each distinct text and add special tokens; sort by length, longest first, then alphabetically.

        So batches do not depend on the order of the given texts, and neither do vectors, to the last bit.
        """
        texts = [self._check_text(text, number) for number, text in enumerate(chunk, first)]
        texts = [text.lower() for text in texts] if self.lowercase else texts
        rows = {text: row for row, text in enumerate(dict.fromkeys(texts))}
        distinct, row_of_text = list(rows), np.fromiter(map(rows.__getitem__, texts), np.int64, len(texts))
        num_specials = len(self.before) + len(self.after)
        room = None if self.longest is None else max(0, self.longest - num_specials)
        needed = None if self.longest is None else self.longest + COUNTED
        ids = self.task.tokenize(distinct, needed)
        chars = self.task.char_ids(distinct, needed) if self.task.uses_chars else None
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        if room is not None and lengths.max(initial=0) > room:
            self._check_lengths(lengths[row_of_text], room, first, num_specials)
            ids, lengths = [text[:room] for text in ids], lengths.clip(max=room)
            chars = chars and [_truncate_chars(text, room, len(self.before), len(self.after)) for text in chars]
        order = np.array(sorted(range(len(ids)), key=lambda row: (-lengths[row], distinct[row])), np.int64)
        sorted_ids = chain.from_iterable(map(ids.__getitem__, order.tolist()))
        flat = self._add_specials(np.fromiter(sorted_ids, np.int64, int(lengths.sum())), lengths[order])
        chars = chars and [chars[row] for row in order.tolist()]
        failed = [row for row in range(len(chunk)) if first + row in self.errors]
        return _TokenizedTexts(
            flat, lengths[order] + num_specials, np.argsort(order)[row_of_text], first, chars, failed
        )

    def _check_text(self, text: object, number: int) -> str:
        """Return a text, or an empty one in the place of what is none."""
        if isinstance(text, str):
            return text
        is_error = isinstance(text, DataError)
        self._fail(number, text if is_error else DataError(f"must be a text, but is {repr(text)[:60]} instead"))
        return ""

    def _fail(self, number: int, error: Any) -> None:
        """Raise the error of a text, with its number, or keep it."""
        if self.on_error == "raise":
            raise DataError(f"text {number}: {error}")
        self.errors[number] = error

    def _check_lengths(self, lengths: np.ndarray, room: int, first: int, num_specials: int) -> None:
        """Count the texts that are too long; without `truncate`, each of them is an error."""
        too_long = np.flatnonzero(lengths > room).tolist()
        if self.truncate:
            self.cut += len(too_long)
            return
        for row in too_long:
            size = count_tokens(int(lengths[row]) + num_specials, room + num_specials)
            message = (
                f"has {size} tokens, special tokens included, and {self.longest:,} are "
                "read; shorten it, or have it cut with truncate=True (command line: --truncate)"
            )
            self._fail(first + row, DataError(message))

    def _add_specials(self, flat: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return the flat ids (N,) with special tokens around each text."""
        full_lengths = lengths + len(self.before) + len(self.after)
        ends = full_lengths.cumsum()
        ids, is_text = np.empty(int(full_lengths.sum()), np.int64), np.ones(int(full_lengths.sum()), bool)
        specials = [(ends - full_lengths + offset, id) for offset, id in enumerate(self.before)]
        specials += [(ends - len(self.after) + offset, id) for offset, id in enumerate(self.after)]
        for positions, id in specials:
            ids[positions], is_text[positions] = id, False
        ids[is_text] = flat
        return ids

    def _embed(self, texts: _TokenizedTexts) -> Any:
        """Encode a tokenized chunk, and return vectors in the order of the given texts."""
        if len(texts.ids) > BUDGET_ON_GPU and self._device.type == "cuda" and self._half:
            try_reading(self._device)
        batches = list(texts.batches(self._batch_tokens(len(texts.ids))))
        parts = list(
            map_in_threads(self._encode, batches) if self._device.type == "cpu" else map(self._encode, batches)
        )
        flat = torch.cat(parts).cpu().numpy() if parts else np.zeros((0, self.width), np.float32)
        failed = [*texts.failed, *self._not_finite(flat, texts)]
        if self.choice.pool == "tokens":
            split = np.split(flat, texts.lengths.cumsum()[:-1]) if len(texts.lengths) else []
            vectors_of_texts = [split[row] for row in texts.rows.tolist()]
            for row in failed:
                vectors_of_texts[row] = vectors_of_texts[row][:0]
            return vectors_of_texts
        empty = np.zeros((len(texts.lengths) - len(flat), flat.shape[1]), np.float32)  # for texts without tokens
        vectors = np.concatenate([flat, empty])[texts.rows]
        vectors[failed] = np.nan
        return vectors

    def _batch_tokens(self, tokens: int) -> int:
        """Return the number of tokens in a batch: on the CPU each thread has one, where there are enough of them."""
        if self._device.type != "cpu":
            return self._budget
        share = -(-tokens // torch.get_num_threads())
        return min(self._budget, max(share, MIN_SHARE))

    def _not_finite(self, flat: np.ndarray, texts: _TokenizedTexts) -> list[int]:
        """Return the given texts whose vectors (N, D), of texts or of tokens, are not finite; each is an error."""
        if np.isfinite(flat).all():
            return []
        wrong = ~np.isfinite(flat).all(1)
        if self.choice.pool == "tokens":
            wrong = np.array([part.any() for part in np.split(wrong, texts.lengths.cumsum()[:-1])])
        rows = np.flatnonzero(np.isin(texts.rows, np.flatnonzero(wrong))).tolist()
        for row in rows:
            self._fail(texts.first + row, DataError(NOT_FINITE))
        return rows

    def _encode(self, tokens: Tokens) -> Tensor:
        with torch.inference_mode():
            return self._pool(tokens.to(self._device))

    def _pool(self, tokens: Tokens) -> Tensor:
        """Return float32 vectors (B, D), or (N, D) with pool tokens."""
        pool, body = self.choice.pool, self.head.body
        if pool == "pooler":
            vectors: Tensor = body.pooled_output(tokens).float()
        else:
            vectors = pooled(body.encode(tokens, self.layers), tokens, pool, self.choice.combine)
        return F.normalize(vectors, dim=-1) if self.choice.normalize else vectors


def pooled(states: Tensor, tokens: Tokens, pool: Pool, combine: Combine) -> Tensor:
    """Combine layers (L, N, D) and pool the tokens of each non-empty sequence: float32 (B, L·D or D)."""
    if pool == "cls" or pool == "last":
        return combine_layers(pool_tokens(states, tokens, pool), combine)
    vectors = combine_layers(states, combine)
    return pool_tokens(vectors, tokens, pool) if pool == "mean" or pool == "max" else vectors


def combine_layers(states: Tensor, combine: Combine) -> Tensor:
    """Combine layers (L, N, D) to float32: their sum or mean (N, D), or their concatenation (N, L·D)."""
    if len(states) == 1:
        return states[0].float()
    if combine == "concat":
        return states.transpose(0, 1).flatten(1).float()
    total = states.sum(0, dtype=torch.float32)
    return total / len(states) if combine == "mean" else total


def chosen_layers(layers: LayerSelection, levels: Sequence[int]) -> tuple[int, ...]:
    """Parse a choice of layers: -1, [1, 3], "1,3", or a slice of `levels`, all there are, such as "-4:"."""
    parts = layers.split(",") if isinstance(layers, str) and ":" not in layers else layers
    try:
        if isinstance(parts, str):
            start, stop = (int(part) if part.strip() else None for part in parts.split(":"))
            chosen = tuple(levels[slice(start, stop)])
        else:
            chosen = tuple(_parse_layer(part) for part in (parts if isinstance(parts, Iterable) else [parts]))
    except (TypeError, ValueError):
        chosen = ()
    if not chosen:
        raise ConfigError(
            f"layers: must be a layer such as -1, a list such as 1,3 or a slice such as -4: of the {len(levels)} there "
            f"are, but is {layers!r} instead"
        )
    return chosen


def _parse_layer(value: Any) -> int:
    """Parse a layer's number; True and 1.5 are errors."""
    if isinstance(value, bool):
        raise TypeError
    return int(value) if isinstance(value, str) else index(value)


def check_encodes(head: Head) -> None:
    """Raise an error if the model is not an encoder."""
    if Role.ENCODER not in type(head.body).roles(head.body.config):
        raise RoleError(
            f"model: {head.body.config.name!r}, as configured, gives texts no vectors: it does not encode; take one "
            "that does, such as a bert, gpt, elmo or rnn"
        )


def _chunk_texts(texts: Iterable[Any], max_chars: int) -> Iterator[tuple[int, list[Any]]]:
    """Yield chunks of `CHUNK_SIZE` texts or `max_chars` characters, each with the number of its first text, from 1."""
    chunk: list[Any] = []
    num_chars = first = 0
    for text in texts:
        chunk.append(text)
        num_chars += len(text) if isinstance(text, str) else 0
        if len(chunk) == CHUNK_SIZE or num_chars >= max_chars:
            yield first + 1, chunk
            first, chunk, num_chars = first + len(chunk), [], 0
    if chunk:
        yield first + 1, chunk


def _truncate_chars(chars: list[np.ndarray], room: int, before: int, after: int) -> list[np.ndarray]:
    """Truncate a text's characters to `room` tokens, keeping those of the special tokens."""
    last = len(chars) - after
    return [*chars[: min(before + room, last)], *chars[last:]]


def _single_token(task: Task) -> Tokens:
    tokens = Tokens.pack([[task.tokenizer.specials.eos]])
    return tokens.with_chars([task.char_ids([""])[0][-1]]) if task.uses_chars else tokens
