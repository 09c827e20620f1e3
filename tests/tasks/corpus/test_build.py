"""Prepared corpora: the items are those that training encodes itself, whatever the number of workers and parts."""

import json
import os
import tracemalloc
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import weft
from weft.config.recipes import read_recipe
from weft.config.run import Run
from weft.data.corpus.format import open_split, read_manifest
from weft.data.corpus.merge import NARROW, PartitionPlan
from weft.data.corpus.partition import partition_source
from weft.errors import ConfigError, DataError
from weft.tasks.corpus import build
from weft.tasks.corpus import workers as corpus_workers
from weft.tasks.corpus.build import prepare
from weft.tasks.corpus.reuse import vocabulary
from weft.tasks.corpus.workers import Job, make_part
from weft.tasks.factory import make_task
from weft.tasks.prepare import fit_tokenizer, pack_split, read_evaluation_data, read_split, resolve_task_config
from weft.training.reporting import read_metrics

WORDS = ["the", "weft", "is", "a", "thread", "that", "runs", "through", "all", "of", "it"]


def lines(count, seed=0):
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, rng.integers(1, 9)).tolist()) for _ in range(count)]


def lm_recipe(path, **data):
    return {
        "task": {"name": "lm"},
        "data": {"train": str(path), **data},
        "tokenizer": {"name": "characters"},
        "model": {"name": "rnn", "width": 8},
        "train": {"steps": 3, "batch_tokens": 128, "report_every": 1},
    }


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\n".join(lines(400)) + "\n")
    return path


@pytest.fixture
def out(tmp_path):
    return tmp_path / "corpus"


def parsed(recipe, *overrides):
    return Run.parse(read_recipe(recipe, overrides))


def packed(run, split="train"):
    """Return the items that training encodes from the text itself."""
    task = make_task(run.model_copy(update={"task": resolve_task_config(run.data, make_task(run))}))
    return pack_split(run.data, split, task, fit_tokenizer(run.tokenizer, run.data, task))


def same(found, want):
    assert found.digest == want.digest
    assert np.array_equal(found.ids, want.ids)
    assert np.array_equal(found.starts, want.starts)
    assert np.array_equal(found.items, want.items)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.text(alphabet="ab \n東", max_size=12), min_size=1, max_size=20), st.integers(1, 50))
def test_a_corpus_is_what_training_makes_of_its_text(tmp_path_factory, documents, size):
    folder = tmp_path_factory.mktemp("corpus")
    path = folder / "text.txt"
    path.write_text("\n\n".join([*documents, "ab ab"]), encoding="utf-8")
    run = parsed(lm_recipe(path, documents="blank"))
    manifest = prepare(run, folder / "corpus", workers=1, size=size)
    found, (want, _) = open_split(folder / "corpus", "train"), packed(run)
    same(found, want)
    texts = [example.text for _, example in read_split(run.data, "train", make_task(run), build.Skipped())]
    assert found.bytes.tolist() == [len(text.encode()) for text in texts]
    assert manifest.splits["train"].documents == len(texts)


def write(path, rows):
    path.write_text("".join("\t".join(row) + "\n" for row in rows))
    return str(path)


def tasks(folder):
    """Give a recipe for each task whose items differ: labels, places, two sides, spelling."""
    texts, train = lines(60), {"steps": 1}
    words = [line.split() for line in texts]
    pairs = write(folder / "pairs.tsv", [(line, line[::-1]) for line in texts])
    labels = write(folder / "labels.tsv", [(line, "ab"[len(line) % 2]) for line in texts])
    tags = "\n\n".join("\n".join(f"{word} {'NV'[len(word) % 2]}" for word in line) for line in words)
    (folder / "tags.conll").write_text(tags)
    tokenizer, rnn = {"name": "words"}, {"name": "rnn", "width": 8, "direction": "both"}
    return {
        "translate": {
            "task": {"name": "translate"},
            "data": {"train": pairs, "valid": pairs},
            "tokenizer": {"name": "characters", "target": {"name": "bytes"}},
            "model": {"name": "seq2seq", "width": 8},
            "train": train,
        },
        "classify": {
            "task": {"name": "classify", "weights": "balanced"},
            "data": {"train": labels, "max_length": 4, "truncation": "cut"},
            "tokenizer": tokenizer,
            "model": rnn,
            "train": train,
        },
        "tag": {
            "task": {"name": "tag"},
            "data": {"train": str(folder / "tags.conll"), "max_length": 5, "truncation": "window"},
            "tokenizer": tokenizer,
            "model": {**rnn, "chars": 4},
            "train": train,
        },
        "sample": {
            "task": {"name": "lm"},
            "data": {"sample": "pydoc"},
            "tokenizer": {"name": "words"},
            "model": {"name": "rnn", "width": 8},
            "train": train,
        },
    }


@pytest.mark.parametrize("name", ["translate", "classify", "tag", "sample"])
def test_every_task_can_be_prepared_and_trained_on(tmp_path, out, name):
    recipe = tasks(tmp_path)[name]
    run = parsed(recipe)
    manifest = prepare(run, out, ("train",), workers=1)
    want, told = packed(run)
    found = open_split(out, "train", make_task(run).num_token_arrays)
    same(found, want)
    assert np.array_equal(found.sizes, want.sizes)
    assert np.array_equal(found.shapes, want.shapes)
    assert manifest.splits["train"].notice == told
    assert manifest.splits["train"].documents <= manifest.splits["train"].items
    again = parsed({**recipe, "data": {**recipe["data"], "sample": None, "train": str(out)}}, "data.valid=null")
    task = make_task(again.model_copy(update={"task": resolve_task_config(again.data, make_task(again))}))
    opened, notice = pack_split(again.data, "train", task, fit_tokenizer(again.tokenizer, again.data, task))
    assert (opened.digest, notice) == (want.digest, told)


def test_the_number_of_parts_and_workers_does_not_matter(text, tmp_path):
    run, manifest = parsed(lm_recipe(text)), {}
    for workers, size in ((1, None), (1, 500), (2, 1000)):
        stages = []
        manifest[workers, size] = prepare(run, tmp_path / f"{workers}-{size}", ("train",), workers, stages.append, size)
        sizes = [stage.done for stage in stages]
        assert sizes == sorted(sizes)
        assert (sizes[0], sizes[-1]) == (0, text.stat().st_size)
        assert len(stages) == (2 if size is None else len(stages))
    first, *others = manifest.values()
    assert all(one == first for one in others)


def test_training_on_a_corpus_is_training_on_its_text(text, tmp_path, out):
    recipe = lm_recipe(text)
    prepare(parsed(recipe), out, workers=1)
    weft.train(recipe, out=tmp_path / "one")
    weft.train(recipe, [f"data.train={out}"], tmp_path / "two")
    one, two = ([row["loss"] for row in read_metrics(tmp_path / name / "metrics.jsonl")] for name in ("one", "two"))
    assert one == two
    assert len(one) == 3


def stop_after(parts):
    """Return a report that gives up after so many parts."""
    seen = []

    def report(stage):
        seen.append(stage)
        if len(seen) > parts:
            raise KeyboardInterrupt

    return report


@pytest.mark.parametrize("workers", [1, 2])
def test_only_what_is_missing_is_made(text, tmp_path, out, workers):
    run = parsed(lm_recipe(text))
    with pytest.raises(KeyboardInterrupt):
        prepare(run, out, workers=workers, size=200, report=stop_after(3))  # far more parts than two workers are ahead
    parts = out / "parts" / "train"
    done = {path: path.stat().st_ino for path in parts.glob("*.json") if path.name != "plan.json"}
    assert len(done) >= 3
    with pytest.raises(KeyboardInterrupt):
        prepare(run, out, workers=1, size=77, report=stop_after(1))  # the size of the plan counts, not this one
    assert all(path.stat().st_ino == inode for path, inode in done.items())
    assert len(list(parts.glob("*.json"))) == len(done) + 2
    prepare(run, out, workers=workers)
    same(open_split(out, "train"), packed(run)[0])
    assert not (out / "parts").exists()
    prepare(run, tmp_path / "other", workers=1)
    assert read_manifest(out) == read_manifest(tmp_path / "other")


def half_done(text, out, *overrides):
    with pytest.raises(KeyboardInterrupt):
        prepare(parsed(lm_recipe(text), *overrides), out, workers=1, size=1000, report=stop_after(2))


@pytest.mark.parametrize("half", [True, False])
def test_what_has_changed_since_is_named(text, out, half):
    if half:
        half_done(text, out)
    else:
        prepare(parsed(lm_recipe(text)), out, workers=1)
    for change, told in {
        "tokenizer.lowercase=true": "tokenizer.lowercase: was False when .* was begun, and is True now",
        "tokenizer={name: bytes}": "tokenizer.name: was 'characters'",
        "task.bptt=32": "task.bptt: was 64",
        "data.max_length=7": "data.max_length: was 1024",
        "data.documents=file": "data.documents: was 'lines'",
        "model.direction=both": "of one and the same example this recipe makes other items",
    }.items():
        with pytest.raises(ConfigError, match=told):
            prepare(parsed(lm_recipe(text), change), out, workers=1)
    prepare(parsed(lm_recipe(text), "model.width=16", "train.steps=9", "data.workers=2"), out, workers=1)


@pytest.mark.parametrize("half", [True, False])
def test_a_changed_source_is_named(text, out, half):
    if half:
        half_done(text, out)
    else:
        prepare(parsed(lm_recipe(text)), out, workers=1)
    before, size = text.read_text(), text.stat().st_size
    text.write_text(before + "more\n")
    with pytest.raises(DataError, match=f"text.txt: has changed, from {size:,} to {size + 5:,} bytes, since"):
        prepare(parsed(lm_recipe(text)), out, workers=1)
    text.write_text(before)  # of the same size, and written just now
    with pytest.raises(DataError, match="text.txt: has changed since"):
        prepare(parsed(lm_recipe(text)), out, workers=1)


def test_new_and_missing_files_are_named(tmp_path, out):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("text\n")
    run = parsed(lm_recipe(tmp_path / "*.txt"))
    prepare(run, out, workers=1)
    (tmp_path / "c.txt").write_text("text\n")
    with pytest.raises(DataError, match="c.txt: is new among the files"):
        prepare(run, out, workers=1)
    (tmp_path / "c.txt").unlink()
    (tmp_path / "b.txt").unlink()
    with pytest.raises(DataError, match="b.txt: is no more among the files"):
        prepare(run, out, workers=1)


def test_a_file_that_changes_while_it_is_read_is_noticed(text, out):
    def change(stage):
        if stage.done == stage.total:
            os.utime(text, ns=(1, 1))

    with pytest.raises(DataError, match="text.txt: has changed since"):
        prepare(parsed(lm_recipe(text)), out, workers=1, report=change)


def test_a_tokenizer_that_was_changed_is_named(text, out):
    half_done(text, out)
    saved = out / "tokenizer.json"
    saved.write_text(saved.read_text().replace('"w"', '"W"'))
    with pytest.raises(DataError, match="tokenizer.json: has changed since the text was prepared with it"):
        prepare(parsed(lm_recipe(text)), out, workers=1)


def test_a_damaged_split_is_found_when_it_is_asked_for_again(text, out):
    run = parsed(lm_recipe(text))
    prepare(run, out, workers=1)
    path = out / "train" / "ids.npy"
    path.write_bytes(path.read_bytes()[:-2] + b"\0\0")
    with pytest.raises(DataError, match="ids.npy: is damaged"):
        prepare(run, out, workers=1)


def test_splits_can_be_added_later(text, tmp_path, out):
    valid = tmp_path / "valid.txt"
    valid.write_text("\n".join(lines(30, seed=1)))
    prepare(parsed(lm_recipe(text)), out, workers=1)
    inode = (out / "train" / "ids.npy").stat().st_ino
    manifest = prepare(parsed(lm_recipe(text, valid=str(valid))), out, ("valid", "test"), workers=1)
    assert list(manifest.splits) == ["train", "valid"]
    assert (out / "train" / "ids.npy").stat().st_ino == inode
    same(open_split(out, "valid"), packed(parsed(lm_recipe(text, valid=str(valid))), "valid")[0])


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_row_stops_all_and_is_named(text, out, workers):
    with text.open("ab") as file:
        file.write(b"bad \xff\n" + b"good\n" * 20)
    with pytest.raises(DataError, match=r"text.txt:401: not UTF-8.*on_bad_rows: skip"):
        prepare(parsed(lm_recipe(text)), out, workers=workers, size=1000)


def test_what_was_skipped_or_cut_is_told_as_by_training(text, out):
    text.write_bytes(b"bad \xff\n" + text.read_bytes() + b"bad \xfe\n")
    changes = ["data.on_bad_rows=skip", "data.max_length=20", "data.truncation=drop", "task.sequences=documents"]
    run = parsed(lm_recipe(text), *changes)
    manifest = prepare(run, out, workers=1, size=1000)
    want, told = packed(run)
    same(open_split(out, "train"), want)
    assert manifest.splits["train"].notice == told
    assert "skipped 2 rows" in told
    assert "dropped" in told


@pytest.mark.parametrize("workers", [1, 2])
def test_what_is_odd_is_told_as_by_training(tmp_path, out, workers):
    rows = [{"text": "" if number % 40 == 3 else f"text {number}"} for number in range(400)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = parsed(lm_recipe(tmp_path / "a.jsonl"))
    notice = prepare(run, out, workers=workers, size=1000).splits["train"].notice
    assert notice == packed(run)[1] == f"10 rows with an empty text, the first: {tmp_path / 'a.jsonl'}:4"


def test_where_nothing_is_left_it_is_an_error(tmp_path, out):
    path = tmp_path / "long.txt"
    path.write_text("too long for this\n" * 3)
    with pytest.raises(DataError, match="data.train: not one example is left to use; dropped 3 sequences"):
        prepare(parsed(lm_recipe(path, max_length=2, truncation="drop"), "task.sequences=documents"), out, workers=1)


def test_a_file_with_no_good_row_is_an_error_though_it_was_cut(text, tmp_path, out):
    for name, content in (("u.txt", "\n" * 3000), ("v.txt", "text\n")):
        (tmp_path / name).write_text(content)
    run = parsed(lm_recipe(text, valid=str(tmp_path / "[uv].txt")))
    with pytest.raises(DataError, match="u.txt: there are no rows in it"):
        packed(run, "valid")
    with pytest.raises(DataError, match="u.txt: there are no good rows in it"):
        prepare(run, out, workers=1, size=1000)


class TestReading:
    """Checks of a run on a prepared corpus."""

    def prepared(self, text, out, *changes, recipe=None):
        recipe = recipe or lm_recipe(text)
        prepare(parsed(recipe, *changes), out, workers=1)
        return {**recipe, "data": {"train": str(out)}}

    def opened(self, recipe, *changes):
        run = parsed(recipe, *changes)
        task = make_task(run.model_copy(update={"task": resolve_task_config(run.data, make_task(run))}))
        return pack_split(run.data, "train", task, fit_tokenizer(run.tokenizer, run.data, task))

    def test_the_tokenizer_is_that_of_the_corpus(self, text, out):
        recipe = self.prepared(text, out)
        run = parsed(recipe)
        assert vocabulary(fit_tokenizer(run.tokenizer, run.data, make_task(run))) == read_manifest(out).vocabulary
        with pytest.raises(ConfigError, match="tokenizer.lowercase: .*corpus was prepared with False, but it is True"):
            self.opened(recipe, "tokenizer.lowercase=true")
        with pytest.raises(ConfigError, match="data.documents: .*corpus was prepared with 'lines', but it is 'blank'"):
            self.opened(recipe, "data.documents=blank")

    def test_what_changes_no_item_may_change(self, text, out):
        recipe = self.prepared(text, out)
        want = self.opened(recipe)[0].digest
        for change in (
            "task.bptt=8",
            "data.max_length=16",
            "model.width=32",
            "task.sequences=windows",
            "data.workers=1",
        ):
            assert self.opened(recipe, change)[0].digest == want

    def test_a_recipe_that_makes_other_items_is_refused(self, text, out):
        recipe = self.prepared(text, out)
        for change in ("task.sequences=documents", "model.direction=both"):
            with pytest.raises(ConfigError, match="task: .*corpus was prepared in another way"):
                self.opened(recipe, change)
        with pytest.raises(ConfigError, match="task.name: .*corpus was prepared for 'lm', but it is 'classify' here"):
            self.opened(recipe, "task={name: classify}")

    def test_another_limit_is_refused_only_where_it_matters(self, text, out):
        recipe = self.prepared(text, out, "task.sequences=documents")
        longest = read_manifest(out).splits["train"].longest
        same = self.opened(recipe, "task.sequences=documents", f"data.max_length={longest}", "data.truncation=cut")
        assert same[0].digest == open_split(out, "train").digest
        with pytest.raises(ConfigError, match=f"data.max_length: .*sequences of up to {longest} tokens"):
            self.opened(recipe, "task.sequences=documents", f"data.max_length={longest - 1}", "data.truncation=cut")

    def test_labels_and_weights_are_those_of_the_text(self, tmp_path, out):
        recipe = tasks(tmp_path)["classify"]
        whole = resolve_task_config(parsed(recipe).data, make_task(parsed(recipe)))
        changes = ("data.max_length=4", "data.truncation=cut")
        recipe = self.prepared(None, out, recipe=recipe)
        run = parsed(recipe, *changes)
        assert resolve_task_config(run.data, make_task(run)) == whole
        assert whole.labels == ("a", "b")
        own = parsed(recipe, *changes, "task.weights={a: 2.0}")
        assert resolve_task_config(own.data, make_task(own)).weights == {"a": 2.0}
        with pytest.raises(ConfigError, match="another way"):
            self.opened(recipe, *changes, "task.labels=[b, a]")

    def test_what_the_texts_are_needed_for_is_told(self, text, tmp_path, out):
        recipe = tasks(tmp_path)["classify"]
        prepare(parsed(recipe, "task.weights=null"), out, workers=1)
        run = parsed(recipe, f"data.train={out}", f"data.valid={out}")
        with pytest.raises(ConfigError, match="data.train: .*corpus is prepared: it has tokens, but not the texts"):
            resolve_task_config(run.data, make_task(run))
        with pytest.raises(ConfigError, match="data.valid: .*corpus is prepared"):
            read_evaluation_data(run.data, "valid", make_task(run))
        with pytest.raises(ConfigError, match="data.train: .*corpus is prepared already; give the text itself"):
            prepare(run, tmp_path / "again", workers=1)


def test_a_folder_with_other_things_is_left_alone(text, out):
    out.mkdir()
    (out / "thesis.tex").write_text("do not touch")
    with pytest.raises(ConfigError, match="holds other things, such as thesis.tex"):
        prepare(parsed(lm_recipe(text)), out)
    assert sorted(path.name for path in out.iterdir()) == ["lock", "thesis.tex"]


def test_two_cannot_prepare_one_folder(text, out, monkeypatch):
    monkeypatch.setattr(build, "LOCK_TIMEOUT", 0.1)
    with build._locked(out), pytest.raises(DataError, match="another process is preparing it"):
        prepare(parsed(lm_recipe(text)), out)


def test_a_folder_that_cannot_be_written_is_told(text, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="file/corpus: cannot be written: Not a directory"):
        prepare(parsed(lm_recipe(text)), tmp_path / "file" / "corpus")


def test_numbers_beyond_the_vocabulary_make_the_ids_wide(tmp_path, out):
    rows = [("a " * 2**16, "long", "b"), ("a", "short", "b")]
    recipe = {**tasks(tmp_path)["classify"], "data": {"train": write(tmp_path / "long.tsv", rows), "max_length": 2**17}}
    run = parsed(recipe)
    prepare(run, out, workers=1)
    found = open_split(out, "train", 1)
    assert found.ids.dtype == np.int32  # not for the ids, but for where a pair begins
    same(found, packed(run)[0])


@pytest.mark.parametrize(("words", "dtype"), [(2**16 - 4, np.uint16), (2**16 - 3, np.int32)])
def test_a_vocabulary_below_65536_has_ids_of_sixteen_bits(tmp_path, out, words, dtype):
    path = tmp_path / "words.txt"
    path.write_text("\n".join(" ".join(f"w{n}" for n in range(start, words, 100)) for start in range(100)))
    run = parsed(lm_recipe(path), "tokenizer={name: words, size: 100000}")
    prepare(run, out, workers=1)
    found = open_split(out, "train")
    assert found.ids.dtype == dtype
    assert int(found.ids.max()) == words + 2  # with the three specials


def test_words_of_a_file_of_vectors_are_known_to_the_corpus(text, tmp_path, out):
    vectors = tmp_path / "vectors.txt"
    vectors.write_text("".join(f"{word} 1 2\n" for word in ("weft", "warp", "loom")))
    recipe = {**lm_recipe(text), "tokenizer": {"name": "words"}}
    recipe["model"] = {"name": "rnn", "width": 8, "embedding": 2, "vectors": str(vectors)}
    prepare(parsed(recipe), out, workers=1)
    weft.train(recipe, [f"data.train={out}"], tmp_path / "run")
    vectors.write_text("".join(f"{word} 1 2\n" for word in ("weft", "spool")))
    with pytest.raises(DataError, match="prepared with another tokenizer than the run's"):
        weft.train(recipe, [f"data.train={out}"], tmp_path / "other")


def test_memory_holds_a_block_of_text_not_all(tmp_path, monkeypatch):
    path = tmp_path / "text.txt"
    path.write_text("\n".join(" ".join(lines(20, seed)) for seed in range(400)))
    run = parsed(lm_recipe(path))

    def peak(out):
        tracemalloc.start()
        prepare(run, out, workers=1)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    monkeypatch.setattr(corpus_workers, "BLOCK", 1 << 14)
    monkeypatch.setattr("weft.data.corpus.merge.FLUSH", 1 << 14)
    monkeypatch.setattr("weft.data.corpus.merge._CHUNK", 1 << 14)
    small = peak(tmp_path / "small")
    monkeypatch.setattr(corpus_workers, "BLOCK", 1 << 30)
    monkeypatch.setattr(corpus_workers, "ENCODE_CHUNK", 1 << 30)
    assert small < 4 * path.stat().st_size < peak(tmp_path / "large")


def test_a_worker_that_is_killed_is_told(text, out, monkeypatch):
    monkeypatch.setattr(corpus_workers, "make_part", lambda *given: os._exit(9))
    with pytest.raises(DataError, match="a worker process was killed, perhaps for want of memory"):
        prepare(parsed(lm_recipe(text)), out, workers=2, size=1000)


def test_where_processes_cannot_be_forked_a_worker_gets_all_it_needs(text, out):
    run = parsed(lm_recipe(text))
    tokenizer = fit_tokenizer(run.tokenizer, run.data, make_task(run))
    plan = PartitionPlan(origins=(), parts=partition_source(run.data.train, run.data, 3000))
    job = Job(run, "train", out, plan, tokenizer)
    out.mkdir()
    sent = ForkingPickler.loads(ForkingPickler.dumps(job))
    manifest = [make_part(one, make_task(run), 1) for one in (job, sent)]
    assert manifest[0] == manifest[1]
    assert manifest[0].documents > 10


def test_the_manifest_says_what_was_read(text, out):
    prepare(parsed(lm_recipe(text)), out, workers=1)
    raw = json.loads((out / "corpus.json").read_text())
    (origin,) = raw["splits"]["train"]["origins"]
    assert origin == {"path": str(text), "size": text.stat().st_size, "modified": text.stat().st_mtime_ns}
    assert raw["splits"]["train"]["bytes"] == text.stat().st_size - 400
    assert np.load(out / "train" / "ids.npy", mmap_mode="r").dtype == NARROW
