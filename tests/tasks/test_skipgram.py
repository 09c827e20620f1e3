"""The word-vector task: training items, answers, and word2vec under other tasks."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

import weft
from weft.cli.vectors import vectors_app
from weft.config.run import Run
from weft.data.truncation import TruncationPolicy
from weft.errors import ConfigError, DataError, RoleError
from weft.models.base import Role
from weft.tasks.factory import make_task
from weft.training.reporting import CheckpointSaved

RECIPE = {
    "task": {"name": "skipgram", "neighbours": 3},
    "tokenizer": {"name": "words", "min_count": 2},
    "model": {"name": "word2vec", "width": 16, "subsample": 0},
    "train": {"steps": 4, "lr": 0.05, "seed": 1, "deterministic": True, "device": "cpu"},
}
FARM, SEA = ["cow", "horse", "barn", "field", "goat", "hen"], ["ship", "sail", "wave", "port", "crew", "tide"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Sentences of the farm or of the sea, each with a word that stands nowhere else."""
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("corpus")
    for split, rows in (("train", 400), ("valid", 40)):
        lines = [" ".join([*rng.choice(FARM if row % 2 else SEA, 9), f"{split}{row}"]) for row in range(rows)]
        (folder / f"{split}.txt").write_text("\n".join(lines) + "\n")
    return folder


def recipe(corpus, **sections):
    data = {"train": str(corpus / "train.txt"), "valid": str(corpus / "valid.txt")}
    return {**RECIPE, "data": data, **sections}


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "skipgram"
    return weft.train(recipe(corpus), out=out), out


def test_neighbours_are_of_the_same_kind(trained):
    pipeline, _ = trained
    (answer,) = pipeline(["cow"])
    words = [word for word, _ in answer["neighbours"]]
    assert len(words) == 3
    assert set(words) < set(FARM) - {"cow"}
    cosines = [cosine for _, cosine in answer["neighbours"]]
    assert cosines == sorted(cosines, reverse=True)
    assert pipeline.task.format_answer(answer).startswith(f"{words[0]} {cosines[0]:.2f}, ")


def test_a_call_may_ask_for_more_and_for_several_words(trained):
    pipeline, _ = trained
    (answer,) = pipeline(["ship sail"], {"neighbours": 100})
    words = [word for word, _ in answer["neighbours"]]
    assert set(words) == {*FARM, *SEA} - {"ship", "sail"}  # neither special tokens nor the query words
    assert set(words[:4]) < set(SEA)


def test_an_unknown_word_has_no_neighbours(trained):
    with pytest.raises(DataError, match="nothing is left of it to answer"):
        trained[0](["zebra"])


def test_the_run_tells_of_each_pass_and_judges_by_the_loss(trained, corpus):
    pipeline, out = trained
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "tokens_per_s" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert steps[-1]["loss"] < steps[0]["loss"]
    metrics = pipeline.evaluate(corpus / "valid.txt")
    assert list(metrics) == ["loss"]
    assert metrics["loss"] < 4.1  # 6 log 2 where nothing is known
    again = weft.load(out).evaluate(corpus / "valid.txt")
    assert again == metrics


def test_a_run_with_one_thread_is_the_same_again_and_another_seed_another(trained, corpus, tmp_path):
    pipeline, _ = trained
    same = weft.train(recipe(corpus), out=tmp_path / "same")
    other = weft.train(recipe(corpus), ["train.seed=2"], out=tmp_path / "other")
    assert same(["cow"]) == pipeline(["cow"])
    assert other(["cow"]) != pipeline(["cow"])


class KilledError(Exception):
    pass


def test_a_run_gone_on_with_is_the_run(trained, corpus, tmp_path):
    class Kill:
        def __call__(self, record):
            if isinstance(record, CheckpointSaved) and record.step == 2:
                raise KilledError

        def close(self):
            pass

    with pytest.raises(KilledError):
        weft.train(recipe(corpus), out=tmp_path / "cut", report=Kill())
    assert weft.load(tmp_path / "cut" / "last")(["cow"]) != trained[0](["cow"])
    assert weft.train(recipe(corpus), out=tmp_path / "cut", resume=True)(["cow"]) == trained[0](["cow"])


def test_unknown_words_are_left_out_of_items(trained):
    task, tokenizer = trained[0].task, trained[0].tokenizer
    example = task.Example(text="cow zebra barn")
    ((item,),) = task.encode(example, tokenizer, TruncationPolicy(1, "error"))  # no text is too long
    assert [tokenizer.token(id) for id in item] == ["cow", "barn"]
    assert task.encode(task.Example(text="zebra"), tokenizer, TruncationPolicy(9, "error")) == []


def test_only_a_model_that_learns_by_itself_will_do(corpus):
    with pytest.raises(RoleError, match="needs a model that encodes and learns by itself; 'rnn'"):
        make_task(Run.parse(recipe(corpus, model={"name": "rnn", "width": 8})))


def test_a_language_model_needs_cbow(corpus):
    with pytest.raises(RoleError, match="it lacks 'scores'"):
        make_task(Run.parse(recipe(corpus, task={"name": "lm"})))
    make_task(Run.parse(recipe(corpus, task={"name": "lm"}, model={"name": "word2vec", "method": "cbow"})))


def test_cbow_is_judged_and_sampled_as_a_language_model(corpus, tmp_path):
    model = {"name": "word2vec", "method": "cbow", "context": "left", "width": 16, "subsample": 0}
    pipeline = weft.train(recipe(corpus, task={"name": "lm"}, model=model), out=tmp_path / "lm")
    metrics = pipeline.evaluate(corpus / "valid.txt")
    assert metrics["perplexity"] < 15  # 13 words and the end, all as likely: 14; half of them: 7
    (answer,) = pipeline(["cow horse barn"], {"max_length": 8, "sample": True, "seed": 3})
    assert set(answer["text"].split()) <= {*FARM, *SEA}


@pytest.mark.parametrize("task", ["classify", "tag"])
def test_it_is_a_body_for_labels_and_starts_from_vectors(trained, tmp_path, task):
    """There its vectors are trained by gradient, from those that were learnt without labels."""
    assert CliRunner().invoke(vectors_app, ["export", str(trained[1]), str(tmp_path / "v.txt")]).exit_code == 0
    if task == "classify":
        rows = [{"text": " ".join(words[:3]), "label": name} for name, words in (("farm", FARM), ("sea", SEA))]
        unseen, must = {"text": " ".join(FARM[3:])}, {"label": "farm"}
    else:
        rows = [{"words": words[:3], "tags": [name] * 3} for name, words in (("farm", FARM), ("sea", SEA))]
        unseen, must = {"words": FARM[3:]}, {"tags": ["farm"] * 3}
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run = {
        "task": {"name": task, "dropout": 0.0},
        "data": {"train": str(tmp_path / "rows.jsonl")},
        "tokenizer": {"name": "words"},
        "model": {"name": "word2vec", "width": 16, "vectors": str(tmp_path / "v.txt")},
        "train": {"steps": 40, "lr": 3e-2, "device": "cpu"},
    }
    pipeline = weft.train(run, out=tmp_path / "run")
    assert Role.SELF_FITTED not in pipeline.task.required_roles
    assert "body.output.weight" not in pipeline.head.state_dict()
    (answer,) = pipeline([unseen])  # words that only the vectors know
    assert {key: answer[key] for key in must} == must
    with pytest.raises(ConfigError, match="model.width is 8; set model.width: 16"):
        weft.train(run, ["model.width=8"], out=tmp_path / "narrow")
    with pytest.raises(ConfigError, match="is a directory; if it is a run's, write its vectors to a file"):
        weft.train(run, [f"model.vectors={trained[1]}"], out=tmp_path / "folder")


def test_a_metric_that_it_does_not_give_is_refused_before_it_is_fitted(corpus):
    raw = recipe(corpus, train={**RECIPE["train"], "metric": "perplexity"})
    with pytest.raises(ConfigError, match="train.metric: the task has no metric 'perplexity'; known: loss"):
        make_task(Run.parse(raw))
