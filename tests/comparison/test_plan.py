"""What is compared: variants, budgets, seeds; and what is refused before anything is trained."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import weft
from weft.comparison.plan import Budget, check_same_task, make_plan, read_plan, variants
from weft.config.recipes import read_recipe, recipe_names
from weft.config.run import Run
from weft.formats.pretrained import read_run
from weft.tasks.factory import make_task


def write(folder, name, recipe, **sections):
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps({**recipe, **sections}))
    return path


@given(st.integers(1, 10**9))
def test_a_budget_of_steps_may_name_them(steps):
    plain, named = Budget.parse(steps), Budget.parse(f"{steps}steps")
    assert (plain.key, plain.value) == (named.key, named.value) == ("steps", steps)


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [("60s", "time", "60s"), ("1.5h", "time", "1.5h"), ("1e15flops", "flops", 1e15), ("2e3steps", "steps", 2000)],
)
def test_a_budget_has_a_unit(text, key, value):
    budget = Budget.parse(text)
    assert (budget.key, budget.value, budget.text) == (key, value, text)
    limits = budget.overrides(False, {})
    assert {name: limit for name, limit in limits.items() if limit is not None} == {f"train.{key}": value}


@pytest.mark.parametrize("budget", ["0", "0s", "0flops", "0.0m", "1e400flops"])
def test_what_is_no_budget_is_refused(budget):
    with pytest.raises(
        weft.ConfigError, match=f"--budget: must be more than 0 and finite, such as 60s, but is '{budget}'"
    ):
        Budget.parse(budget)


@pytest.mark.parametrize("budget", ["soon", "10x", "1e15", "-3", "", "5 hours"])
def test_a_budget_of_no_known_unit_is_named_by_its_option(budget):
    with pytest.raises(weft.ConfigError, match="--budget: must be such as 60s, 5m, 2000steps or 1e15flops, but is"):
        Budget.parse(budget)


def test_a_fitted_model_keeps_its_passes_and_is_stopped_by_time_alone():
    for budget, steps, seconds in (("500", 1, None), ("1e9flops", 1, None), ("30s", 1, 30.0)):
        plan = make_plan(["pydoc-ngram"], budget, (), 1, False)
        (entry,) = plan.entries
        assert (entry.kind, entry.run.train.steps, entry.run.train.time) == ("fitted", steps, seconds)
        assert entry.run.train.flops is None


@pytest.mark.parametrize(
    ("listed", "names"),
    [
        ({"fixed": {"model.attention": "none"}, "plain": {}}, {"fixed": ("none", 16), "plain": ("additive", 16)}),
        (["model.attention=none", "model.attention=dot model.width=8"], {"none": ("none", 16), "dot-8": ("dot", 8)}),
        ([{"model.attention": "none"}], {"none": ("none", 16)}),
        (
            {"model.attention": ["none", "dot"], "model.width": [8, 16]},
            {"none-8": ("none", 8), "none-16": ("none", 16), "dot-8": ("dot", 8), "dot-16": ("dot", 16)},
        ),
        ({"small": {"model": {"name": "seq2seq", "width": 4}}}, {"small": ("additive", 4)}),
    ],
)
def test_a_recipe_lists_variants(recipe, tmp_path, listed, names):
    plan = make_plan([write(tmp_path, "several", recipe, compare=listed)], "2", (), 1, False)
    models = {entry.name: (entry.run.model.attention, entry.run.model.width) for entry in plan.entries}
    assert models == names


def test_a_section_with_a_name_replaces_and_other_keys_change(recipe, tmp_path):
    transformer = {"name": "transformer", "width": 8, "heads": 2, "layers": 1}
    listed = {"t": {"model": transformer, "train": {"lr": 0.5}}, "d": {"recipe": "dates-fixed"}}
    raws = dict(variants(write(tmp_path, "several", recipe, compare=listed)))
    assert raws["t"]["model"] == transformer
    assert raws["t"]["train"] == {**recipe["train"], "lr": 0.5}
    assert raws["d"] == read_recipe("dates-fixed")


@pytest.mark.parametrize(
    ("listed", "said"),
    [
        ([], "must list variants"),
        ({}, "must list variants"),
        ("gru", "must list variants"),
        (["gru"], "an override is key=value"),
        ({"a": 3}, "compare.a: must have overrides"),
        ({"../a": {}}, "names a folder"),
        ({"a": {}, "A": {}}, "needs recipes with different names"),
    ],
)
def test_what_is_no_list_of_variants_is_refused(recipe, tmp_path, listed, said):
    with pytest.raises(weft.ConfigError, match=said):
        make_plan([write(tmp_path, "several", recipe, compare=listed)], "2", (), 1, False)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model.atention": "none"}, "bad: model.atention: unknown key; did you mean 'attention'"),
        (["model.width=wide"], "bad: model.width: "),
        ({"recipe": "nowhere.yaml"}, "bad: .*nowhere.yaml"),
    ],
)
def test_an_error_in_a_variant_names_it(recipe, tmp_path, changes, said):
    listed = {"good": {}, "bad": changes}
    with pytest.raises(weft.ConfigError, match=f"^{said}"):
        make_plan([write(tmp_path, "several", recipe, compare=listed)], "2", (), 1, False)


def test_a_plan_is_read_as_it_was_written(recipe, tmp_path):
    plan = make_plan([write(tmp_path, "a", recipe), write(tmp_path, "b", recipe)], "2", ["train.seed=5"], 3, False)
    plan.write(tmp_path / "out")
    assert read_plan(tmp_path / "out") == plan.__class__(list(plan.entries), plan.budget, [5, 6, 7])
    assert [str(plan.folder(*job)) for job in plan.jobs()][:2] == ["a/seed-5", "a/seed-6"]


def test_recipes_must_have_the_same_task_and_data(recipe, tmp_path):
    first = write(tmp_path, "a", recipe)
    for name, changed, said in (
        ("task", {"task": {"name": "translate", "label_smoothing": 0.1}}, "task.label_smoothing is 0.0 in a and 0.1"),
        ("data", {"data": {**recipe["data"], "max_length": 77}}, "data.max_length is 1024 in a and 77 in data; set it"),
        (
            "other",
            {"task": {"name": "lm"}, "model": {"name": "rnn"}},
            "task.name is 'translate' in a and 'lm' in other;",
        ),
        (
            "both",
            {"data": {**recipe["data"], "max_length": 77, "truncation": "cut"}},
            "max_length is 1024 in a and 77 in both .data.truncation differ as well.",
        ),
    ):
        with pytest.raises(weft.ConfigError, match=f"must have the same task and data, .*but .*{said}"):
            make_plan([first, write(tmp_path, name, recipe, **changed)], "2", (), 1, False)


def test_metrics_batches_and_tokens_must_be_comparable(recipe, tmp_path):
    train = recipe["train"]
    first = write(tmp_path, "a", recipe)
    by_bleu = write(tmp_path, "bleu", recipe, train={**train, "metric": "bleu"})
    with pytest.raises(weft.ConfigError, match=r"train.metric, which is exact_match in a and bleu in bleu"):
        make_plan([first, by_bleu], "2", (), 1, False)
    larger = write(tmp_path, "larger", recipe, train={**train, "batch_tokens": 400})
    with pytest.raises(weft.ConfigError, match=r"200 tokens in a and 400 tokens in larger: set it to one value"):
        make_plan([first, larger], "2", (), 1, False)
    assert len(make_plan([first, larger], "2s", (), 1, False).entries) == 2, "their time is the same"
    said = "perplexity, which counts tokens, .*, but tokenizer.size is 1500 in pydoc-lstm and 2000 in pydoc-gpt"
    with pytest.raises(weft.ConfigError, match=said):
        make_plan(["pydoc-lstm", "pydoc-gpt"], "2s", ["train.metric=perplexity"], 1, False)
    plan = make_plan(["pydoc-lstm", "pydoc-gpt"], "2s", (), 1, False)
    assert plan.metric(make_task(plan.entries[0].run)) == "bits_per_byte"
    with pytest.raises(weft.ConfigError, match="--seeds: must be from 1 to 100, but is 0"):
        make_plan([first], "2", (), 0, False)


def test_weights_may_set_the_length_of_sequences_unless_that_drops_examples(recipe, tmp_path):
    recipe["model"] = {"name": "transformer", "width": 8, "heads": 2, "layers": 1, "ffn_width": 8}
    recipe["model"] |= {"positions": "learned", "max_positions": 40}
    recipe["task"]["decode"] = {"max_length": 20}
    weft.train(recipe, ["train.steps=1"], tmp_path / "weights")
    runs = [read_run(recipe), read_run(recipe, [f"model.weights={tmp_path / 'weights'}"])]
    assert [run.data.max_length for run in runs] == [1024, 39]
    check_same_task(dict(zip("ab", runs, strict=True)))
    check_same_task(dict(zip("ab", reversed(runs), strict=True)))
    drops = [run.model_copy(update={"data": run.data.model_copy(update={"truncation": "drop"})}) for run in runs]
    with pytest.raises(weft.ConfigError, match="data.max_length is 1024 in a and 39 in b"):
        check_same_task(dict(zip("ab", drops, strict=True)))


def test_a_heads_dropout_is_no_difference_of_the_task():
    runs = {name: Run.parse(read_recipe("langid", {"task.dropout": rate})) for name, rate in (("a", 0.1), ("b", 0.5))}
    assert runs["a"].task != runs["b"].task
    check_same_task(runs)
    with pytest.raises(weft.ConfigError, match="but task.label_smoothing is 0.0 in a and 0.2 in c"):
        check_same_task({**runs, "c": Run.parse(read_recipe("langid", {"task.label_smoothing": 0.2}))})


def test_names_must_differ(recipe, tmp_path):
    (tmp_path / "other").mkdir()
    twice = [write(tmp_path, "a", recipe), write(tmp_path / "other", "a", recipe)]
    with pytest.raises(weft.ConfigError, match="needs recipes with different names, but got a, a"):
        make_plan(twice, "2", (), 1, False)
    with pytest.raises(weft.ConfigError, match="different names, but got none"):
        make_plan([], "2", (), 1, False)


def test_all_recipes_are_checked(recipe, tmp_path):
    good, bad = write(tmp_path, "good", recipe), write(tmp_path, "bad", recipe, model={"name": "seq2sec"})
    with pytest.raises(weft.ConfigError, match="did you mean 'seq2seq'"):
        make_plan([good, bad], "2", (), 1, False)
    del recipe["data"]["valid"]
    with pytest.raises(weft.ConfigError, match=r"need data.test or data.valid"):
        make_plan([write(tmp_path, "blind", recipe)], "2", (), 1, False)


@pytest.mark.parametrize("name", [name for name in recipe_names() if name.startswith("compare-")])
def test_every_comparison_that_ships_can_be_made(name):
    plan = make_plan([name], "60s", (), 1, True)
    kinds = [entry.kind for entry in plan.entries]
    assert kinds.count("trained") >= 2
    assert ("baseline" in kinds) == (plan.entries[0].run.task.name == "classify")
