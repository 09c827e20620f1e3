"""N-gram models in float64 and dictionaries, one equation at a time: what `weft.models.ngram.model` must be."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

UNK, BOS, EOS = 0, 1, 2
Gram = tuple[int, ...]


@dataclass
class Equations:
    """Documents without bos and eos, and how they are counted; `flaw` breaks an equation, for tests to notice."""

    documents: Sequence[Sequence[int]]
    vocab: int
    order: int
    prune: Sequence[int] = ()
    bos: int = BOS
    eos: int = EOS
    flaw: str = ""
    c: Counter[Gram] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.thresholds = [*self.prune, *[self.prune[-1] if self.prune else 0] * (self.order - len(self.prune))]
        for document in self.documents:
            f = [self.bos, *document, self.eos]
            for end in range(1, len(f)):
                for length in range(1, min(self.order, end + 1) + 1):
                    self.c[tuple(f[end + 1 - length : end + 1])] += 1
        self.after: dict[Gram, list[Gram]] = defaultdict(list)  # u -> all u w
        self.before: dict[Gram, set[int]] = defaultdict(set)  # g -> all v with v g
        for g in self.c:
            self.after[g[:-1]].append(g)
            self.before[g[1:]].add(g[0])
        self.words = self.vocab - (self.bos != self.eos)
        self.discounts = [self.discount(length) for length in range(1, self.order + 1)]

    def kept(self, g: Gram) -> bool:
        return self.c[g] > self.thresholds[len(g) - 1] or g == (self.eos,)

    def a(self, g: Gram) -> int:
        begins = len(g) > 1 and g[0] == self.bos and self.flaw != "bos"
        if len(g) == self.order or begins or self.flaw == "counts":
            return self.c[g]
        return len(self.before[g])

    def discount(self, length: int) -> list[float]:
        n = Counter(self.a(g) for g in self.c if len(g) == length)
        if not (n[1] and n[2] and n[3]):
            return [0.5, 1.0, 1.5]
        y = n[1] / (n[1] + 2 * n[2])
        d = [r - (r + 1) * y * n[r + 1] / n[r] for r in (1, 2, 3)]
        return d if all(0 <= d[r - 1] <= r for r in (1, 2, 3)) else [0.5, 1.0, 1.5]

    def kneser_ney(self, w: int, u: Gram) -> float:
        """p(w | u); u is as long as it may be."""
        following = self.after.get(u, [])
        total = sum(self.a(g) for g in following)
        said = 1 / self.words if w != self.bos or self.bos == self.eos else 0.0
        lower = self.kneser_ney(w, u[1:]) if u else said
        if not total:
            return lower
        d = [0.0, *self.discounts[len(u)]]
        gamma = sum(d[min(self.a(g), 3)] if self.kept(g) else self.a(g) for g in following) / total
        g = (*u, w)
        own = max(self.a(g) - d[min(self.a(g), 3)], 0) / total if g in self.c and self.kept(g) else 0.0
        return own + gamma * lower

    def counted(self, g: Gram) -> int:
        return self.c[g] if g in self.c and (self.c[g] > self.thresholds[len(g) - 1] or g == (self.eos,)) else 0

    def add_k(self, w: int, u: Gram, k: float) -> float:
        total = sum(self.counted(g) for g in self.after.get(u, []))
        if w == self.bos != self.eos:
            return 0.0
        return (self.counted((*u, w)) + k) / (total + k * self.words)

    def mle(self, w: int, u: Gram) -> float:
        total = sum(self.counted(g) for g in self.after.get(u, []))
        return self.counted((*u, w)) / total if total else self.mle(w, u[1:])

    def context(self, words: Sequence[int]) -> Gram:
        """The last n - 1 words, from bos on at the most."""
        return tuple(words[max(len(words) - self.order + 1, 0) :]) if self.order > 1 else ()
