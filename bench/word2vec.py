"""word2vec on WikiText-2: words/s and WordSim-353 beside gensim, in one run; the two take turns.

python bench/word2vec.py wikitext2/train.txt --wordsim EN-WS-353-ALL.txt            # CPU, 2 threads, both methods
python bench/word2vec.py wikitext2/train.txt --wordsim EN-WS-353-ALL.txt --pack w.npz  # only write what a GPU run needs
python bench/word2vec.py w.npz --device cuda --programs 128 256                      # on a machine without gensim

100 dimensions, window 5, 5 negatives, sub-sampling 1e-3, words seen 5 times or more, 5 passes, 3 seeds. Counted are all
words of the text, rare ones too, on both sides. weft's time is that of `fit`, from ids; gensim's that of `train`, from
lists of words, its vocabulary built before.
"""

import argparse
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import numpy as np
import torch

from weft.analysis.word_vectors import WordVectors
from weft.data.batching.packed_items import PackedItems, pack
from weft.models.base import FitBudget
from weft.models.word2vec.model import Word2Vec, Word2VecConfig

LEAST, WIDTH, WINDOW, DRAWN, SAMPLE, LR = 5, 100, 5, 5, 1e-3, 0.025


@dataclass(frozen=True)
class Text:
    words: list[str]  # the vocabulary, the most frequent first
    data: PackedItems
    size: int  # words of the text, rare ones too
    lines: list[list[str]]  # for gensim; none in what was packed


def read_text(path: Path) -> Text:
    lines = [line.split() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    counts = Counter(word for line in lines for word in line)
    words = [word for word, count in counts.most_common() if count >= LEAST]
    ids = {word: id for id, word in enumerate(words)}
    documents = [np.array([ids[word] for word in line if word in ids], np.int32) for line in lines]
    return Text(words, pack((one,) for one in documents), sum(map(len, lines)), lines)


def read_packed(path: Path) -> Text:
    found = np.load(path)
    items = np.arange(len(found["starts"]))
    return Text(found["words"].tolist(), PackedItems(found["ids"], found["starts"], items, ""), int(found["size"]), [])


def train_weft(text: Text, method: str, args: argparse.Namespace, seed: int, passes: int) -> tuple[float, np.ndarray]:
    torch.manual_seed(seed)
    config = Word2VecConfig(
        name="word2vec", method=method, width=WIDTH, window=WINDOW, negatives=DRAWN, subsample=SAMPLE
    )
    model = Word2Vec(config, len(text.words)).to(args.device)
    budget = FitBudget(passes, None, LR, seed, threads=args.threads)
    began = time.perf_counter()
    list(model.fit(text.data, budget))
    if args.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began, model.embed.weight.detach().cpu().numpy()


def train_gensim(text: Text, method: str, args: argparse.Namespace, seed: int, passes: int) -> tuple[float, np.ndarray]:
    from gensim.models import Word2Vec as Gensim

    sizes = {"vector_size": WIDTH, "window": WINDOW, "negative": DRAWN, "sample": SAMPLE, "min_count": LEAST}
    model = Gensim(**sizes, alpha=LR, seed=seed, sg=int(method == "skipgram"), workers=args.threads)
    model.build_vocab(text.lines)
    began = time.perf_counter()
    model.train(text.lines, total_examples=model.corpus_count, epochs=passes)
    took = time.perf_counter() - began
    return took, np.stack([model.wv[word] for word in text.words])


def compare(text: Text, method: str, args: argparse.Namespace) -> None:
    sides = {"weft": train_weft} | ({"gensim": train_gensim} if text.lines and not args.alone else {})
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in sides}
    train_weft(text, method, args, 0, 1)  # compiles
    for seed in args.seeds:
        for name, train in sides.items():
            took, rows = train(text, method, args, seed, args.passes)
            vectors = WordVectors(text.words, rows)
            scores = [vectors.evaluate_word_pairs(str(path)).spearman for path in args.wordsim]
            found[name].append((args.passes * text.size / took, *scores))
            shown = "  ".join(
                f"{Path(path).stem} {score:.4f}" for path, score in zip(args.wordsim, scores, strict=True)
            )
            print(f"{method:9} {name:7} seed {seed}  {found[name][-1][0]:12,.0f} words/s  {shown}", flush=True)
    means = {name: [mean(column) for column in zip(*rows, strict=True)] for name, rows in found.items()}
    for name, (rate, *scores) in means.items():
        print(f"{method:9} {name:7} mean    {rate:12,.0f} words/s  {'  '.join(f'{score:.4f}' for score in scores)}")
    if "gensim" in means:
        apart = [ours - theirs for ours, theirs in zip(means["weft"][1:], means["gensim"][1:], strict=True)]
        shown = ", ".join(f"{one:+.4f}" for one in apart)
        print(f"{method:9} ratio {means['weft'][0] / means['gensim'][0]:.2f}x, scores apart by {shown}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--wordsim", nargs="*", default=[])
    parser.add_argument("--methods", nargs="+", default=["skipgram", "cbow"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--programs", type=int, nargs="*", default=[], help="CUDA: try so many programs")
    parser.add_argument("--alone", action="store_true", help="without gensim")
    parser.add_argument("--pack", type=Path, help="write ids and words, and end")
    args = parser.parse_args()
    text = read_packed(args.text) if args.text.suffix == ".npz" else read_text(args.text)
    if args.pack:
        data = {"ids": text.data.ids, "starts": text.data.starts, "words": np.array(text.words), "size": text.size}
        np.savez_compressed(args.pack, **data)
        return
    print(f"{text.size:,} words, {len(text.words):,} different, {args.device}, {args.passes} passes")
    for method in args.methods:
        for programs in args.programs or [0]:
            if programs:
                from weft.models.word2vec import triton

                triton.MAX_PROGRAMS = programs
                print(f"{programs} programs")
            compare(text, method, args)


if __name__ == "__main__":
    main()
