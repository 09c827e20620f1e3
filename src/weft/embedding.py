"""Vectors of texts: what a model that encodes makes of them, pooled to one vector a text, or token by token.

A text is read as the model's task reads it: between the marks of beginning and end, where there are such. With the
layers h_0 (the embeddings) .. h_L of its T tokens, marks included, x_t is one layer, or the sum, the mean or the
concatenation of several, and the vector of the text is

    mean     1/T Σ_t x_t                        max   the largest of each number over the tokens
    cls      x_1, of the first token            last  x_T, of the last one
    summary  what the body itself makes of a text for `classify`: BERT's pooler, an RNN's last states
    tokens   all x_t, (T, D)

So mean and cls are those of sentence-transformers (Reimers and Gurevych 2019). A text of which nothing is read, such as
one of unknown words alone to word2vec, has the vector 0.

Texts are taken as they come, some thousands at a time; those are sorted by length, so that like goes with like in a
batch, and given back in the caller's order. What is held does not grow with their number.
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

from weft.errors import ConfigError, DataError, RoleError, did_you_mean
from weft.models.base import Role
from weft.nn.kernels.self_test import try_reading
from weft.nn.layers.linear import frozen_weights
from weft.tasks.base import Head, Task
from weft.tasks.inference import side_by_side
from weft.tokens import Tokens

Pool = Literal["mean", "cls", "max", "last", "summary", "tokens"]
Combine = Literal["sum", "mean", "concat"]
Layers = int | str | Sequence[int]  # -1, "-4:", "1,3" or [1, 3]

AT_ONCE, SIGNS = 8192, 1 << 22  # texts, and characters of them, that are held at a time
SIGNS_OF_TOKENS = 1 << 18  # the same where each token has a vector
BUDGET, BUDGET_ON_GPU = 1024, 1 << 16  # tokens in a batch


@dataclass(frozen=True)
class Choice:
    """What is taken of a model: which layers, how several become one, how tokens become a text, of length 1 or not."""

    pool: Pool = "mean"
    layers: Layers = -1
    combine: Combine = "sum"
    normalize: bool = False

    def __post_init__(self) -> None:
        for name, given, known in (("pool", self.pool, get_args(Pool)), ("combine", self.combine, get_args(Combine))):
            if given not in known:
                raise ConfigError(f"{name}: there is no {given!r}; {did_you_mean(str(given), known)}")
        if self.pool == "summary" and self.layers != -1:
            raise ConfigError(
                f"layers: the summary is the body's own, of its last layer, but {self.layers!r} is asked for; leave it "
                "out, or take another pool, such as mean"
            )


@dataclass(frozen=True)
class _Read:
    """Distinct texts as tokens, the longest first, and which of them each text is that was given."""

    ids: np.ndarray  # (N,)
    lengths: np.ndarray  # (B,)
    rows: np.ndarray  # (texts given,)
    spelt: list[list[np.ndarray]] | None

    def batches(self, budget: int) -> Iterator[Tokens]:
        """Yield the texts that have tokens, in batches."""
        ends, last = self.lengths.cumsum(), int(np.count_nonzero(self.lengths))
        first = start = 0
        while first < last:
            stop = min(last, max(first + 1, int(np.searchsorted(ends, start + budget, side="right"))))
            end = int(ends[stop - 1])
            tokens = Tokens.flat(torch.from_numpy(self.ids[start:end]), torch.from_numpy(self.lengths[first:stop]))
            if self.spelt is not None:
                tokens = tokens.spelt(list(map(np.concatenate, self.spelt[first:stop])))
            yield tokens
            first, start = stop, end


class Embedder:
    """Turns texts into vectors; `longest` is how many tokens of one are read, its marks among them."""

    def __init__(
        self,
        task: Task,
        head: Head,
        choice: Choice,
        longest: int | None = None,
        truncate: bool = False,
        lowercase: bool = False,
    ) -> None:
        check_encodes(head)
        self.task, self.head, self.choice = task, head.eval(), choice
        self.layers = chosen_layers(choice.layers, head.body.mixable_layers)
        self.before, self.after = task.special_token_affixes
        self.longest, self.truncate, self.lowercase = longest, truncate, lowercase
        self.cut = 0  # texts that were too long
        weight = next(head.parameters())
        self._device, self._half = weight.device, weight.dtype is not torch.float32
        self._budget = BUDGET if self._device.type == "cpu" else BUDGET_ON_GPU

    def stream(self, texts: Iterable[str]) -> Iterator[Any]:
        """Yield the vectors (B, D) of some thousands of texts at a time; with pool tokens, a list of (T, D)."""
        signs = SIGNS_OF_TOKENS if self.choice.pool == "tokens" else SIGNS
        waiting: deque[Future[_Read]] = deque()
        # The tokenizer needs no Python while it works: it is one chunk ahead.
        with frozen_weights(), ThreadPoolExecutor(1) as pool:
            for first, chunk in _chunks(texts, signs):
                waiting.append(pool.submit(self._read, chunk, first))
                if len(waiting) > 1:
                    yield self._vectors(waiting.popleft().result())
            while waiting:
                yield self._vectors(waiting.popleft().result())

    def all(self, texts: Iterable[str]) -> Any:
        """Return the vectors of all texts: (B, D), or a list of (T, D)."""
        found = list(self.stream(texts))
        if self.choice.pool == "tokens":
            return list(chain.from_iterable(found))
        return np.concatenate(found) if found else np.zeros((0, self.width), np.float32)

    @property
    def width(self) -> int:
        """How many numbers a vector has."""
        return self._encode(_one_token(self.task)).shape[1]

    def tokens(self, text: str) -> list[str]:
        """Name the tokens that are read of a text, those that `pool="tokens"` gives vectors of."""
        return [self.task.tokenizer.token(id) for id in self._read([text], 1).ids.tolist()]

    def _read(self, texts: list[str], first: int) -> _Read:
        """Cut each distinct text into tokens and put marks around them: the longest first, then by the alphabet.

        So a batch does not depend on the order in which texts were given, and neither does a vector, to the last bit.
        """
        texts = [text.lower() for text in texts] if self.lowercase else texts
        numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
        distinct, given = list(numbers), np.fromiter(map(numbers.__getitem__, texts), np.int64, len(texts))
        cut, marks = self.task.cut(distinct), len(self.before) + len(self.after)
        spelt = self.task.spelt(distinct) if self.task.uses_chars else None
        lengths = np.fromiter(map(len, cut), np.int64, len(cut))
        room = None if self.longest is None else max(0, self.longest - marks)
        if room is not None and lengths.max(initial=0) > room:
            self._refuse(lengths[given], room, first, marks)
            cut, lengths = [ids[:room] for ids in cut], lengths.clip(max=room)
            spelt = spelt and [_shortened(own, room, len(self.before), len(self.after)) for own in spelt]
        order = np.array(sorted(range(len(cut)), key=lambda row: (-lengths[row], distinct[row])), np.int64)
        words = chain.from_iterable(map(cut.__getitem__, order.tolist()))
        inside = np.fromiter(words, np.int64, int(lengths.sum()))
        spelt = spelt and [spelt[row] for row in order.tolist()]
        return _Read(self._marked(inside, lengths[order]), lengths[order] + marks, np.argsort(order)[given], spelt)

    def _refuse(self, lengths: np.ndarray, room: int, first: int, marks: int) -> None:
        """Count texts that are too long, or where nobody asked to cut them name the first."""
        long = np.flatnonzero(lengths > room)
        if not self.truncate:
            place, size = first + int(long[0]), int(lengths[long[0]]) + marks
            raise DataError(
                f"text {place}: has {size:,} tokens, its marks among them, and {self.longest:,} are read; shorten it, "
                "or have it cut with truncate=True (command line: --truncate)"
            )
        self.cut += len(long)

    def _marked(self, inside: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Put the marks around each text."""
        whole = lengths + len(self.before) + len(self.after)
        ends = whole.cumsum()
        ids, words = np.empty(int(whole.sum()), np.int64), np.ones(int(whole.sum()), bool)
        places = [(ends - whole + at, id) for at, id in enumerate(self.before)]
        places += [(ends - len(self.after) + at, id) for at, id in enumerate(self.after)]
        for at, id in places:
            ids[at], words[at] = id, False
        ids[words] = inside
        return ids

    def _vectors(self, read: _Read) -> Any:
        """Encode what was read, and give it back in the order of the caller."""
        if len(read.ids) > BUDGET_ON_GPU and self._device.type == "cuda" and self._half:
            try_reading(self._device)
        batches = list(read.batches(self._budget))
        found = list(side_by_side(self._encode, batches) if self._device.type == "cpu" else map(self._encode, batches))
        flat = torch.cat(found).cpu().numpy() if found else np.zeros((0, self.width), np.float32)
        if self.choice.pool == "tokens":
            parts = np.split(flat, read.lengths.cumsum()[:-1]) if len(read.lengths) else []
            return [parts[row] for row in read.rows.tolist()]
        empty = np.zeros((len(read.lengths) - len(flat), flat.shape[1]), np.float32)  # texts without a token
        return np.concatenate([flat, empty])[read.rows]

    def _encode(self, tokens: Tokens) -> Tensor:
        with torch.inference_mode():
            return self._pooled(tokens.to(self._device))

    def _pooled(self, tokens: Tokens) -> Tensor:
        """Return float32 vectors, (B, D) or of tokens (N, D)."""
        pool, body = self.choice.pool, self.head.body
        if pool == "summary":
            vectors: Tensor = body.summary(tokens).float()
        else:
            vectors = pooled(body.encode(tokens, self.layers), tokens, pool, self.choice.combine)
        return F.normalize(vectors, dim=-1) if self.choice.normalize else vectors


def pooled(states: Tensor, tokens: Tokens, pool: Pool, combine: Combine) -> Tensor:
    """Combine layers (L, N, D) and pool the tokens of each sequence, none of them empty: float32 (B, L·D or D)."""
    if pool in ("cls", "last"):
        states = states[:, tokens.starts[:-1].long() if pool == "cls" else tokens.starts[1:].long() - 1]
    vectors = combined(states, combine)
    if pool not in ("mean", "max"):
        return vectors
    lengths = tokens.lengths.to(vectors.device, non_blocking=True)
    return torch.segment_reduce(vectors, pool, lengths=lengths, axis=0, unsafe=True)


def combined(states: Tensor, combine: Combine) -> Tensor:
    """Make one of several layers, (L, N, D) to float32 (N, D), or side by side (N, L·D)."""
    if len(states) == 1:
        return states[0].float()
    if combine == "concat":
        return states.transpose(0, 1).flatten(1).float()
    total = states.sum(0, dtype=torch.float32)
    return total / len(states) if combine == "mean" else total


def chosen_layers(layers: Layers, levels: Sequence[int]) -> tuple[int, ...]:
    """Read which layers are meant: -1, [1, 3], "1,3", or of `levels`, all there are, a slice such as "-4:"."""
    wanted = layers.split(",") if isinstance(layers, str) and ":" not in layers else layers
    try:
        if isinstance(wanted, str):
            start, stop = (int(part) if part.strip() else None for part in wanted.split(":"))
            found = tuple(levels[slice(start, stop)])
        else:
            found = tuple(_layer(part) for part in (wanted if isinstance(wanted, Iterable) else [wanted]))
    except (TypeError, ValueError):
        found = ()
    if not found:
        raise ConfigError(
            f"layers: must be a layer such as -1, a list such as 1,3 or a slice such as -4: of the {len(levels)} there "
            f"are, but is {layers!r} instead"
        )
    return found


def _layer(given: Any) -> int:
    """Read a layer's number; True and 1.5 are none."""
    if isinstance(given, bool):
        raise TypeError
    return int(given) if isinstance(given, str) else index(given)


def check_encodes(head: Head) -> None:
    """Refuse a model that makes no vectors."""
    if Role.ENCODER not in type(head.body).roles(head.body.config):
        raise RoleError(
            f"model: {head.body.config.name!r}, as configured, gives texts no vectors: it does not encode; take one "
            "that does, such as a bert, gpt, elmo or rnn"
        )


def _chunks(texts: Iterable[str], most: int) -> Iterator[tuple[int, list[str]]]:
    """Gather texts until there are many, or many characters; with each chunk comes the number of its first."""
    chunk: list[str] = []
    signs = first = 0
    for text in texts:
        if not isinstance(text, str):
            raise DataError(f"text {first + len(chunk) + 1}: must be a text, but is {repr(text)[:60]} instead")
        chunk.append(text)
        signs += len(text)
        if len(chunk) == AT_ONCE or signs >= most:
            yield first + 1, chunk
            first, chunk, signs = first + len(chunk), [], 0
    if chunk:
        yield first + 1, chunk


def _shortened(spelt: list[np.ndarray], room: int, before: int, after: int) -> list[np.ndarray]:
    """Leave out the spelling of what is beyond `room` tokens, and keep that of the marks."""
    last = len(spelt) - after
    return [*spelt[: min(before + room, last)], *spelt[last:]]


def _one_token(task: Task) -> Tokens:
    tokens = Tokens.pack([[task.tokenizer.specials.eos]])
    return tokens.spelt([task.spelt([""])[0][-1]]) if task.uses_chars else tokens
