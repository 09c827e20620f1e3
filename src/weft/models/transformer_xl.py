"""Transformer-XL: a language model that reads on, by attention to its own states of earlier segments.

Dai et al. 2019, "Transformer-XL: attentive language models beyond a fixed-length context" (arXiv:1901.02860).
Segment recurrence (section 3.2): layer n attends to this segment and to the last M states h~ of the ones before, which
get no gradient,

    h~^{n-1} = [SG(memory^{n-1}) ; h^{n-1}]        q, k, v = h^{n-1} W_q, h~^{n-1} W_kE, h~^{n-1} W_v

and relative positions (section 3.3): the score of the query at i and the key at j hangs on their distance alone,

    A_ij = q_i·k_j + q_i·(W_kR R_{i-j}) + u·k_j + v·(W_kR R_{i-j})                            terms (a), (b), (c), (d)

with R sinusoidal. (b) and (d) are computed for all distances at once, then shifted (appendix B). Scores are divided by
√d and softmax follows; post-norm, FFN with ReLU, as in the paper.

A position attends to itself and to the M = `mem_len` positions before it, in its segment or in the memory (the authors'
option `same_length`). So logits do not depend on where a text is cut into segments, and layer n sees n M tokens back.
`mem_len` may be another one at evaluation than in training: no parameter depends on it.

Departures: one softmax over the vocabulary, where the authors' is adaptive; no dropout inside the FFN and on attention
weights; matrices of projections have no biases, u and v belong to a layer, as in the authors' code.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from weft.config.schema import MAX_POSITIONS, Layers, Named, Pretrained, Size
from weft.errors import ConfigError, RoleError
from weft.models.base import LMDirection, Model, Role, num_matrix_parameters
from weft.models.transformer_config import check_heads
from weft.nn.attention.capture import capturing, record
from weft.nn.attention.positions import Sinusoidal
from weft.nn.layers.packed_linear import Linear
from weft.nn.rnn.cells import join_layers
from weft.nn.rnn.time_major import TimeMajor
from weft.nn.transformer.blocks import INIT_STD, BlockConfig, FeedForward, Residual, init_normal_
from weft.nn.transformer.output_projection import OutputProjection
from weft.tokens import Tokens


class TransformerXLConfig(Pretrained):
    """The sizes of the paper's standard model of WikiText-103 by default (table 1)."""

    width: Size = 410  # of the hidden states
    heads: Size = 10  # attention heads a layer; they divide `width`
    layers: Layers = 16  # number of blocks
    ffn_width: Size = 2100  # inside the feed-forward layers
    mem_len: int = Field(150, ge=0, le=MAX_POSITIONS)  # how many positions back each layer attends to
    dropout: float = Field(0.1, ge=0, lt=1)  # on embeddings, positions, sub-layers and the output
    tie: bool = True  # one matrix for the embeddings and the output (Press & Wolf 2017)

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        check_heads(self.width, self.heads)
        return self


@dataclass(frozen=True)
class XLMemory:
    """The last inputs of each layer, right-aligned: those of a short text are padded before."""

    layers: tuple[Tensor, ...]  # (B, M, D) of each layer
    padding: Tensor  # (B, M) True where there is no token

    @property
    def parts(self) -> list[Tensor]:
        """All its tensors."""
        return [*self.layers, self.padding]

    def select(self, rows: Tensor) -> "XLMemory":
        """Return the memory whose hypothesis b continues the old hypothesis rows[b]."""
        return XLMemory(tuple(layer[rows] for layer in self.layers), self.padding[rows])

    def join(self, other: "XLMemory") -> "XLMemory":
        """Return the memory of these hypotheses and, after them, the other's."""
        ((*layers, padding),) = join_layers([tuple(self.parts)], [tuple(other.parts)])
        return XLMemory(tuple(layers), padding)

    def extended(self, grid: TimeMajor, inputs: Sequence[Tensor], mem_len: int) -> "XLMemory":
        """Return the memory after a segment, whose layers had `inputs` (N, D) each: its last `mem_len` positions."""
        past = self.padding.shape[1]
        size = min(mem_len, past + grid.steps)
        ends = grid.lengths.to(grid.device) + past  # (B,)
        kept = ends[:, None] - size + torch.arange(size, device=grid.device)  # (B, size) before 0: padding
        padding = (kept < 0) | F.pad(self.padding, (0, grid.steps)).gather(1, kept.clamp(min=0))
        row = torch.arange(grid.rows, device=grid.device)[:, None]
        layers = (
            torch.cat([memory, grid.pad(flat).transpose(0, 1)], 1)[row, kept.clamp(min=0)]
            for memory, flat in zip(self.layers, inputs, strict=True)
        )
        return XLMemory(tuple(layers), padding)


@dataclass(frozen=True)
class SegmentLayout:
    """What the layers of a pass have in common: S keys, the memory's before the segment's, and R distances to them."""

    grid: TimeMajor
    mask: Tensor  # (B, 1, T, S) True where the query does not attend to the key
    encodings: Tensor  # (R, D) of the distances R-1 … 0: the others are masked


def relative_shift(scores: Tensor) -> Tensor:
    """Return scores (…, T, S) by key, from scores by distance, the farthest, S - 1, first (appendix B).

    Entry (i, j) is that of the distance S - T + i - j; entries of keys after the query have no meaning.
    """
    steps, keys = scores.shape[-2:]
    padded = F.pad(scores, (1, 0)).reshape(*scores.shape[:-2], keys + 1, steps)
    return padded[..., 1:, :].reshape(scores.shape)


class RelativeAttention(nn.Module):
    """Multi-head attention with relative positions, to the memory and to the segment itself."""

    def __init__(self, width: int, heads: int, layer: int) -> None:
        super().__init__()
        self.heads, self.size, self.layer = heads, width // heads, layer
        self.q_proj, self.kv_proj = Linear(width, width, bias=False), Linear(width, 2 * width, bias=False)
        self.r_proj, self.out_proj = Linear(width, width, bias=False), Linear(width, width, bias=False)
        self.content_bias, self.position_bias = (nn.Parameter(torch.empty(heads, self.size)) for _ in range(2))  # u, v
        for bias in (self.content_bias, self.position_bias):
            nn.init.normal_(bias, std=INIT_STD)

    def forward(self, x: Tensor, memory: Tensor, layout: SegmentLayout) -> Tensor:
        """Attend with x (N, D) to the memory (B, M, D) and to x: the concatenated heads (N, D)."""
        grid, heads = layout.grid, (self.heads, self.size)
        q = grid.pad(self.q_proj(x).unflatten(-1, heads))  # (T, B, H, d)
        own = grid.pad(self.kv_proj(x).unflatten(-1, (2, *heads))).transpose(0, 1)
        past = self.kv_proj(memory.flatten(0, 1)).view(len(memory), -1, 2, *heads)
        k, v = torch.cat([past, own], 1).unbind(2)  # (B, S, H, d)
        r = self.r_proj(layout.encodings).unflatten(-1, heads)  # (R, H, d)
        content = torch.einsum("tbhd,bshd->bhts", q + self.content_bias, k)  # terms (a) and (c)
        position = torch.einsum("tbhd,rhd->bhtr", q + self.position_bias, r)  # terms (b) and (d), by distance
        position = relative_shift(F.pad(position, (k.shape[1] - len(r), 0)))
        scores = (content + position) / self.size**0.5
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        weights = torch.softmax(scores.masked_fill(layout.mask, float("-inf")), -1)
        if capturing(self.layer):
            record("decoder", weights, self.layer)
        return grid.unpad(torch.einsum("bhts,bshd->tbhd", weights.to(v.dtype), v)).flatten(1)


class XLBlock(nn.Module):
    """Relative attention and the feed-forward layer."""

    def __init__(self, config: TransformerXLConfig, layer: int) -> None:
        super().__init__()
        block = BlockConfig(config.width, config.heads, config.ffn_width, dropout=config.dropout)
        self.attention, self.attention_residual = RelativeAttention(config.width, config.heads, layer), Residual(block)
        self.feed_forward, self.feed_forward_residual = FeedForward(block), Residual(block)

    def forward(self, x: Tensor, memory: Tensor, layout: SegmentLayout) -> Tensor:
        """Map (N, D) to (N, D)."""
        attention = self.attention
        x = self.attention_residual(x, lambda y: attention.out_proj(attention(y, memory, layout)))
        output: Tensor = self.feed_forward_residual(x, self.feed_forward)
        return output


class TransformerXL(Model):
    """Embeddings, blocks and, as a language model, the output. Its state is the memory of each layer."""

    Config: ClassVar[type[Named]] = TransformerXLConfig
    config: TransformerXLConfig
    output: OutputProjection | None

    def __init__(self, config: TransformerXLConfig, vocab: int, target_vocab: int | None = None) -> None:
        super().__init__(config, vocab, target_vocab)
        self.width = config.width
        self.embed = nn.Embedding(vocab, config.width)
        self.positions = Sinusoidal(config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(XLBlock(config, layer) for layer in range(config.layers))
        self.output = OutputProjection(config.width, vocab)
        init_normal_(self)
        if config.tie:
            self.output.weight = self.embed.weight

    @classmethod
    def roles(cls, config: Named) -> frozenset[Role]:
        """Return its roles: encoder, language model, generator."""
        return frozenset({Role.ENCODER, Role.LANGUAGE_MODEL, Role.GENERATOR})

    @property
    def mixable_layers(self) -> tuple[int, ...]:
        """All layers, with the embeddings."""
        return tuple(range(self.config.layers + 1))

    def layer_groups(self) -> list[list[nn.Module]]:
        """Return the embeddings, then each layer."""
        return [[self.embed, self.dropout], *([block] for block in self.blocks)]

    def prune_unused(self, needs: Collection[Role]) -> None:
        """Drop the output projection unless a role needs logits."""
        if not {Role.LANGUAGE_MODEL, Role.GENERATOR} & set(needs):
            self.output = None

    def encode(self, tokens: Tokens, layers: Sequence[int] = (-1,)) -> Tensor:
        """Return the outputs of the chosen layers, (L, N, D); 0 is the embeddings, -1 the last layer."""
        depth = self.config.layers
        if not all(-depth - 1 <= layer <= depth for layer in layers):
            raise ConfigError(
                f"layers: this transformer-xl has 0, the embeddings, to {depth}, but {list(layers)} is asked for"
            )
        states = self._hidden_states(tokens, TimeMajor(tokens), self._empty(len(tokens)))
        return torch.stack([states[layer] for layer in layers])

    def pooled_output(self, tokens: Tokens) -> Tensor:
        """Return one vector a sequence, (B, D): the hidden state of its last token."""
        grid = TimeMajor(tokens)
        return grid.end(self._hidden_states(tokens, grid, self._empty(len(tokens)))[-1])

    def logits(self, tokens: Tokens, at: Tensor | None = None, direction: LMDirection = "forward") -> Tensor:
        """Return the logits of the token after each: (N, V), or (len(at), V) at the flat positions `at`."""
        if direction != "forward":
            raise RoleError(f"model: a transformer-xl reads forward, but {direction!r} is asked for")
        hidden = self._hidden_states(tokens, TimeMajor(tokens), self._empty(len(tokens)))[-1]
        return self._project(hidden if at is None else hidden[at])

    def read(self, tokens: Tokens, state: XLMemory | None = None) -> tuple[Tensor, XLMemory]:
        """Continue sequences from `state`; return the logits (N, V) and the memory after each one's last token."""
        grid = TimeMajor(tokens)
        hidden, memory = self._read(tokens, grid, state)
        return self._project(hidden), memory

    def carried(self, state: XLMemory) -> XLMemory:
        """Return the memory for the next segment of the same texts, of `mem_len` positions, detached from the graph."""
        missing = self.config.mem_len - state.padding.shape[1]
        layers = tuple(F.pad(layer.detach(), (0, 0, missing, 0)) for layer in state.layers)
        return XLMemory(layers, F.pad(state.padding, (missing, 0), value=True))

    def state_of(self, parts: Sequence[Tensor]) -> XLMemory:
        """Return the memory with these `parts`."""
        *layers, padding = parts
        return XLMemory(tuple(layers), padding)

    def start(self, prompt: Tokens, source: Tokens | None = None) -> tuple[Tensor, XLMemory]:
        """Return the logits (B, V) of the token after each prompt, and the memory."""
        grid = TimeMajor(prompt)
        hidden, memory = self._read(prompt, grid, None)
        return self._project(grid.end(hidden)), memory

    def step(self, ids: Tensor, state: XLMemory) -> tuple[Tensor, XLMemory]:
        """Append one token to each hypothesis, ids (B,); return the logits (B, V) of the next one, and the memory."""
        return self.read(Tokens.flat(ids, torch.ones(len(ids))), state)

    def flops(self, tokens: Tokens, source: Tokens | None = None) -> int:
        """Return the FLOPs of texts that begin here: each matrix for each token but W_kR, 6 D for a query and its key.

        W_kR meets each distance once a batch, and a memory is of no length that is known here: neither counts.
        """
        width, reach = self.config.width, self.config.mem_len + 1
        near = tokens.lengths.clamp(max=reach)
        pairs = int((near * (near + 1) // 2 + (tokens.lengths - near) * reach).sum())
        matrices = num_matrix_parameters(self) - self.config.layers * width * width
        return 2 * matrices * int(tokens.lengths.sum()) + 6 * width * self.config.layers * pairs

    def _empty(self, rows: int) -> XLMemory:
        weight = self.embed.weight.detach()
        layers = (weight.new_zeros(rows, 0, self.width),) * self.config.layers
        return XLMemory(layers, weight.new_zeros(rows, 0, dtype=torch.bool))

    def _read(self, tokens: Tokens, grid: TimeMajor, state: XLMemory | None) -> tuple[Tensor, XLMemory]:
        memory = self._empty(len(tokens)) if state is None else state
        states = self._hidden_states(tokens, grid, memory)
        return states[-1], memory.extended(grid, states[:-1], self.config.mem_len)

    def _hidden_states(self, tokens: Tokens, grid: TimeMajor, memory: XLMemory) -> list[Tensor]:
        """Return the embeddings and each block's output, (N, D) each; dropout is on the first and the last."""
        layout = self._layout(grid, memory.padding)
        states = [self.dropout(self.embed(tokens.ids) * self.width**0.5)]
        for block, past in zip(self.blocks, memory.layers, strict=True):
            states.append(block(states[-1], past, layout))
        states[-1] = self.dropout(states[-1])
        return states

    def _layout(self, grid: TimeMajor, padding: Tensor) -> SegmentLayout:
        mem_len, device = self.config.mem_len, padding.device
        steps = torch.arange(padding.shape[1] + grid.steps, device=device)
        distance = steps[padding.shape[1] :, None] - steps  # (T, S)
        mask = (distance < 0) | (distance > mem_len) | F.pad(padding, (0, grid.steps))[:, None]
        encodings = self.positions(steps[: mem_len + 1].flip(0)).to(self.embed.weight.dtype)
        return SegmentLayout(grid, mask[:, None], self.dropout(encodings))

    def _project(self, hidden: Tensor) -> Tensor:
        assert self.output is not None
        logits: Tensor = self.output(hidden)
        return logits
