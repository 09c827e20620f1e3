"""A batch without padding: the tokens of all sequences concatenated, and the offset where each sequence starts.

Shape legend, used throughout weft: `B` sequences, `N` tokens in all, `T` steps, `S` source steps, `D` width, `H` heads,
`V` vocabulary.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

# Character ids of a word: its UTF-8 bytes, 0 to 255, between `WORD_BEGIN` and `WORD_END`, as in ELMo (Peters et al.
# 2018); `CHAR_PAD` pads a row of `Tokens.chars`. This vocabulary is fixed, so no word is unknown.
WORD_BEGIN, WORD_END, CHAR_PAD = 256, 257, 258
NUM_CHARS = 259
TEXT_BEGIN, TEXT_END = 259, 260  # ELMo's character ids for the beginning and the end of a text
MAX_WORD_CHARS = 50  # longer words are truncated to 48 bytes, as in ELMo


@dataclass(frozen=True)
class Specials:
    """The ids of special tokens. A BERT vocabulary has `[CLS]` for `bos` and `[SEP]` for `eos`."""

    bos: int
    eos: int
    unk: int | None = None
    mask: int | None = None
    pad: int | None = None
    sep: int | None = None  # between the two texts of a pair, where that is a token of its own


@dataclass(frozen=True)
class Tokens:
    """Sequences of token ids, concatenated without padding."""

    ids: Tensor  # (N,) all sequences concatenated, no padding
    starts: Tensor  # (B+1,) int32: sequence b is ids[starts[b]:starts[b+1]]
    lengths: Tensor  # (B,) int64, always on the CPU: packing an RNN costs no device sync
    longest: int  # an upper bound of `lengths`
    segments: Tensor | None = None  # (N,)
    chars: Tensor | None = None  # (N, C) int32: each token's character ids, as above
    features: Tensor | None = None  # (N, F) real-valued sequences, in place of ids

    @classmethod
    def pack(cls, sequences: Sequence[Sequence[int] | np.ndarray]) -> "Tokens":
        """Concatenate `sequences`."""
        lengths = np.fromiter(map(len, sequences), np.int64, len(sequences))
        if len(sequences):
            flat = np.concatenate([np.asarray(ids, dtype=np.int64) for ids in sequences])
        else:
            flat = np.zeros(0, np.int64)
        return cls.flat(torch.from_numpy(flat), torch.from_numpy(lengths))

    @classmethod
    def flat(cls, ids: Tensor, lengths: Tensor) -> "Tokens":
        """Wrap ids (N,) that are already concatenated; `lengths` (B,) are those of the sequences."""
        lengths = lengths.to("cpu", torch.int64)
        starts = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        starts[1:] = lengths.cumsum(0)
        return cls(ids, starts.to(ids.device), lengths, int(lengths.max()) if len(lengths) else 0)

    def with_chars(self, chars: Sequence[np.ndarray]) -> "Tokens":
        """Return a copy with `chars`, from the `char_ids` of the tokens of each sequence."""
        flat = np.concatenate([np.zeros(0, np.int32), *chars])
        ends = np.flatnonzero(flat == WORD_END) + 1  # (N,)
        assert len(ends) == len(self.ids), "characters for every token"
        sizes = np.diff(ends, prepend=0)
        padded = np.full((len(ends), max(sizes, default=2)), CHAR_PAD, np.int32)
        padded[np.arange(padded.shape[1]) < sizes[:, None]] = flat
        return replace(self, chars=torch.from_numpy(padded).to(self.device))

    def __len__(self) -> int:
        """Return the number of sequences, B."""
        return len(self.lengths)

    @property
    def device(self) -> torch.device:
        """The device that holds the ids."""
        return self.ids.device

    def to(self, device: torch.device | str) -> "Tokens":
        """Return a copy on a device; the lengths stay on the CPU."""
        moved: dict[str, Any] = {
            name: to_device(value, device)
            for name in ("ids", "starts", "segments", "chars", "features")
            if (value := getattr(self, name)) is not None
        }
        return replace(self, **moved)

    def padded_to(self, size: int, longest: int, fillers: int, rows: int) -> "Tokens":
        """Return a copy padded to `size` tokens by `fillers` sequences, and to `rows` sequences by empty ones.

        The ids of a filler are 0: they have no meaning, and no result may depend on them.
        """
        num_padding = size - len(self.ids)
        assert self.features is None, "features have no filler"
        assert self.chars is None, "characters have no filler"
        assert fillers <= num_padding <= fillers * longest, "each filler has between 1 and `longest` tokens"
        filler_lengths = torch.arange(fillers).mul(-1).add(num_padding + fillers - 1) // fillers
        empty = torch.zeros(rows - len(self) - fillers, dtype=torch.int64)
        padded = Tokens.flat(F.pad(self.ids, (0, num_padding)), torch.cat([self.lengths, filler_lengths, empty]))
        segments = None if self.segments is None else F.pad(self.segments, (0, num_padding))
        return replace(padded, longest=longest, segments=segments)

    def split(self, values: Tensor | None = None) -> list[Tensor]:
        """Split a flat (N, ...) tensor, by default the ids, into one tensor a sequence."""
        flat = self.ids if values is None else values
        return list(flat.split(self.lengths.tolist()))


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return a tensor on a device, without waiting for what that computes.

    What goes to a GPU goes from page-locked memory, which PyTorch keeps until the copy is made. Of other memory CUDA
    says only that a copy may have been made when the call returns, and most of these tensors are freed right then.
    """
    if tensor.device.type == "cpu" and torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def char_ids(words: Iterable[str]) -> np.ndarray:
    """Return the concatenated character ids of words; a special token is passed as ""."""
    max_bytes = MAX_WORD_CHARS - 2
    chars = [char for word in words for char in (WORD_BEGIN, *word.encode("utf-8")[:max_bytes], WORD_END)]
    return np.array(chars, np.int32)
