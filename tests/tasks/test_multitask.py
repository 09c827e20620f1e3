"""Several tasks on one body: each as if it were alone, drawn in an order that resumes exactly, asked by its name."""

import json
import re
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import weft
from weft.checkpoint import contents
from weft.cli.main import main
from weft.config.recipes import read_recipe
from weft.config.run import Run
from weft.errors import ConfigError, DataError, RoleError
from weft.formats.pretrained import read_run
from weft.serve.models import load_models
from weft.tasks.evaluation import mean_loss
from weft.tasks.factory import build, make_task, resolve_run
from weft.tasks.prepare import fit_tokenizer
from weft.training.estimate import estimate_run
from weft.training.metric_ranking import ranking_key
from weft.training.reporting import read_metrics

CITIES, FOODS = ("oslo", "rome", "lima", "bern"), ("soup", "rice", "figs", "corn")


def write_rows(folder):
    """Write requests in parallel files: each line's words, its intent and its tags."""
    rng = np.random.default_rng(0)
    words, intents, tags = [], [], []
    for _ in range(60):
        city, food, travels = rng.choice(CITIES), rng.choice(FOODS), rng.random() < 0.5
        words.append(f"go to {city} now" if travels else f"eat {food}")
        intents.append("travel" if travels else "dine")
        tags.append("O O B-city O" if travels else "O B-food")
    for name, lines in (("words", words), ("intents", intents), ("tags", tags)):
        (folder / name).write_text("".join(f"{line}\n" for line in lines))


def joint(folder):
    sources = {split: [str(folder / "words"), str(folder / "intents")] for split in ("train", "valid")}
    tagged = {split: [str(folder / "words"), str(folder / "tags")] for split in ("train", "valid")}
    return {
        "tasks": {
            "intent": {"task": {"name": "classify"}, "data": {**sources, "columns": {"text": 0, "label": 1}}},
            "slots": {"task": {"name": "tag"}, "data": {**tagged, "columns": {"words": 0, "tags": 1}}},
        },
        "tokenizer": {"name": "words"},
        "model": {"name": "rnn", "cell": "gru", "direction": "both", "width": 16, "dropout": 0.1},
        "train": {"steps": 12, "batch_tokens": 60, "lr": 0.02, "report_every": 1, "eval_every": 100},
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("requests")
    write_rows(folder)
    return folder


@pytest.fixture
def recipe(folder):
    return joint(folder)


@pytest.fixture(scope="module")
def trained(folder):
    """Return the directory of a run that has learnt both tasks; not to be changed."""
    weft.train(joint(folder), ["train.steps=120", "train.report_every=20"], folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def pipeline(trained):
    return weft.load(trained, "cpu")


def test_both_tasks_are_learnt_and_asked_by_name(pipeline):
    assert pipeline.predict("go to rome now", task="intent")[0]["label"] == "travel"
    tags = pipeline({"words": ["eat", "figs"]}, task="slots")[0]["tags"]
    assert tags == ["O", "B-food"]
    metrics = pipeline.evaluate()
    assert metrics["intent/accuracy"] == metrics["slots/f1"] == metrics["mean"] == 1.0
    assert metrics["loss"] == pytest.approx(metrics["intent/loss"] + metrics["slots/loss"])
    assert pipeline.embed(["eat figs"]).shape == (1, 16)


def test_the_evaluations_of_the_training_are_those_of_the_pipeline(trained, pipeline):
    last = read_metrics(trained / "metrics.jsonl")[-1]["valid"]
    assert last == pytest.approx(pipeline.evaluate())
    assert ranking_key(pipeline.run, pipeline.task, last) == [-last["mean"], last["loss"]]
    by_one = pipeline.run.model_copy(update={"train": pipeline.run.train.model_copy(update={"metric": "slots/loss"})})
    assert ranking_key(by_one, pipeline.task, last)[0] == last["slots/loss"], "of a loss the lower is the better"


def test_a_task_of_several_is_the_same_alone(pipeline, recipe):
    """The same weights in a model of one task give the same losses and answers, to the bit."""
    slots = recipe.pop("tasks")["slots"]
    run = Run.parse({**recipe, **slots, "task": pipeline.run.for_task("slots").task.model_dump()})
    task, head = build(run, pipeline.tokenizer)
    own = pipeline.for_task("slots")
    contents.copy_into_head(head, {name: value.clone() for name, value in contents.weights(own.head).items()}, None)
    items = [task.encode(own.example({"words": ["eat", "rice"], "tags": ["O", "B-food"]}), task.tokenizer, LIMIT)[0]]
    batch = task.collate(items, np.random.default_rng(0))
    joined = pipeline.task.collate([(*item, np.array([1])) for item in items], np.random.default_rng(0))
    sums, joined_sums = head.eval()(batch)[0], pipeline.head(joined)[0]
    assert joined_sums == {"slots/words": sums["words"]}
    assert joined.counts == {"slots/words": batch.counts["words"]}
    assert head.flops(batch) == pipeline.head.flops(joined)
    wrong = pipeline.head(pipeline.task.collate([(*CLASSIFIED, np.array([0]))], np.random.default_rng(0)))[0]
    assert set(wrong) == {"intent/texts"}, "another number is another task"


LIMIT = weft.pipeline.TruncationPolicy(100, "error")
CLASSIFIED = (np.array([0, 5, 1]), np.array([], int), np.array([1]))


def test_a_resume_is_exact(recipe, tmp_path):
    """Batches of both tasks come in the order of an unbroken run, to the bit, across the end of an epoch."""
    weft.train(recipe, ["task.temperature=3"], tmp_path / "whole")
    weft.train(recipe, ["task.temperature=3", "train.steps=5"], tmp_path / "parts")
    weft.train(recipe, ["task.temperature=3"], tmp_path / "parts", resume=True)
    rows, others = (read_metrics(tmp_path / name / "metrics.jsonl") for name in NAMES)
    assert rows[-1]["epoch"] > rows[4]["epoch"]
    assert [row["loss"] for row in rows] == [row["loss"] for row in others]
    weights = [load_file(tmp_path / name / "last" / "model.safetensors") for name in NAMES]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    moments = [load_file(tmp_path / name / "last" / "state" / "optimizer.safetensors") for name in NAMES]
    assert all(torch.equal(moments[0][key], moments[1][key]) for key in moments[0])
    with pytest.raises(weft.CheckpointError, match="task.temperature was 3.0 and is 1.0 now"):
        weft.train(recipe, ["train.steps=20"], tmp_path / "parts", resume=True)


NAMES = ("whole", "parts")


def test_each_weight_is_saved_once(trained):
    names = set(load_file(trained / "best" / "model.safetensors"))
    assert {"heads.intent.output.weight", "heads.slots.output.weight"} < names
    assert all(name.startswith("body.") or ".body." not in name for name in names)


def test_one_task_can_be_saved_alone(pipeline, tmp_path):
    alone = weft.load(pipeline.for_task("intent").save(tmp_path / "intent"), "cpu")
    assert alone.run.task.name == "classify"
    assert alone.predict("eat soup") == pipeline.predict("eat soup", task="intent")
    with pytest.raises(ConfigError, match="task: 'intent' is named, but this model has one task alone"):
        alone.predict("eat soup", task="intent")


def test_a_body_of_several_tasks_starts_another_training(trained, recipe, tmp_path):
    recipe |= {"task": recipe.pop("tasks")["intent"]["task"], "data": joint(trained.parent)["tasks"]["intent"]["data"]}
    del recipe["tokenizer"]
    recipe |= {"model": {"weights": str(trained)}, "train": {"steps": 1, "lr": 1e-9}}
    tuned, weights = weft.train(recipe, out=tmp_path / "run").head, load_file(trained / "best" / "model.safetensors")
    assert torch.allclose(tuned.body.embed.weight, weights["body.embed.weight"], atol=1e-6)
    assert not torch.allclose(tuned.output.weight, weights["heads.intent.output.weight"], atol=1e-2)


def test_what_is_asked_without_a_task_is_refused(pipeline):
    for ask in (
        lambda: pipeline("eat soup"),
        lambda: list(pipeline.answers(["eat soup"])),
        lambda: pipeline.attention("eat soup"),
        lambda: pipeline.evaluate("rows.tsv"),
        lambda: pipeline.evaluate_in_detail(errors=True),
    ):
        with pytest.raises(ConfigError, match="task: this model has several, intent, slots; name one: task='intent'"):
            ask()
    with pytest.raises(ConfigError, match="the model has none called 'slot'; did you mean 'slots'"):
        pipeline.predict("eat soup", task="slot")


def test_the_server_has_a_model_for_each_task(trained):
    served = load_models([f"asked={trained}"], "cpu", trust=False, precision="fp32")
    assert {name: model.pipeline.run.task.name for name, model in served.items()} == {
        "asked.intent": "classify",
        "asked.slots": "tag",
    }
    assert len({id(model.pipeline.head.body) for model in served.values()}) == 1, "the body is in memory once"


def test_the_pooler_stays_while_one_task_uses_it(recipe):
    recipe["model"] = {"name": "bert", "width": 8, "heads": 2, "layers": 1, "max_positions": 32}
    for changes, has_pooler in ([], True), (["tasks.intent=null"], False):
        run = Run.parse(read_recipe(recipe, changes))
        task = make_task(run)
        run = resolve_run(run, task)
        _, head = build(run, fit_tokenizer(run.tokenizer, run.data, task), task)
        assert (head.body.pooler is not None) == has_pooler


def test_a_language_model_beside_labels(recipe, folder, tmp_path):
    text = {"train": str(folder / "words"), "valid": str(folder / "words"), "format": "txt"}
    lm = {"task": {"name": "lm", "sequences": "documents"}, "data": text}
    recipe["tasks"] = {"intent": recipe["tasks"]["intent"], "text": lm}
    recipe["model"] = {"name": "gpt", "width": 16, "heads": 2, "layers": 1, "max_positions": 32}
    metrics = weft.train(recipe, ["data.max_length=30"], tmp_path / "run").evaluate()
    assert "mean" not in metrics, "of one the higher is better, of the other the lower"
    assert metrics["text/perplexity"] == pytest.approx(np.exp(metrics["text/loss"]))
    with pytest.raises(ConfigError, match=r"tasks.text.task.sequences: beside other tasks the data are read row by"):
        make_task(Run.parse(read_recipe(recipe, ["tasks.text.task.sequences=windows", "data.max_length=30"])))


def test_the_estimate_of_a_run_counts_all_tasks(recipe):
    estimate = estimate_run(Run.parse(recipe), lambda notice: None)
    assert estimate.items == 120
    assert estimate.evaluation > 0


def test_a_part_without_validation_data_is_left_out_of_it(recipe, tmp_path):
    del recipe["tasks"]["slots"]["data"]["valid"]
    metrics = weft.train(recipe, ["train.steps=2"], tmp_path / "run").evaluate()
    assert "intent/loss" in metrics
    assert not any(name.startswith("slots/") for name in metrics)


def test_a_recipe_of_tasks_comes_back_from_what_it_dumps(recipe):
    run = Run.parse({**recipe, "task": {"temperature": 2}, "data": {"max_length": 9, "workers": 1}})
    assert [data.max_length for data in run.data.tasks.values()] == [9, 9]
    assert Run.parse(json.loads(json.dumps(run.dump()))) == run
    assert Run.parse(run.dump(), trust=False).dump()["tasks"].keys() == {"intent", "slots"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("tasks=[a]", r"tasks: must be tasks by name, such as \{intent: .* but is \['a'\] instead"),
        ("tasks.slots.dat={}", "tasks.slots.dat: unknown key; did you mean 'data'"),
        ("tasks.slots.task.crff=true", "tasks.slots.task.crff: unknown key; did you mean 'crf'"),
        ("tasks.slots.task.name=tagg", "tasks.slots.task.name: there is no task 'tagg'; did you mean 'tag'"),
        ("tasks.slots.task={}", r"tasks.slots.task.name: must say which task"),
        ("tasks.slots.data={}", "tasks.slots.data: must say where the examples come from"),
        ("tasks.slots.data.max_length=x", "tasks.slots.data.max_length: should be a valid integer"),
        ("tasks.slots.data.workers=2", "tasks.slots.data.workers: collate the batches of all tasks"),
        ("tasks.slots.task={name: multitask}", "tasks.slots.task.name: several tasks are given by name in tasks"),
        ("tasks=null", "task.name: must say which task"),
        ("tasks.a b={}", "tasks: 'a b': the name of a task is of letters"),
        ("tasks.slots=3", "tasks.slots: must have a task and its data, but is 3 instead"),
        ("task={name: tag}", "task: .* stands beside tasks, which have their own"),
        ("task.temperature=0.5", "task.temperature: should be greater than or equal to 1, but is 0.5"),
        ("task.temprature=2", "task.temprature: unknown key; did you mean 'temperature'"),
        ("data=3", "data: must be a section, but is 3 instead"),
        ("taks={}", "taks: not a section of a recipe; did you mean 'task"),
        ("train.metric=slots/f2", "tasks.slots: train.metric: the task has no metric 'f2'; known: accuracy, f1"),
        ("train.metric=slot/f1", "train.metric: the task has no metric 'slot/f1'; did you mean 'slots/f1'"),
        ("tasks.slots.data.truncation=window", None),
        ("tasks.intent.data.truncation=window", "tasks.intent.data.truncation: task 'classify' cannot use 'window'"),
    ],
)
def test_mistakes_in_a_recipe_are_named_with_their_place(recipe, changes, message):
    if message is None:
        make_task(Run.parse(read_recipe(recipe, changes)))
        return
    with pytest.raises(ConfigError, match=f"^{message}"):
        make_task(Run.parse(read_recipe(recipe, changes)))


def test_a_task_that_the_body_cannot_do_is_refused_before_data_is_read(recipe):
    recipe["tasks"]["french"] = {"task": {"name": "translate"}, "data": {"train": "there-is-no-such-file.tsv"}}
    with pytest.raises(RoleError, match="^tasks.french: model.name: task 'translate' needs a model that"):
        make_task(Run.parse(recipe))
    named = {**recipe, "tasks": {"keys": recipe["tasks"]["intent"]}}
    with pytest.raises(ConfigError, match="tasks.keys: the name has another meaning"):
        make_task(Run.parse(named))
    ngram = {**recipe, "tasks": {"text": {"task": {"name": "lm"}, "data": {"sample": "pydoc"}}}, "model": NGRAM}
    with pytest.raises(RoleError, match="'ngram' fits itself, to one task"):
        make_task(Run.parse(ngram))


NGRAM = {"name": "ngram"}


def test_an_error_of_the_data_names_the_task(recipe, tmp_path):
    tags = recipe["tasks"]["slots"]["data"]["train"]
    tags[1] = str(tmp_path / "none")
    with pytest.raises(DataError, match=r"^tasks.slots: .*none: there is no such file"):
        weft.train(recipe, out=tmp_path / "run")


def test_compare_and_prepare_take_one_task(folder, recipe, tmp_path):
    path = tmp_path / "joint.yaml"
    path.write_text(json.dumps(recipe))
    remedy = "give recipes with one task each; or train each by weft train, then weft evaluate RUN --task NAME"
    with pytest.raises(ConfigError, match=rf"compare: joint has several tasks \(.*\), and .* of one: {remedy}"):
        weft.compare([str(path)], 1, tmp_path / "out")
    from weft.tasks.corpus.build import prepare

    with pytest.raises(ConfigError, match="tasks: have data of their own"):
        prepare(read_run(recipe), tmp_path / "corpus")


def test_the_loss_of_several_is_the_sum_of_theirs(pipeline):
    own = {name: pipeline.for_task(name) for name in ("intent", "slots")}
    losses = {}
    for name, one in own.items():
        examples, _ = one._evaluation_data(None, None)
        losses[name] = mean_loss(one.task, one.head, examples.items)
    assert pipeline.evaluate()["loss"] == pytest.approx(sum(losses.values()))


# The commands.


@pytest.fixture
def command(monkeypatch, capsys):
    """Return what runs a command in this process: its exit code, its output and what it tells."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["weft", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        output = capsys.readouterr()
        return end.value.code or 0, output.out, output.err

    return run


def test_a_look_is_at_the_task_that_is_named(trained, pipeline, command, tmp_path):
    alone = pipeline.for_task("slots").save(tmp_path / "alone")
    asked = ("look", "gradients", trained, "eat figs", "--device", "cpu", "--out", tmp_path / "look.json")
    assert command(*asked, "--task", "slots")[0] == 0
    looked = json.loads((tmp_path / "look.json").read_text())
    assert command("look", "gradients", alone, *asked[3:])[0] == 0
    (own,), (other,) = (data["gradients"] for data in (looked, json.loads((tmp_path / "look.json").read_text())))
    assert own["norms"] == other["norms"]
    assert command(*asked, "--task", "intent")[0] == 0
    (intent,) = json.loads((tmp_path / "look.json").read_text())["gradients"]
    assert intent["norms"] != own["norms"], "the loss of another task has another gradient"
    assert command(*asked, "--task", "slots", "--beside", alone)[0] == 0, "a model of one task needs no name"
    assert len(json.loads((tmp_path / "look.json").read_text())["gradients"]) == 2


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (("look", "TRAINED", "eat figs"), "this model has several, intent, slots; name one: .* or --task intent"),
        (("look", "gradients", "TRAINED", "eat figs", "--task", "slot"), "none called 'slot'; did you mean 'slots'"),
        (("look", "neighbours", "TRAINED", "eat figs", "--word", "eat"), "this model has several, intent, slots"),
        (("convert", "TRAINED", "OUT"), "this model has several, intent, slots"),
        (("convert", "a.arpa", "OUT", "--task", "x"), "'x' is named, but an n-gram model has one task alone"),
        (("embed", "TRAINED", "eat figs", "--task", "intents"), "none called 'intents'; did you mean 'intent'"),
        (("layers", "TRAINED", "langid", "--task", "intents"), "none called 'intents'; did you mean 'intent'"),
    ],
)
def test_a_task_that_is_not_there_is_named_with_those_that_are(trained, command, tmp_path, asked, message):
    places = {"TRAINED": trained, "OUT": tmp_path / "out"}
    code, _, told = command(*(places.get(part, part) for part in asked))
    assert code == 2
    assert re.search(message, told)


def test_rows_are_embedded_as_the_first_task_reads_them_or_the_named_one(trained, pipeline, command, tmp_path):
    path = tmp_path / "rows.tsv"
    path.write_text("eat figs\tdine\n")
    _, vectors, _ = command("embed", trained, "-f", path, "--columns", "text=0", "--device", "cpu")
    expected = pipeline.embed(["eat figs"])[0]
    np.testing.assert_allclose(json.loads(vectors)["vector"], expected, atol=1e-5)
    path.write_text("O B-food\teat figs\n")
    _, vectors, _ = command("embed", trained, "-f", path, "--task", "slots", "--columns", "words=1", "--device", "cpu")
    np.testing.assert_allclose(json.loads(vectors)["vector"], expected, atol=1e-5)


def test_a_task_of_several_is_converted(recipe, command, tmp_path):
    model = {"name": "bert", "width": 16, "heads": 2, "layers": 1, "ffn_width": 16, "max_positions": 20}
    recipe |= {"model": model, "tokenizer": {"name": "wordpiece", "size": 200}, "train": {"steps": 1}}
    weft.train(recipe, out=tmp_path / "run")
    code, _, told = command("convert", tmp_path / "run", tmp_path / "hf", "--task", "intent")
    assert code == 0, told
    converted, whole = weft.load(tmp_path / "hf", "cpu"), weft.load(tmp_path / "run", "cpu")
    answers = (converted.predict("eat figs")[0]["scores"], whole.predict("eat figs", task="intent")[0]["scores"])
    assert answers[0] == pytest.approx(answers[1], abs=1e-5)
