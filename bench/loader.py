"""From jsonl to batches against the bare tokenizer, and from packed ids to batches against Hugging Face datasets.

    python bench/loader.py

1. jsonl -> rows -> examples -> ids -> packed -> batches, against `encode_batch` alone on the same
   texts, already in memory.
2. Packed ids -> batches, against `datasets` (shuffled, grouped by length) with transformers' padding collator on the
   same rows and as many rows a batch: real tokens a second, padding not counted.
3. Pairs of segments with masked words, as BERT is pre-trained on them, in batches of 65,536 tokens: by the trainer's
   own process, and by one and two processes ahead of it, with the time that a batch then takes of the trainer's.
"""

import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from itertools import islice
from pathlib import Path

from weft.config.recipes import read_recipe
from weft.config.run import Run
from weft.config.sections import Data
from weft.data.batching.loader import Loader
from weft.data.samples.datasets import read_sample
from weft.tasks.encoding import ENCODE_CHUNK
from weft.tasks.factory import make_task
from weft.tasks.prepare import fit_tokenizer, pack_split

ROUNDS, ROWS, BUDGET, BATCHES = 5, 20_000, 8192, 200


def median_seconds(work: Callable[[], object]) -> float:
    work()
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def prose() -> list[str]:
    """Rows of 20 to 60 words from the manual that ships with Python: texts of the usual length."""
    words = " ".join(row["text"] for _, row in read_sample("pydoc", "train")).split()
    rng = random.Random(0)
    starts = [rng.randrange(len(words) - 60) for _ in range(2 * ROWS)]
    return [" ".join(words[start : start + rng.randrange(20, 60)]) for start in starts]


def main() -> None:
    run = Run.parse(read_recipe("dates", ["tokenizer={name: bpe, size: 4000}"]))
    task = make_task(run)
    texts = prose()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        with path.open("w") as file:
            for text, target in zip(texts[:ROWS], texts[ROWS:], strict=True):
                file.write(json.dumps({"text": text, "target": target}) + "\n")
        data = Data(train=str(path))
        tokenizer = fit_tokenizer(run.tokenizer, data, task)

        def ours() -> None:
            packed, _ = pack_split(data, "train", task, tokenizer)
            loader = Loader(packed, task.collate, BUDGET, 1)
            batches = -(-int(packed.sizes.sum()) // BUDGET)
            for _ in islice(loader.stream(), batches):
                pass

        def bare() -> None:
            for start in range(0, len(texts), ENCODE_CHUNK):
                tokenizer.engine.encode_batch(texts[start : start + ENCODE_CHUNK], add_special_tokens=False)

        seconds = {"weft, jsonl to batches": median_seconds(ours), "encode_batch alone": median_seconds(bare)}
        for name, took in seconds.items():
            print(f"{name:26} {2 * ROWS / took:10,.0f} texts/s")
        print(f"ratio {seconds['encode_batch alone'] / seconds['weft, jsonl to batches']:.2f}\n")
        packed, _ = pack_split(data, "train", task, tokenizer)
        against_datasets(packed, task)
    masked_pairs()


def masked_pairs() -> None:
    changes = ["tokenizer.size=4000", "data={sample: pydoc, max_length: 128, truncation: window}"]
    run = Run.parse(read_recipe("wiki-bert-mini-short", changes))
    task = make_task(run)
    task.tokenizer = fit_tokenizer(run.tokenizer, run.data, task)
    packed, _ = pack_split(run.data, "train", task, task.tokenizer)
    for workers in (0, 1, 2):
        loader = Loader(packed, task.collate, run.train.batch_tokens, 1, workers=workers)
        loader.sampler = task.sampler(packed, run, 1)
        with closing(loader.stream()) as batches:
            next(batches)
            began, own = time.perf_counter(), time.process_time()
            tokens = sum(loaded.batch.size for loaded in islice(batches, BATCHES))
            seconds, own = time.perf_counter() - began, (time.process_time() - own) / BATCHES
        print(f"masked pairs, {workers} workers {tokens / seconds:12,.0f} tokens/s, {own * 1e3:4.1f} ms of the trainer")


def against_datasets(packed, task) -> None:
    import datasets
    import torch
    from transformers import DataCollatorForSeq2Seq, PreTrainedTokenizerFast

    datasets.disable_progress_bars()
    rows = [packed[index] for index in range(len(packed))]
    tokens = int(packed.sizes.sum())
    table = datasets.Dataset.from_dict(
        {"input_ids": [row[0].tolist() for row in rows], "labels": [row[1].tolist() for row in rows]}
    )
    from tokenizers import Tokenizer, models

    plain = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"[PAD]": 0})), pad_token="[PAD]")
    collator = DataCollatorForSeq2Seq(plain, padding=True, return_tensors="pt")
    batch_rows = max(1, BUDGET * len(packed) // tokens)

    def theirs() -> None:
        order = table.shuffle(seed=1)
        for _ in torch.utils.data.DataLoader(order, batch_size=batch_rows, collate_fn=collator):
            pass

    loader = Loader(packed, task.collate, BUDGET, 1)

    def ours() -> None:
        for _ in islice(loader.stream(), -(-tokens // BUDGET)):
            pass

    seconds = {"weft": median_seconds(ours), "datasets + collator": median_seconds(theirs)}
    for name, took in seconds.items():
        print(f"{name:20} {tokens / took:12,.0f} real tokens/s")
    print(f"ratio {seconds['datasets + collator'] / seconds['weft']:.1f}")


if __name__ == "__main__":
    main()
