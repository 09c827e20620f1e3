"""word2vec: skip-gram and CBOW word vectors, trained with negative sampling.

Mikolov, Chen, Corrado and Dean 2013, "Efficient estimation of word representations in vector space" (skip-gram and
CBOW), and Mikolov, Sutskever, Chen, Corrado and Dean 2013, "Distributed representations of words and phrases and their
compositionality" (negative sampling, eq. 4, and sub-sampling, eq. 5). With u_w the output vector of w, q the noise
distribution:

    s(w, c) = u_w · c      loss = -log σ(s(w, c)) - Σ_{j=1..k} log σ(-s(w_j, c)),   w_j ~ q(w) ∝ count(w)^exponent

`skipgram`: c is the vector of one context word, and each of them predicts w (as in word2vec's own code; in the paper w
predicts them). `cbow`: c is the mean of the context vectors. The window size is drawn for each position, from 1 to
`window`; `context: left` takes only the words before w.

Departures, all for speed: the context words of one position share their negatives (Ji et al. 2016), and σ is not
clipped at ±6. In `cbow` each word gets the whole gradient of the mean, as in word2vec's own code; the gradient of the
loss would be that divided by the number of words.

It has a fit of its own: by lock-free threads on the CPU (`weft.models.word2vec.numba`), by a Triton kernel on CUDA
(`weft.models.word2vec.triton`). As the body of `classify` or `tag` its vectors are trained by back-propagation, like
any other's.

CBOW as a language model. If negatives were never the target, negative sampling would have s(w, c) = log p(w | c) - log
k q(w) at its optimum (Gutmann and Hyvärinen 2012; Levy and Goldberg 2014). Here, as in word2vec's own code, a negative
that equals the target is skipped, and the model learns the odds: s(w, c) = log p / (1 - p) - log k q(w). So

    p(w | c) ∝ σ(s(w, c) + log k q(w)) / the probability that sub-sampling keeps w

is what `logits` returns the logarithm of, with the mean of the last `window` words for c. It is a probability,
comparable with other models'. It is not what word2vec is made for: c ignores word order, the sum over the vocabulary
was never part of the training, and unless it was trained with `context: left` c had words from both sides.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from weft.config.schema import Named, Size
from weft.data.batching.packed_items import PackedItems
from weft.errors import ConfigError, RoleError
from weft.models.base import FitBudget, FitProgress, LMDirection, Model, Role
from weft.models.word2vec.fit import Word2VecCorpus, fit_on_cpu, negative_sampling_loss
from weft.nn.kernels import dispatch
from weft.tokens import Tokens


class Word2VecConfig(Named):
    """`window` is the maximum number of context words on a side; `subsample` is t of eq. 5, and 0 keeps all words."""

    width: Size = 100  # of the vectors
    method: Literal["skipgram", "cbow"] = "skipgram"  # predict the context from the word, or the word from its context
    window: int = Field(5, ge=1, le=1000)  # the maximum number of context words on a side
    context: Literal["both", "left"] = "both"  # left: the words before alone
    negatives: int = Field(5, ge=1, le=1000)  # noise words drawn for each context word
    subsample: float = Field(1e-3, ge=0)  # t of eq. 5; 0 keeps all frequent words
    exponent: float = Field(0.75, ge=0, le=1)  # of the counts in the noise distribution
    vectors: str | None = None  # a file of word vectors to initialise from


@dataclass(frozen=True)
class Word2VecState:
    """The decoding state: the last words of each hypothesis, the newest last, and its length."""

    ids: Tensor  # (B, window)
    lengths: Tensor  # (B,)

    def select(self, rows: Tensor) -> "Word2VecState":
        """Return the state whose hypothesis b continues the old hypothesis rows[b]."""
        return Word2VecState(self.ids[rows], self.lengths[rows])

    def join(self, other: "Word2VecState") -> "Word2VecState":
        """Return the state of these hypotheses and, after them, the other's."""
        return Word2VecState(torch.cat([self.ids, other.ids]), torch.cat([self.lengths, other.lengths]))


class Word2Vec(Model):
    """Input vectors, `embed`, and output vectors, `output`."""

    Config: ClassVar[type[Named]] = Word2VecConfig
    config: Word2VecConfig
    output: nn.Linear | None
    noise_log_probs: Tensor | None  # (V,) log q(w)
    keep_log_probs: Tensor | None  # (V,) log of the probability that sub-sampling keeps a word

    def __init__(self, config: Word2VecConfig, vocab: int, target_vocab: int | None = None) -> None:
        super().__init__(config, vocab, target_vocab)
        self.width = config.width
        self.embed = nn.Embedding(vocab, config.width)
        self.output = nn.Linear(config.width, vocab, bias=False)
        nn.init.uniform_(self.embed.weight, -1 / config.width, 1 / config.width)
        nn.init.zeros_(self.output.weight)
        self.register_buffer("noise_log_probs", torch.zeros(vocab))
        self.register_buffer("keep_log_probs", torch.zeros(vocab))

    @classmethod
    def roles(cls, config: Named) -> frozenset[Role]:
        """Return its roles: CBOW, whose context is several words, is also a language model; skip-gram is not."""
        assert isinstance(config, Word2VecConfig)
        more = {Role.LANGUAGE_MODEL, Role.GENERATOR} if config.method == "cbow" else set()
        return frozenset({Role.ENCODER, Role.SELF_FITTED, *more})

    def prune_unused(self, needs: Collection[Role]) -> None:
        """Drop the output vectors unless a role needs predictions."""
        if not {Role.LANGUAGE_MODEL, Role.GENERATOR, Role.SELF_FITTED} & set(needs):
            self.output = self.noise_log_probs = self.keep_log_probs = None

    def fit(self, data: PackedItems, budget: FitBudget) -> Iterator[FitProgress]:
        """Train on the sequences of the data; yield reports. With `budget.eos` their first id is bos, no target."""
        config, corpus = self.config, Word2VecCorpus.of(data, self.vocab, budget.eos)
        keep, noise = corpus.keep_probabilities(config.subsample), corpus.noise_distribution(config.exponent)
        output, *buffers = self._trained
        # Words with count 0 are never drawn; as a language model they need some probability, as if they occurred once.
        smoothed = corpus.noise_distribution(config.exponent, least=1.0)
        for buffer, probabilities in zip(buffers, (smoothed, keep), strict=True):
            buffer.copy_(torch.from_numpy(probabilities).log())
        weights = self.embed.weight.detach(), output.detach()
        settings = self._hyperparameters
        if dispatch.word2vec_on_triton(self.embed.weight):
            from weft.models.word2vec.triton import fit_on_gpu, tile_sizes

            if tile_sizes(settings, self.width):
                return fit_on_gpu(weights, corpus, settings, noise, keep, budget)
        return fit_on_cpu(weights, corpus, settings, noise, keep, budget)

    def loss(self, data: PackedItems, seed: int = 0) -> float:
        """Return the mean loss of the predictions in these documents, without training."""
        output, *buffers = self._trained
        weights = self.embed.weight.detach(), output.detach()
        noise, keep = (buffer.double().exp().cpu().numpy() for buffer in buffers)
        return negative_sampling_loss(weights, data, self._hyperparameters, noise / noise.sum(), keep, seed)

    @property
    def _trained(self) -> tuple[Tensor, Tensor, Tensor]:
        assert self.output is not None
        assert self.noise_log_probs is not None
        assert self.keep_log_probs is not None
        return self.output.weight, self.noise_log_probs, self.keep_log_probs

    @property
    def _hyperparameters(self) -> tuple[bool, int, int, int]:
        config = self.config
        return config.method == "cbow", config.window, 2 if config.context == "both" else 1, config.negatives

    def encode(self, tokens: Tokens, layers: Sequence[int] = (-1,)) -> Tensor:
        """Return the token embeddings, (L, N, D), its only layer."""
        if not set(layers) <= {0, -1}:
            raise ConfigError(f"layers: word2vec has one, 0 or -1, but {list(layers)} is asked for")
        embedded: Tensor = self.embed(tokens.ids)
        return embedded.expand(len(layers), *embedded.shape)

    def pooled_output(self, tokens: Tokens) -> Tensor:
        """Return the mean embedding of each sequence, (B, D); zero for an empty one."""
        return F.embedding_bag(tokens.ids, self.embed.weight, tokens.starts[:-1].to(tokens.ids.dtype), mode="mean")

    def logits(self, tokens: Tokens, at: Tensor | None = None, direction: LMDirection = "forward") -> Tensor:
        """Return the logits of the next tokens, given the mean of the last `window`: (N, V), or (len(at), V)."""
        if direction != "forward":
            raise RoleError(f"direction: word2vec guesses a word from those before it, but is asked for {direction}")
        vectors, count = self.embed(tokens.ids), len(tokens.ids)
        starts = torch.repeat_interleave(tokens.starts[:-1].long(), tokens.lengths.to(tokens.device), output_size=count)
        position = torch.arange(count, device=tokens.device) - starts  # within its sequence
        total = vectors
        for back in range(1, min(self.config.window, tokens.longest)):
            total = total + F.pad(vectors[:-back], (0, 0, back, 0)) * (position >= back)[:, None]
        means = total / (position + 1).clamp(max=self.config.window)[:, None]
        return self._project(means if at is None else means[at])

    def start(self, prompt: Tokens, source: Tokens | None = None) -> tuple[Tensor, Word2VecState]:
        """Return the logits (B, V) of the token after each prompt, and the state."""
        ids = torch.zeros(len(prompt), self.config.window, dtype=torch.int64, device=prompt.device)
        for row, sequence in zip(ids, prompt.split(), strict=True):
            last = sequence[-self.config.window :]
            row[self.config.window - len(last) :] = last
        state = Word2VecState(ids, prompt.lengths.to(prompt.device))
        return self._next_logits(state), state

    def step(self, ids: Tensor, state: Word2VecState) -> tuple[Tensor, Word2VecState]:
        """Append one token to each hypothesis, ids (B,); return the logits (B, V) of the next one, and the state."""
        state = Word2VecState(torch.cat([state.ids[:, 1:], ids[:, None]], 1), state.lengths + 1)
        return self._next_logits(state), state

    def _next_logits(self, state: Word2VecState) -> Tensor:
        window = state.ids.shape[1]
        real = torch.arange(window, device=state.ids.device) >= window - state.lengths[:, None]  # (B, window)
        total = (self.embed(state.ids) * real[..., None]).sum(1)
        return self._project(total / state.lengths.clamp(1, window)[:, None])

    def _project(self, means: Tensor) -> Tensor:
        output, noise_log_probs, keep_log_probs = self._trained
        odds = F.linear(means, output) + noise_log_probs + math.log(self.config.negatives)
        return F.logsigmoid(odds) - keep_log_probs
