"""Requests: an example as a text, its fields by name or its values in a tuple; the options of a call."""

import pytest

from weft.config.schema import Named
from weft.errors import ConfigError, DataError
from weft.registry import resolve
from weft.tasks.lm.head import ContinuationConfig
from weft.tasks.lm.task import LM, LMConfig
from weft.tasks.requests import check_overrides, is_single, parse_example, read_options
from weft.tasks.translate import Translate, TranslateConfig


def translate(**decode: object) -> Translate:
    return Translate(TranslateConfig.model_validate({"name": "translate", "decode": decode}))


def test_a_call_has_the_recipes_values_as_defaults():
    task = translate(beam=5, alpha=1.0, length_penalty="average")
    assert read_options(task, None) == task.options()
    assert read_options(task, {"max_length": 9}).model_dump() == {**task.options().model_dump(), "max_length": 9}


@pytest.mark.parametrize(
    ("recipe", "call"),
    [
        ({"beam": 5, "alpha": 1.0, "early_stopping": "first"}, {"beam": 1}),
        ({"sample": True, "temperature": 0.5, "seed": 3}, {"sample": False}),
        ({"sample": True, "temperature": 0.5}, {"sample": False, "beam": 2}),
        ({"alpha": 1.0}, {"beam": 2}),
        ({"top_k": 3}, {"sample": True}),
    ],
)
def test_a_call_does_not_answer_for_what_the_recipe_sets(recipe, call):
    assert read_options(translate(**recipe), call).model_dump(include=set(call)) == call


@pytest.mark.parametrize(
    ("recipe", "call", "message"),
    [
        ({}, {"temperature": 0.5}, "options.temperature: 0.5 has no effect: sample is false"),
        ({"beam": 5}, {"beam": 1, "alpha": 1.0}, "options.alpha: 1.0 has no effect"),
        ({"sample": True}, {"sample": False, "top_p": 0.5}, "options.top_p: 0.5 has no effect"),
        ({}, {"early_stopping": "first"}, "options.early_stopping: 'first' has no effect: beam is 1"),
    ],
)
def test_what_a_call_gives_in_vain_is_refused(recipe, call, message):
    with pytest.raises(ConfigError, match=message):
        read_options(translate(**recipe), call)


@pytest.mark.parametrize("override", ["task.decode.top_k=3", "task.decode={top_k: 3}"])
def test_overrides_in_vain_are_refused(override):
    with pytest.raises(ConfigError, match=r"task\.decode\.top_k: 3 has no effect: sample is false"):
        check_overrides(translate(top_k=3), ["train.lr=1", override])
    check_overrides(translate(top_k=3), ["task.decode.beam=2", "task.unknown=true"])
    check_overrides(translate(top_k=3, sample=True), [override])


def test_language_models_sample_unless_they_are_asked_not_to():
    task = LM(LMConfig(name="lm"))
    options = task.options()
    assert isinstance(options, ContinuationConfig)
    assert options.describe_sampling() == "temperature 0.7, top_p 0.95, seed 0"
    greedy = read_options(task, {"sample": False})
    assert (greedy.sample, greedy.temperature) == (False, 0.7)
    assert read_options(task, {"temperature": 0.5, "top_p": None}).describe_sampling() == "temperature 0.5, seed 0"
    with pytest.raises(ConfigError, match="sample needs beam: 1, but beam is 3"):
        read_options(task, {"beam": 3})
    assert read_options(task, {"beam": 3, "sample": False}).beam == 3
    saved = LMConfig.model_validate(LMConfig(name="lm", decode=ContinuationConfig(sample=False)).model_dump())
    LM(saved).options().check_effective("task.decode")
    assert isinstance(saved, Named)


def make(name, **settings):
    cls = resolve("task", name)
    return cls(cls.Config(name=name, **settings))


@pytest.mark.parametrize(
    ("task", "values", "fields"),
    [
        (make("classify"), ("a", "b"), {"text": "a", "pair": "b"}),
        (make("classify", multiple=True), ("a", "b"), {"text": "a", "pair": "b"}),
        (make("classify", regression=True), ("a",), {"text": "a"}),
        (make("span"), ("who?", "Ann."), {"question": "who?", "passage": "Ann."}),
        (make("choice"), ("a", ["b", "c"]), {"text": "a", "choices": ["b", "c"]}),
        (make("translate"), ("a",), {"text": "a"}),
        (make("tag"), ("Ann", "sings"), {"words": ["Ann", "sings"]}),
        (make("tag"), ["Ann", "sings", "on"], {"words": ["Ann", "sings", "on"]}),
    ],
)
def test_a_tuple_has_the_fields_in_their_order(task, values, fields):
    assert parse_example(task, values, 1) == task.Example(**fields)


@pytest.mark.parametrize(
    ("task", "values", "said"),
    [
        (make("span"), ("q", "p", "x"), "example 4: a tuple holds question, passage, but got 3 values"),
        (make("span"), ("q",), "example 4: passage: Field required"),
        (make("tag"), ("Ann", 3), "example 4: words.1: Input should be a valid string, but is 3"),
        (make("classify"), (), "example 4: text: Field required"),
    ],
)
def test_a_tuple_that_does_not_fit_is_refused(task, values, said):
    with pytest.raises(DataError, match=said):
        parse_example(task, values, 4)


def test_which_requests_are_one_example():
    span, classify = make("span"), make("classify")
    assert is_single(span, ("who?", "Ann."), pairs=False)
    assert is_single(classify, ("a", "b"), pairs=True)
    assert is_single(classify, "a", pairs=False)
    assert is_single(classify, {"text": "a"}, pairs=False)
    for several in (("a", "b"), ["a", "b"], [("a", "b")], ()):
        assert not is_single(classify, several, pairs=False)
    for several in (("a", "b", "c"), ["a", "b"], (("a", "b"), ("c", "d"))):
        assert not is_single(classify, several, pairs=True)
    assert not is_single(span, ('{"question": "q", "passage": "p"}', '{"question": "r", "passage": "p"}'), pairs=False)
