"""Presets, the sizes of models: what a recipe says itself wins, and a run has the values, not the preset's name."""

import pytest
import torch

import weft
from weft.config.recipes import expand_preset, preset_names, read_preset, read_recipe
from weft.config.run import Run
from weft.config.yaml import read_yaml
from weft.errors import ConfigError
from weft.registry import resolve

BASE = read_preset("transformer-base")


def parsed(model):
    return Run.parse({**read_recipe("dates"), "model": model})


def test_a_preset_comes_first_and_what_is_said_wins():
    assert expand_preset({"name": "transformer", "preset": "transformer-base", "layers": 3}) == {**BASE, "layers": 3}
    assert expand_preset({"preset": "transformer-base"}) == BASE
    assert expand_preset({"layers": 3, "preset": "transformer-base"})["layers"] == 3, "in whatever order it is said"


@pytest.mark.parametrize(
    "model", [{"name": "seq2seq", "width": 8}, {"name": "x:Y"}, None, "transformer", {}, ["preset"]]
)
def test_a_section_without_a_preset_stays_as_it_is(model):
    assert expand_preset(model) == model


def test_an_override_sets_a_preset_and_takes_it_away():
    raw = read_recipe("dates", ["model={name: transformer, width: 32, heads: 4}", "model.preset=transformer-big"])
    run = Run.parse(raw)
    assert (run.model.width, run.model.heads, run.model.ffn_width) == (32, 4, 4096)
    run = Run.parse(read_recipe(raw, ["model.preset=null"]))
    assert (run.model.width, run.model.ffn_width) == (32, 2048)


def test_what_was_given_is_not_changed():
    model = {"preset": "transformer-base", "layers": 3}
    parsed(model)
    assert model == {"preset": "transformer-base", "layers": 3}


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            {"preset": "transformer-bas"},
            r"model.preset: there is no preset 'transformer-bas'; did you mean 'transformer-b",
        ),
        (
            {"preset": "colossal"},
            r"model.preset: there is no preset 'colossal'; known: .*transformer-base, transformer-big",
        ),
        ({"preset": 3}, r"model.preset: there is no preset 3; known: "),
        ({"preset": ["transformer-base"]}, r"model.preset: there is no preset \['transformer-base'\]"),
        ({"preset": "../recipes/dates"}, r"model.preset: there is no preset '../recipes/dates'"),
        (
            {"name": "seq2seq", "preset": "transformer-base"},
            r"model.preset: 'transformer-base' is a size of 'transformer', but model.name is 'seq2seq' instead",
        ),
        ({"preset": "transformer-base", "layesr": 3}, r"model.layesr: unknown key; did you mean 'layers'"),
        ({"preset": "transformer-base", "heads": 7}, r"model.heads must divide model.width: got 7 and 512"),
        ({"preset": None}, r"model.name: must say which model"),
        ({**BASE, "preset": "transformer-big"}, r"model.preset: the recipe sets every key of 'transformer-big' itself"),
    ],
)
def test_mistakes_are_named(model, said):
    with pytest.raises(ConfigError, match=said):
        parsed(model)


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_read_by_its_model(name):
    run = parsed({"preset": name})
    assert run.model.model_dump(include=set(read_preset(name))) == read_preset(name)
    assert "preset" not in run.dump()["model"]


def test_the_recipe_of_a_run_has_the_values(recipe, tmp_path):
    small = {"width": 16, "heads": 2, "ffn_width": 16, "layers": 1}
    weft.train({**recipe, "model": {"preset": "transformer-base", **small}}, ["train.steps=1"], tmp_path / "run")
    for place in ("run.yaml", "best/run.yaml"):
        model = read_yaml((tmp_path / "run" / place).read_text(), place)["model"]
        assert model == {**model, **BASE, **small}
        assert "preset" not in model


def transformer_numbers(vocab, width, hidden, layers):
    """Count by the paper: projections and feed-forward layers with their biases, norms; one matrix of embeddings."""
    attention, norm = 4 * (width * width + width), 2 * width
    forward = width * hidden + hidden + hidden * width + width
    encoder = attention + norm + forward + norm
    decoder = 2 * (attention + norm) + forward + norm
    return vocab * width + layers * (encoder + decoder)


@pytest.mark.parametrize(("name", "millions", "off"), [("transformer-base", 65, 0.04), ("transformer-big", 213, 0.01)])
def test_sizes_are_the_papers(name, millions, off):
    """Vaswani et al. 2017, table 3, with their shared vocabulary of about 37,000 (section 5.1)."""
    config = parsed({"preset": name}).model
    with torch.device("meta"):
        model = resolve("model", "transformer")(config, 37_000)
    numbers = sum(parameter.numel() for parameter in model.parameters())
    assert numbers == transformer_numbers(37_000, config.width, config.ffn_width, config.layers)
    assert numbers == pytest.approx(millions * 1e6, rel=off)
    untied = transformer_numbers(2 * 37_000, config.width, config.ffn_width, config.layers)
    assert untied != pytest.approx(millions * 1e6, rel=off), "the bound must tell one matrix from two"


@pytest.mark.parametrize(
    ("name", "vocab", "numbers"),
    [
        ("gpt", 40_478, 116_534_784),
        ("gpt2", 50_257, 124_439_808),
        ("gpt2-medium", 50_257, 354_823_168),
        ("gpt2-large", 50_257, 774_030_080),
        ("gpt2-xl", 50_257, 1_557_611_200),
    ],
)
def test_the_sizes_of_gpt_are_those_of_the_published_weights(name, vocab, numbers):
    config = parsed({"preset": name}).model
    with torch.device("meta"):
        model = resolve("model", "gpt")(config, vocab)
    assert sum(parameter.numel() for parameter in model.parameters()) == numbers
