"""word2vec: a vector for each word, learnt by telling the words that stand near it from words drawn at random.

Mikolov, Chen, Corrado and Dean 2013, "Efficient estimation of word representations in vector space" (skip-gram and
CBOW), and Mikolov, Sutskever, Chen, Corrado and Dean 2013, "Distributed representations of words and phrases and their
compositionality" (negative sampling, eq. 4, and sub-sampling, eq. 5). With u_w the output vector of w, q the noise:

    s(w, c) = u_w · c      loss = -log σ(s(w, c)) - Σ_{j=1..k} log σ(-s(w_j, c)),   w_j ~ q(w) ∝ count(w)^exponent

`skipgram`: c is the vector of one word near w, and each of them guesses w (as in word2vec's own code; in the paper w
guesses them). `cbow`: c is the mean of the vectors of the words near w. How near is drawn for each place, from 1 to
`window`; `context: left` takes the words before w alone.

Departures, all of speed: the words around one place share their drawn words (Ji et al. 2016), and σ is not cut off at
±6. In `cbow` each word gets the whole of the gradient of the mean, as in word2vec's own code; the gradient of the loss
would be a share of it.

It is fitted, with updates of its own: by threads without locks on the CPU (`word2vec_kernels`), by a Triton kernel on
CUDA (`word2vec_cuda`). As a body of `classify` or `tag` its vectors are trained on by gradient, like any other's.

CBOW as a language model. Were all drawn words wrong ones, negative sampling would have s(w, c) = log p(w | c) - log k
q(w) at its optimum (Gutmann and Hyvärinen 2012; Levy and Goldberg 2014). Here, as in word2vec's own code, a drawn word
that is the right one is left out, and it is the odds that are learnt: s(w, c) = log p / (1 - p) - log k q(w). So

    p(w | c) ∝ σ(s(w, c) + log k q(w)) / the share of w that sub-sampling keeps

is what `logits` gives the logarithm of, with the mean of the last `window` words for c. It is a probability, and can be
judged beside others. It is not what word2vec is made for: c knows no order of words, the sum over the vocabulary was
never part of the training, and unless it was trained with `context: left` c had words from both sides.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from weft.config.schema import Named
from weft.data.batching.packed import PackedItems
from weft.errors import ConfigError, RoleError
from weft.models.base import Budget, Direction, Model, Pass, Role
from weft.models.word2vec.fit import Corpus, fit_on_cpu, measure
from weft.nn.rnn.fused.codegen_triton import available
from weft.tokens import Tokens


class Word2VecConfig(Named):
    """`window` words on a side at most are near; `subsample` is t of eq. 5, and 0 keeps all words."""

    width: int = Field(100, ge=1)
    method: Literal["skipgram", "cbow"] = "skipgram"
    window: int = Field(5, ge=1, le=1000)
    context: Literal["both", "left"] = "both"
    negatives: int = Field(5, ge=1, le=1000)
    subsample: float = Field(1e-3, ge=0)
    exponent: float = Field(0.75, ge=0, le=1)
    vectors: str | None = None  # a file of word vectors to start from


@dataclass(frozen=True)
class Last:
    """The last words of each hypothesis, the newest last, and how many of them there are."""

    ids: Tensor  # (B, window)
    known: Tensor  # (B,)

    def select(self, rows: Tensor) -> "Last":
        """Return the state whose hypothesis b continues the old hypothesis rows[b]."""
        return Last(self.ids[rows], self.known[rows])


class Word2Vec(Model):
    """Vectors of the words that are read, `embed`, and of those that are guessed, `output`."""

    Config: ClassVar[type[Named]] = Word2VecConfig
    config: Word2VecConfig
    output: nn.Linear | None
    noise: Tensor | None  # (V,) log q(w)
    kept: Tensor | None  # (V,) log of the share of a word that sub-sampling keeps

    def __init__(self, config: Word2VecConfig, vocab: int, target_vocab: int | None = None) -> None:
        super().__init__(config, vocab, target_vocab)
        self.width = config.width
        self.embed = nn.Embedding(vocab, config.width)
        self.output = nn.Linear(config.width, vocab, bias=False)
        nn.init.uniform_(self.embed.weight, -1 / config.width, 1 / config.width)
        nn.init.zeros_(self.output.weight)
        self.register_buffer("noise", torch.zeros(vocab))
        self.register_buffer("kept", torch.zeros(vocab))

    @classmethod
    def roles(cls, config: Named) -> frozenset[Role]:
        """Say what it can do: the mean of words can be taken for what was said before, one word cannot."""
        assert isinstance(config, Word2VecConfig)
        says = {Role.LANGUAGE_MODEL, Role.GENERATOR} if config.method == "cbow" else set()
        return frozenset({Role.ENCODER, Role.SELF_FITTED, *says})

    def keep(self, needs: Collection[Role]) -> None:
        """Drop the output where nothing is guessed."""
        if not {Role.LANGUAGE_MODEL, Role.GENERATOR, Role.SELF_FITTED} & set(needs):
            self.output = self.noise = self.kept = None

    def fit(self, data: PackedItems, budget: Budget) -> Iterator[Pass]:
        """Learn from documents, the sequences of the data; with `budget.eos` to end them, their first id is a mark."""
        config, corpus = self.config, Corpus.of(data, self.vocab, budget.eos)
        kept, noise = corpus.kept(config.subsample), corpus.noise(config.exponent)
        output, *buffers = self._fitted
        # What never occurs is never drawn; as a language model it must have some probability, as if it occurred once.
        for buffer, known in zip(buffers, (corpus.noise(config.exponent, least=1.0), kept), strict=True):
            buffer.copy_(torch.from_numpy(known).log())
        weights = self.embed.weight.detach(), output.detach()
        shape = self._shape
        if self.embed.weight.is_cuda and available():
            from weft.models.word2vec.triton import fit_on_gpu, tiles

            if tiles(shape, self.width):
                return fit_on_gpu(weights, corpus, shape, noise, kept, budget)
        return fit_on_cpu(weights, corpus, shape, noise, kept, budget)

    def loss(self, data: PackedItems, seed: int = 0) -> float:
        """Return the mean loss of the guesses in these documents; nothing is learnt."""
        output, *buffers = self._fitted
        weights = self.embed.weight.detach(), output.detach()
        noise, kept = (buffer.double().exp().cpu().numpy() for buffer in buffers)
        return measure(weights, data, self._shape, noise / noise.sum(), kept, seed)

    @property
    def _fitted(self) -> tuple[Tensor, Tensor, Tensor]:
        assert self.output is not None
        assert self.noise is not None
        assert self.kept is not None
        return self.output.weight, self.noise, self.kept

    @property
    def _shape(self) -> tuple[bool, int, int, int]:
        config = self.config
        return config.method == "cbow", config.window, 2 if config.context == "both" else 1, config.negatives

    def encode(self, tokens: Tokens, layers: Sequence[int] = (-1,)) -> Tensor:
        """Return the tokens' vectors, (L, N, D), which are its only layer."""
        if not set(layers) <= {0, -1}:
            raise ConfigError(f"layers: word2vec has one, 0 or -1, but {list(layers)} is asked for")
        found: Tensor = self.embed(tokens.ids)
        return found.expand(len(layers), *found.shape)

    def summary(self, tokens: Tokens) -> Tensor:
        """Return the mean of each sequence's vectors, (B, D); zero for an empty one."""
        return F.embedding_bag(tokens.ids, self.embed.weight, tokens.starts[:-1].to(tokens.ids.dtype), mode="mean")

    def logits(self, tokens: Tokens, at: Tensor | None = None, direction: Direction = "forward") -> Tensor:
        """Score what follows each token by the mean of the last `window`: (N, V), or (len(at), V)."""
        if direction != "forward":
            raise RoleError(f"direction: word2vec guesses a word from those before it, but is asked for {direction}")
        vectors, count = self.embed(tokens.ids), len(tokens.ids)
        owner = torch.repeat_interleave(tokens.starts[:-1].long(), tokens.lengths.to(tokens.device), output_size=count)
        place = torch.arange(count, device=tokens.device) - owner  # within its sequence
        total = vectors
        for back in range(1, min(self.config.window, tokens.longest)):
            total = total + F.pad(vectors[:-back], (0, 0, back, 0)) * (place >= back)[:, None]
        means = total / (place + 1).clamp(max=self.config.window)[:, None]
        return self._score(means if at is None else means[at])

    def start(self, prompt: Tokens, source: Tokens | None = None) -> tuple[Tensor, Last]:
        """Read the prompts; return the logits (B, V) of what follows, and the state."""
        ids = torch.zeros(len(prompt), self.config.window, dtype=torch.int64, device=prompt.device)
        for row, own in zip(ids, prompt.split(), strict=True):
            last = own[-self.config.window :]
            row[self.config.window - len(last) :] = last
        state = Last(ids, prompt.lengths.to(prompt.device))
        return self._following(state), state

    def step(self, ids: Tensor, state: Last) -> tuple[Tensor, Last]:
        """Read one more token a hypothesis."""
        after = Last(torch.cat([state.ids[:, 1:], ids[:, None]], 1), state.known + 1)
        return self._following(after), after

    def _following(self, state: Last) -> Tensor:
        window = state.ids.shape[1]
        real = torch.arange(window, device=state.ids.device) >= window - state.known[:, None]  # (B, window)
        total = (self.embed(state.ids) * real[..., None]).sum(1)
        return self._score(total / state.known.clamp(1, window)[:, None])

    def _score(self, means: Tensor) -> Tensor:
        output, noise, kept = self._fitted
        odds = F.linear(means, output) + noise + math.log(self.config.negatives)
        return F.logsigmoid(odds) - kept
