"""A batch with no padding: every real token end to end, plus where each sequence starts.

Shape legend, used throughout weft: `B` sequences, `N` tokens in all, `T` steps, `S` source steps, `D` width, `H` heads,
`V` vocabulary.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

# A word's spelling is its UTF-8 bytes, 0 to 255, between a sign for its beginning and one for its end, as ELMo reads
# it (Peters et al. 2018); `PAD` fills a row of `Tokens.chars`. There is nothing to learn, so no word is unknown.
BEGIN, END, PAD = 256, 257, 258
SYMBOLS = 259
FIRST, LAST = 259, 260  # two signs more that ELMo has: how it spells what begins a text, and what ends it
LONGEST_SPELLING = 50  # of a longer word the first 48 bytes count, as in ELMo


@dataclass(frozen=True)
class Specials:
    """The ids with a meaning of their own. A BERT vocabulary has `[CLS]` for `bos` and `[SEP]` for `eos`."""

    bos: int
    eos: int
    unk: int | None = None
    mask: int | None = None
    pad: int | None = None
    sep: int | None = None  # what stands between the two texts of a pair, where that is a token of its own


@dataclass(frozen=True)
class Tokens:
    """Sequences of token ids laid end to end."""

    ids: Tensor  # (N,) all sequences end to end, no padding
    starts: Tensor  # (B+1,) int32: sequence b is ids[starts[b]:starts[b+1]]
    lengths: Tensor  # (B,) int64, always on the CPU: packing an RNN costs no device sync
    longest: int  # an upper bound
    segments: Tensor | None = None  # (N,)
    chars: Tensor | None = None  # (N, C) int32: how each token is spelt, by the signs above
    features: Tensor | None = None  # (N, F) real-valued sequences, in place of ids

    @classmethod
    def pack(cls, sequences: Sequence[Sequence[int] | np.ndarray]) -> "Tokens":
        """Lay `sequences` end to end."""
        lengths = np.fromiter(map(len, sequences), np.int64, len(sequences))
        if len(sequences):
            flat = np.concatenate([np.asarray(ids, dtype=np.int64) for ids in sequences])
        else:
            flat = np.zeros(0, np.int64)
        return cls.flat(torch.from_numpy(flat), torch.from_numpy(lengths))

    @classmethod
    def flat(cls, ids: Tensor, lengths: Tensor) -> "Tokens":
        """Take ids that already lie end to end; `lengths` (B,) says where one sequence stops and the next begins."""
        lengths = lengths.to("cpu", torch.int64)
        starts = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        starts[1:] = lengths.cumsum(0)
        return cls(ids, starts.to(ids.device), lengths, int(lengths.max()) if len(lengths) else 0)

    def spelt(self, spellings: Sequence[np.ndarray]) -> "Tokens":
        """Add `chars`, from what `spell` gives for the tokens of each sequence."""
        flat = np.concatenate([np.zeros(0, np.int32), *spellings])
        ends = np.flatnonzero(flat == END) + 1  # (N,)
        assert len(ends) == len(self.ids), "a spelling for every token"
        sizes = np.diff(ends, prepend=0)
        chars = np.full((len(ends), max(sizes, default=2)), PAD, np.int32)
        chars[np.arange(chars.shape[1]) < sizes[:, None]] = flat
        return replace(self, chars=torch.from_numpy(chars).to(self.device))

    def __len__(self) -> int:
        """Return the number of sequences, B."""
        return len(self.lengths)

    @property
    def device(self) -> torch.device:
        """The device that holds the ids."""
        return self.ids.device

    def to(self, device: torch.device | str) -> "Tokens":
        """Move to a device; the lengths stay on the CPU."""
        move = {
            name: value.to(device, non_blocking=True)
            for name in ("ids", "starts", "segments", "chars", "features")
            if (value := getattr(self, name)) is not None
        }
        return replace(self, **move)

    def pin_memory(self) -> "Tokens":
        """Copy into page-locked memory, so that moving to a GPU can overlap with work."""
        pinned = {
            name: value.pin_memory()
            for name in ("ids", "starts", "segments", "chars", "features")
            if (value := getattr(self, name)) is not None
        }
        return replace(self, **pinned)

    def filled(self, size: int, longest: int, fillers: int, rows: int) -> "Tokens":
        """Add `fillers` sequences that bring it to `size` tokens, and empty ones that bring it to `rows` sequences.

        The ids of a filler are 0: they mean nothing, and nothing may read them.
        """
        spare = size - len(self.ids)
        assert self.features is None, "features have no filler"
        assert self.chars is None, "spellings have no filler"
        assert fillers <= spare <= fillers * longest, "the fillers have their place"
        share = torch.arange(fillers).mul(-1).add(spare + fillers - 1) // fillers
        empty = torch.zeros(rows - len(self) - fillers, dtype=torch.int64)
        filled = Tokens.flat(F.pad(self.ids, (0, spare)), torch.cat([self.lengths, share, empty]))
        segments = None if self.segments is None else F.pad(self.segments, (0, spare))
        return replace(filled, longest=longest, segments=segments)

    def split(self, values: Tensor | None = None) -> list[Tensor]:
        """Cut a flat (N, ...) tensor, the ids where none is given, into one tensor a sequence."""
        flat = self.ids if values is None else values
        return list(flat.split(self.lengths.tolist()))


def spell(words: Iterable[str]) -> np.ndarray:
    """Spell words, one after the other; what is no word, such as a special token, is spelt as ""."""
    room = LONGEST_SPELLING - 2
    spelt = [sign for word in words for sign in (BEGIN, *word.encode("utf-8")[:room], END)]
    return np.array(spelt, np.int32)
