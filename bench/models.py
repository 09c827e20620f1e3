"""Train the models that ship with weft again, from public text, and pack them: what `make models` does.

    python bench/models.py text TEXTS PAIRS --work build/models    split the text, the pairs and the sentences
    python bench/models.py train --work build/models               about an hour of one H200
    python bench/models.py pack --work build/models                write src/weft/zoo/NAME, without their cards

TEXTS is a folder of plain texts, one paragraph a line, a blank line between documents, of which the first line is the
title; PAIRS is Tatoeba's file of English and French (fra.txt of manythings.org/anki). One document in 400 is held out,
and of the pairs those of one English sentence in fifty, by a hash: the same ones each time.
"""

import argparse
import hashlib
import json
import random
import re
import subprocess
import sys
import unicodedata
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import torch

import weft
from weft.checkpoint import contents
from weft.checkpoint.manifest import CHECKPOINT_MANIFEST, seal
from weft.config.run import Run
from weft.tasks.factory import build
from weft.zoo import ROOT

RECIPES = Path(__file__).parent / "models"
STRETCHES = [
    "encoder-short",
    "encoder-long",
    "encoder-replaced-short",
    "encoder-replaced-long",
    "sentences",
    "writer",
    "translator",
]
TASK = {"name": "mlm", "whole_words": True, "next_sentence": False}  # of encoder-en, as it ships
LONGEST_HELD_OUT = 200_000  # characters: a whole novel is no validation document
SENTENCE_END = re.compile(r"(?<=[.!?]) +(?=[A-Z\"'(])")
ABBREVIATION = re.compile(r"(?:\b(?:Mr|Mrs|Dr|St|Jr|Sr|vs|etc|e\.g|i\.e|No|U\.S|[A-Z])\.)$")


def bucket(text: str, size: int) -> int:
    """Return a number below `size` that follows from a text alone."""
    return int(hashlib.sha256(text.encode()).hexdigest(), 16) % size


def documents(path: Path) -> Iterator[str]:
    """Yield the documents of a file."""
    yield from filter(None, (part.strip("\n") for part in path.read_text(encoding="utf-8").split("\n\n")))


def split_texts(texts: Path, work: Path) -> None:
    """Write train/*.txt and valid.txt."""
    (work / "train").mkdir(parents=True, exist_ok=True)
    with (work / "valid.txt").open("w", encoding="utf-8") as valid:
        for path in sorted(texts.glob("*.txt")):
            with (work / "train" / path.name).open("w", encoding="utf-8") as train:
                for text in documents(path):
                    held_out = bucket(text, 400) == 0 and len(text) < LONGEST_HELD_OUT
                    (valid if held_out else train).write(text + "\n\n")


def read_pairs(path: Path) -> list[tuple[str, str]]:
    """Return the pairs of a file, English first, with simple spaces."""
    lines = path.read_text(encoding="utf-8").splitlines()
    cells = (line.split("\t")[:2] for line in lines)
    return [tuple(unicodedata.normalize("NFC", " ".join(cell.split())) for cell in pair) for pair in cells]  # type: ignore[misc]


def split_pairs(pairs: list[tuple[str, str]], work: Path) -> None:
    """Write pairs/train.tsv, valid.tsv and test.tsv; no English sentence is in two of them."""
    folder, held_out = work / "pairs", set[str]()
    folder.mkdir(parents=True, exist_ok=True)
    files = {name: (folder / f"{name}.tsv").open("w", encoding="utf-8") for name in ("train", "valid", "test")}
    for english, french in pairs:
        name = {0: "valid", 1: "test"}.get(bucket(english.lower(), 100), "train")
        if name != "train" and english in held_out:
            continue  # one pair for each English sentence
        held_out |= {english} if name != "train" else set()
        files[name].write(f"{english}\t{french}\n")
    for file in files.values():
        file.close()


def sentences(paragraph: str) -> list[str]:
    """Return the sentences of a paragraph."""
    parts: list[str] = []
    for part in SENTENCE_END.split(paragraph):
        if parts and ABBREVIATION.search(parts[-1]):
            parts[-1] += " " + part
        else:
            parts.append(part)
    return parts


def is_prose(text: str) -> bool:
    """Return whether a sentence is whole, neither short nor long, and mostly letters."""
    letters = sum(char.isalpha() or char == " " for char in text)
    return 5 <= len(text.split()) <= 40 and text[-1] in ".!?" and letters > 0.85 * len(text)


def paraphrases(pairs: list[tuple[str, str]], rng: random.Random) -> list[tuple[str, str]]:
    """Return pairs of English sentences that share a French translation: each with the next of its group."""
    groups = defaultdict[str, dict[str, str]](dict)
    for english, french in pairs:
        key = re.sub(r"[^a-z0-9 ]", "", english.lower()).strip()
        groups[re.sub(r"[^\w ]", "", french.lower()).strip()].setdefault(key, english)
    rings = []
    for group in groups.values():
        members = list(group.values())
        rng.shuffle(members)
        rings += list(pairwise(members))[:12]
    return sorted(set(rings))


def write_sentences(texts: Path, pairs: list[tuple[str, str]], work: Path) -> None:
    """Write sentences.jsonl: sentences, paraphrases, titles with first sentences, neighbouring sentences."""
    rng, singles, neighbours, titles = random.Random(1), set[str](), [], []
    for text in documents(texts / "simple_wikipedia.txt"):
        title, *paragraphs = text.split("\n")
        bodies = [sentences(paragraph) for paragraph in paragraphs]
        titles += [(title, body[0]) for body in bodies[:1] if is_prose(body[0])]
        neighbours += [pair for body in bodies for pair in pairwise(body) if all(map(is_prose, pair))]
        singles.update(part for body in bodies for part in body if is_prose(part))
    english = {source for source, _ in pairs if len(source.split()) >= 4}
    rows = [{"text": text} for text in [*rng.sample(sorted(singles), 80_000), *sorted(english)]]
    drawn = [*6 * paraphrases(pairs, rng), *rng.sample(titles, 30_000), *rng.sample(neighbours, 40_000)]
    rows += [{"text": first, "pair": second} for first, second in drawn]
    rng.shuffle(rows)
    with (work / "sentences.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def train(work: Path) -> None:
    """Train every stretch that is not there yet, one from the other."""
    for name in STRETCHES:
        command = [sys.executable, "-m", "weft", "train", str(RECIPES / f"{name}.yaml"), "--out", f"runs/{name}"]
        subprocess.run([*command, "--resume"], cwd=work, check=True)


def pack(work: Path) -> None:
    """Write the checkpoints of the package: in 8 bits, without what differs in nothing from the encoder."""
    encoder = _filler(weft.load(work / "runs/encoder-replaced-long/last"))
    trained = contents.weights(encoder.head)
    _write(encoder, "encoder-en")
    stored, vectors = contents.read_weights(ROOT / "encoder-en"), weft.load(work / "runs/sentences")
    with torch.no_grad():
        for name, value in contents.weights(vectors.head).items():
            if name in trained and torch.equal(value, trained[name]):
                value.copy_(stored[name])
    _write(vectors, "sentences-en", base="encoder-en")
    _write(weft.load(work / "runs/writer"), "writer-en")
    _write(weft.load(work / "runs/translator"), "translator-en-fr")


def _filler(pipeline: weft.Pipeline) -> weft.Pipeline:
    """Return the model of an ELECTRA run as one that fills masks."""
    raw = pipeline.run.dump()
    run = Run.parse({**raw, "task": TASK, "model": {**raw["model"], "weights": None}})
    task, head = build(run, pipeline.tokenizer)
    weights = contents.weights(pipeline.head)
    with torch.no_grad():
        for name, value in contents.weights(head).items():
            value.copy_(weights[name])
    return weft.Pipeline(run, task, pipeline.tokenizer, head)


def _write(pipeline: weft.Pipeline, name: str, base: str | None = None) -> None:
    """Write a checkpoint beside its card, and seal both."""
    (ROOT / name).mkdir(exist_ok=True)
    (ROOT / name / CHECKPOINT_MANIFEST).unlink(missing_ok=True)
    pipeline.write(ROOT / name, "int8", base)
    (ROOT / name / "model.safetensors").chmod(0o644)
    seal(ROOT / name, 0)


def main() -> None:
    """Run one of the three steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["text", "train", "pack"])
    parser.add_argument("sources", nargs="*", type=Path, help="of `text`: the folder of texts, and the file of pairs")
    parser.add_argument("--work", type=Path, default=Path("build/models"))
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    if arguments.step == "text":
        texts, pairs_file = arguments.sources
        pairs = read_pairs(pairs_file)
        split_texts(texts, arguments.work)
        split_pairs(pairs, arguments.work)
        write_sentences(texts, pairs, arguments.work)
    else:
        {"train": train, "pack": pack}[arguments.step](arguments.work)


if __name__ == "__main__":
    main()
