"""Files of a look, by their ending; and the command that writes them."""

import json
import re
import sys

import numpy as np
import pytest
from tests.conftest import recipe_for, reversed_pairs, write_pairs

import weft
from weft.analysis.attention import Attention, View
from weft.analysis.gradient_flow import GradientNorms
from weft.analysis.render.export import TextGradients, check_writable, render_attention, render_gradients, write_file
from weft.cli import main as cli
from weft.errors import ConfigError

WORDS = [word for word, _ in reversed_pairs()]
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Return what runs `weft look` in this process and in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["weft", "look", *map(str, arguments)])
        monkeypatch.setattr(sys, "path", list(sys.path))
        with pytest.raises(SystemExit) as end:
            cli.main()
        output = capsys.readouterr()
        return end.value.code or 0, output.out, output.err

    return command


def embedded_data(page):
    """Return the JSON data of each figure of a page."""
    return [json.loads(script) for script in re.findall(r'<script type="application/json">(.*?)</script>', page)]


def example(text="a b", answer="x y"):
    return Attention(text, {"text": answer}, answer, [View("cross", 0, [0], np.eye(2)[None], ["x", "y"], ["a", "b"])])


def quiet(notice):
    raise AssertionError(notice)


# Files.


def test_a_page_has_a_section_for_each_text():
    page = render_attention(
        [example("first"), example("second", "zweite")], ".html", "weft look: m", "about", quiet
    ).decode()
    assert re.findall(r"<h2[^>]*>(.*?)</h2>", page) == ["first", "second"]
    assert page.count('<div class="plot map"') == 2
    assert '<p class="answer" dir="auto">zweite</p>' in page
    assert "<title>weft look: m</title>" in page


def test_a_long_text_is_headed_by_its_beginning():
    text = " ".join(f"word{i}" for i in range(60))
    page = render_attention([example(text)], ".html", "t", "", quiet).decode()
    (heading,) = re.findall(r"<h2[^>]*>(.*?)</h2>", page)
    assert heading.startswith("word0 word1 ")
    assert len(heading) <= 90
    assert f'<p dir="auto">{text}</p>' in page


def test_data_of_one_text_are_an_object_and_of_several_a_list():
    data = json.loads(render_attention([example()], ".json", "t", "", quiet))
    assert data == example().to_dict()
    assert json.loads(render_attention([example(), example("c")], ".json", "t", "", quiet)) == [
        data,
        example("c").to_dict(),
    ]


def test_a_picture_is_a_png():
    assert render_attention([example()], ".png", "t", "", quiet).startswith(PNG)


REACHED = TextGradients(
    "a b",
    [
        GradientNorms("elman", "source", ["a", "b"], [1e-9, 1.0]),
        GradientNorms("elman", "target", ["x"], [2.0]),
        GradientNorms("lstm", "source", ["a", "b"], [0.1, 0.9]),
    ],
)


def test_gradients_have_a_chart_for_each_side_with_a_line_for_each_model():
    page = render_gradients([REACHED], ".html", "t", "", quiet).decode()
    source, target = (
        json.loads(script) for script in re.findall(r'<script type="application/json">(.*?)</script>', page)
    )
    assert [line["name"] for line in source["series"]] == ["elman", "lstm"]
    assert [line["name"] for line in target["series"]] == ["elman"]
    assert [label for _, label in source["stops"]] == ["steps back 0: b", "steps back 1: a"]
    assert "<td>1e-09</td>" in page.replace(' class="number"', "")


def test_models_that_read_different_tokens_have_no_names_in_common():
    found = TextGradients(
        "a b", [GradientNorms("one", "text", ["a", "b"], [1, 2]), GradientNorms("two", "text", ["a b"], [1])]
    )
    page = render_gradients([found], ".html", "t", "", quiet).decode()
    data = json.loads(re.search(r'<script type="application/json">(.*?)</script>', page)[1])
    assert [label for _, label in data["stops"]] == ["steps back 0", "steps back 1"]


def test_gradients_are_data_and_a_picture_too():
    found = json.loads(render_gradients([REACHED], ".json", "t", "", quiet))
    assert found["gradients"][0] == {"model": "elman", "side": "source", "tokens": ["a", "b"], "norms": [1e-09, 1.0]}
    assert len(found["gradients"]) == 3
    assert render_gradients([REACHED], ".png", "t", "", quiet).startswith(PNG)


@pytest.mark.parametrize("name", ["look.pdf", "look", "look.HTML", ".png"])
def test_another_ending_is_refused(name, tmp_path):
    with pytest.raises(ConfigError, match=r"--out: must end in \.html, \.png, \.json, but is"):
        check_writable(tmp_path / name)
    for good in ("a.html", "b.png", "c.json"):
        check_writable(tmp_path / good)


def test_a_folder_is_no_file(tmp_path):
    (tmp_path / "look.html").mkdir()
    with pytest.raises(ConfigError, match="must be a file, but .*look.html' is a folder"):
        check_writable(tmp_path / "look.html")


def test_without_matplotlib_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'weft\[plot\]'"):
        check_writable(tmp_path / "look.png")
    check_writable(tmp_path / "look.html")


def test_what_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_file(tmp_path / "file" / "look.html", b"")
    write_file(tmp_path / "new" / "look.html", b"x")
    assert (tmp_path / "new" / "look.html").read_bytes() == b"x"


def test_a_place_that_cannot_be_written_is_found_at_once(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    (tmp_path / "lost").symlink_to(tmp_path / "nowhere")
    for place in ("file", "lost"):
        with pytest.raises(ConfigError, match=f"look.html cannot be written: .*{place} is not a folder"):
            check_writable(tmp_path / place / "deep" / "look.html")
    check_writable(tmp_path / "new" / "deep" / "look.html")
    assert not (tmp_path / "new").exists()
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(ConfigError, match=f"cannot be written: {tmp_path} is not writable"):
        check_writable(tmp_path / "new" / "look.html")


# The command.


def test_the_command_writes_a_page_a_picture_and_data(run, trained_run, tmp_path, reverser):
    assert run(trained_run, *WORDS[:2]) == (0, "look.html\n", "")
    page = (tmp_path / "look.html").read_text(encoding="utf-8")
    assert all(word in page and word[::-1] in page for word in WORDS[:2])
    assert reverser.about in page
    assert run(trained_run, WORDS[0], "-o", "deep/look.png") == (0, "deep/look.png\n", "")
    assert (tmp_path / "deep" / "look.png").read_bytes().startswith(PNG)
    assert run(trained_run, WORDS[0], "--out", "look.json", "--layers", "0", "--heads", "0")[0] == 0
    found = json.loads((tmp_path / "look.json").read_text(encoding="utf-8"))
    assert found == json.loads(json.dumps(reverser.attention(WORDS[0]).to_dict()))
    assert (found["text"], found["answer"]["text"]) == (WORDS[0], WORDS[0][::-1])
    np.testing.assert_allclose(np.sum(found["views"][0]["weights"], -1), 1, atol=1e-5)


@pytest.mark.parametrize(
    "arguments",
    [[], ["RUN"], ["attention"], ["positions", "RUN", "abc"], ["positions", "--layers", "0"], ["neighbours", "RUN"]],
)
def test_what_a_command_does_not_take_is_refused(run, trained_run, tmp_path, arguments):
    code, out, err = run(*(trained_run if word == "RUN" else word for word in arguments))
    assert code == 2
    assert re.search(r"Usage: .*weft look", err or out)
    assert not list(tmp_path.iterdir())


def test_gradients_of_models_beside_one_another(run, trained_run, tmp_path, reverser):
    copy = reverser.save(tmp_path / "copy")
    assert run("gradients", trained_run, WORDS[0], "--beside", copy, "-o", "look.json")[0] == 0
    found = json.loads((tmp_path / "look.json").read_text())["gradients"]
    assert [(one["model"], one["side"]) for one in found] == [
        ("run", "source"),
        ("run", "target"),
        ("copy", "source"),
        ("copy", "target"),
    ]
    assert found[0]["norms"] == pytest.approx(found[2]["norms"])
    assert found[0]["tokens"] == [*WORDS[0], "</s>"]
    assert found[1]["tokens"] == ["<s>", *WORDS[0][::-1]]


def test_gradients_of_fresh_cells_need_no_model(run, tmp_path):
    assert run("gradients") == (0, "look.html\n", "")
    page = (tmp_path / "look.html").read_text(encoding="utf-8")
    assert all(cell in page for cell in ("elman", "jordan", "lstm", "peephole", "gru"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gradients", "RUN"], "look gradients: needs a TEXT for"),
        (["gradients", "--beside", "RUN"], "--beside: needs a MODEL"),
        (["RUN", "abc", "-o", "look.pdf"], "--out: must end in"),
        (["attention", "RUN", "abc", "-o", "look.pdf"], "--out: must end in"),
        (["RUN", "abc", "--layers", "0-2"], "--layers: must be comma-separated numbers, such as 0,2, but is '0-2'"),
        (["RUN", "abc", "--layers", "1,7"], "layers: none of [1, 7] has attention to look at"),
        (["RUN", "abc", "--heads", "1"], "heads: the model's attention has no heads"),
        (["RUN", "abc", "--heads", "0,3"], "heads: the model's attention has no heads, but [0, 3] are requested"),
        (["RUN", "abc", "--layers", "0,7"], "layers: 7 has no attention to look at; layers are counted from 0"),
        (["gradients", "RUN", "abc", "--beside", "RUN"], "--beside: RUN is given twice"),
        (["gradients", "RUN", "abc", *["--beside", "gone"] * 2], "--beside: gone is given twice"),
        (["gone", "abc"], "gone: does not exist"),
        (["RUN", "a" * 2000], "2,000 tokens"),
        (
            ["positions", "RUN"],
            "'seq2seq' has no position encodings to draw; give one that has, such as a transformer",
        ),
        (["RUN", "abc", "--gradients"], "--gradients: is a command now: weft look gradients MODEL TEXT"),
        (["--positions", "RUN"], "--positions: is a command now: weft look positions MODEL"),
        (["RUN", "--neighbours", "abc"], "--neighbours: is a command now: weft look neighbours MODEL TEXT"),
    ],
)
def test_a_mistake_is_said_in_one_line(run, trained_run, tmp_path, arguments, message):
    code, out, err = run(*(trained_run if word == "RUN" else word for word in arguments))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message.replace("RUN", str(trained_run)) in err
    assert not list(tmp_path.iterdir())


def test_a_model_without_attention_says_so(run, recipe, tmp_path):
    weft.train(recipe, ["train.steps=1", "model.attention=none"], tmp_path / "fixed")
    told = run(tmp_path / "fixed", "abc")[2]
    assert (
        "has no attention to look at; train it with model.attention, or see its gradients: weft look gradients" in told
    )
    assert run("gradients", tmp_path / "fixed", "abc")[0] == 0


# A Transformer: three places, every layer and head.

TINY = {"name": "transformer", "width": 16, "heads": 4, "layers": 2, "ffn_width": 16}


def transformer_run(folder, changes=(), **model):
    recipe = recipe_for(write_pairs(folder / "pairs.tsv")) | {"model": TINY | model}
    decode = ["task.decode.max_length=7", "train.steps=2", "train.report_every=2"]
    weft.train(recipe, [*decode, *changes], folder / "transformer")
    return folder / "transformer"


@pytest.fixture(scope="module")
def attending(tmp_path_factory):
    return transformer_run(tmp_path_factory.mktemp("attending"))


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def test_every_layer_and_head_of_a_transformer_is_seen_with_its_tokens(run, attending, tmp_path):
    assert run(attending, "abc", "-o", "look.json") == (0, "look.json\n", "")
    found = read(tmp_path / "look.json")
    views = {(view["place"], view["layer"]): view for view in found["views"]}
    assert set(views) == {(place, layer) for place in ("encoder", "decoder", "cross") for layer in (0, 1)}
    source, target = [*"abc", "</s>"], views["cross", 0]["rows"]
    for (place, _), view in views.items():
        rows, columns = {"encoder": (source, source), "cross": (target, source)}.get(
            place, (["<s>", *target[:-1]],) * 2
        )
        assert (view["heads"], view["rows"], view["columns"]) == ([0, 1, 2, 3], rows, columns)
        weights = np.array(view["weights"])
        np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
        ahead = np.triu(np.ones(weights.shape[1:]), 1) > 0
        assert (weights[:, ahead] == 0).all() == (place == "decoder"), "only the decoder may not look ahead"
    attention = weft.load(attending, "cpu").attention("abc")
    assert (attention.place, attention.source, attention.target) == ("cross, layer 0, head 0", source, target)


def test_a_transformer_is_one_page_and_one_picture(run, attending, tmp_path):
    assert run(attending, "abc", "fed") == (0, "look.html\n", "")
    page = (tmp_path / "look.html").read_text(encoding="utf-8")
    assert page.count('<div class="places">') == 2
    maps = [
        json.loads(script)["maps"] for script in re.findall(r'<script type="application/json">(.*?)</script>', page)
    ]
    assert maps == [[[layer, head] for layer in (0, 1) for head in range(4)]] * 6
    assert "Encoder: self-attention of the source." in page
    assert run(attending, "abc", "-o", "look.png") == (0, "look.png\n", "")


def test_layers_and_heads_of_a_transformer_are_chosen(run, attending, tmp_path):
    assert run(attending, "abc", "-o", "some.json", "--layers", "1", "--heads", "0,3")[0] == 0
    assert run(attending, "abc", "-o", "all.json")[0] == 0
    some, all_of_them = read(tmp_path / "some.json")["views"], read(tmp_path / "all.json")["views"]
    assert [(view["place"], view["layer"], view["heads"]) for view in some] == [
        (place, 1, [0, 3]) for place in ("encoder", "decoder", "cross")
    ]
    whole = {(view["place"], view["layer"]): view["weights"] for view in all_of_them}
    for view in some:
        assert view["weights"] == [whole[view["place"], 1][head] for head in (0, 3)]
    assert (
        "heads: the model has 4 heads, counted from 0, but [4] are asked for"
        in run(attending, "abc", "--heads", "4")[2]
    )


def test_heads_that_are_left_out_keep_their_numbers(run, tmp_path):
    off = {"0": [0], "cross.1": [1, 2]}
    folder = transformer_run(tmp_path, pruned_heads=off)
    for ending in ("json", "html", "png"):
        assert run(folder, "abc", "-o", f"look.{ending}")[0] == 0
    heads = {(view["place"], view["layer"]): view["heads"] for view in read(tmp_path / "look.json")["views"]}
    assert {key: found for key, found in heads.items() if key[0] == "cross"} == {
        ("cross", 0): [1, 2, 3],
        ("cross", 1): [0, 3],
    }
    assert heads["encoder", 0] == [1, 2, 3]
    assert run(folder, "abc", "-o", "look.json", "--heads", "1")[0] == 0
    views = read(tmp_path / "look.json")["views"]
    assert ("cross", 1) not in {(view["place"], view["layer"]) for view in views}
    assert all(view["heads"] == [1] for view in views)
    told = run(folder, "abc", "--layers", "0", "--heads", "0")
    assert "heads: [0] are pruned in all of these layers (model.pruned_heads)" in told[2]


def test_positions_of_a_model_and_of_none(run, attending, tmp_path):
    assert run("positions") == (0, "look.html\n", "")
    assert "sinusoidal: 100 positions, 128 wide" in (tmp_path / "look.html").read_text(encoding="utf-8")
    assert run("positions", attending, "-o", "positions.json") == (0, "positions.json\n", "")
    assert np.array(read(tmp_path / "positions.json")["vectors"]).shape == (100, 16)
    assert run("positions", attending, "-o", "positions.png")[0] == 0
    assert (tmp_path / "positions.png").read_bytes().startswith(PNG)
    learned = transformer_run(tmp_path, positions="learned", max_positions=40)
    assert run("positions", learned, "-o", "positions.json")[0] == 0
    table = weft.load(learned, "cpu").head.body.positions.table.weight.detach().numpy()
    np.testing.assert_allclose(read(tmp_path / "positions.json")["vectors"], table, atol=1e-6)
