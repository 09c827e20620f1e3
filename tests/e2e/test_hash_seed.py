"""Results do not hang on the order of sets and dicts: processes with other hash seeds give the same, to the bit."""

import json

import pytest
from tests.limits import run_limited

SCRIPT = """
import hashlib, random, sys, tempfile
from pathlib import Path
import weft
from weft.config.schema import read_section
from weft.registry import resolve
from weft.tasks.metrics import macro_f1, tally_entities, tally_labels
from weft.tasks.classification_report import ClassificationReport
from weft.tokenization.trainable import train_tokenizer

rng = random.Random(5)
names = ["label " + str(number) for number in range(40)]
gold, answers = ([rng.choice(names) for _ in range(997)] for _ in range(2))
results["set order"] = list({*names[:20]})
results["macro_f1"] = macro_f1(answers, gold)
tallies = tally_labels([[one] for one in answers], [[one] for one in gold], sorted({*gold}))
results["report"] = ClassificationReport.of(tallies).to_dict()
tags = [[rng.choice(["O", "B-x", "I-x", "B-y"]) for _ in range(30)] for _ in range(40)]
results["entities"] = repr(tally_entities(tags, tags[::-1]))
words = ["naïve", "lambda", "aa", "ab", "b", "xyz", "tense"]
texts = [" ".join(rng.choice(words) for _ in range(9)) for _ in range(60)]
sizes = {"bpe": 300, "wordpiece": 60, "unigram": 60}
for name in ("words", "characters", "bytes", "bpe", "wordpiece", "unigram"):
    section = {"name": name, **({"size": sizes[name]} if name in sizes else {})}
    config = read_section(resolve("tokenizer", name).Config, section, "tokenizer")
    results[name] = hashlib.sha256(train_tokenizer(config, texts).identity.encode()).hexdigest()

folder = Path(tempfile.mkdtemp(dir=argument))
rows = [f"{text}\\t{rng.choice(names[:7])}" for text in texts]
(folder / "rows.tsv").write_text("\\n".join(rows) + "\\n", encoding="utf-8")
recipe = {
    "task": {"name": "classify", "weights": "balanced"},
    "data": {"train": str(folder / "rows.tsv"), "valid": str(folder / "rows.tsv")},
    "tokenizer": {"name": "words"},
    "model": {"name": "rnn", "width": 8},
    "train": {"steps": 4, "batch_tokens": 100, "device": "cpu"},
}
pipeline = weft.train(recipe, out=folder / "run")
results["evaluation"] = pipeline.evaluate_in_detail(errors=True).to_dict()
results["imported"] = sorted({"torch._dynamo", "weft"} & set(sys.modules))
results["weights"] = hashlib.sha256((folder / "run" / "last" / "model.safetensors").read_bytes()).hexdigest()
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return the results of this process, and of one with a seed of its own."""
    folder, names = tmp_path_factory.mktemp("seeds"), {"results": {}}
    exec(SCRIPT, names | {"argument": folder})
    there = run_limited(SCRIPT, folder, memory=6 << 30, PYTHONHASHSEED="2")
    return json.loads(json.dumps(names["results"])), there


def test_results_are_those_of_every_hash_seed(results):
    first, second = results
    del first["imported"]
    assert second.pop("imported") == ["weft"], "a training does not need what takes as long to import as PyTorch"
    assert first.pop("set order") != second.pop("set order"), "the seeds must differ for this to mean it"
    assert {name for name in first if first[name] != second[name]} == set()
