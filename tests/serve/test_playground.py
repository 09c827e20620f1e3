"""The page at / in a real browser: each task's form, as text alone, with no complaint and no request elsewhere."""

import json
import re
from urllib.parse import urlencode

import pytest
from tests.serve.conftest import running

import weft
from tiny_runs import RECIPES, write_data
from weft.serve.app import STATIC

PHONE = (390, 800)
LABEL = "<b id=taken>short</b>"  # an answer that would be an element, were it not shown as text
INPUTS = {
    "mlm": {"text": "the weft crosses [MASK] warp"},
    "classify": {"text": "the weft"},
    "tag": {"text": "the weft crosses 東京"},
    "span": {"question": "what follows weft", "passage": "🧵 weft <i>crosses</i> the red warp"},
    "choice": {"text": "weft", "choices": ["under", "<i>red</i>"]},
    "electra": {"text": "the weft crosses"},
    "skipgram": {"text": "weft"},
    "lm": {"text": "the weft"},
    "contrastive": {"text": "the weft", "pair": "the warp"},
}
NAMES = {"lm": "gpt lm", "skipgram": "word2vec skipgram"}  # recipes; the others are BERT's


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory, reverser):
    """Return a model of every task, each trained for some steps."""
    folder = tmp_path_factory.mktemp("playground")
    write_data(folder)
    labels = folder / "labels.tsv"
    labels.write_text(labels.read_text(encoding="utf-8").replace("\tshort", f"\t{LABEL}"), encoding="utf-8")
    trained = {"translate": reverser, "other": reverser}
    for task in INPUTS:
        recipe = RECIPES[NAMES.get(task, f"bert {task}")]
        data = folder / recipe["data"]["train"]
        changes = [f"data.train={data}", f"data.valid={data}", "train.steps=2", "task.decode.max_length=12"]
        trained[task] = weft.train(recipe, changes[: 4 if task == "lm" else 3], folder / task)
    return trained


@pytest.fixture(scope="module")
def served(pipelines):
    with running(pipelines) as client:
        yield client


def open_page(tab, client, model, width=1200, height=900, dark=False, **parts):
    tab.open("about:blank")  # or a page that is shown already would only be told of another hash
    tab.open(f"{client.base_url}#{urlencode({'model': model, **parts})}", width, height, dark)
    answered(tab)


def answered(tab):
    tab.until("document.querySelector('#results').ariaBusy === 'false'")


def shown(tab, selector="#results"):
    return tab.run(f"document.querySelector({json.dumps(selector)}).innerText")


def fields(example):
    return {f"in.{name}": "\n".join(value) if isinstance(value, list) else value for name, value in example.items()}


def quiet(tab, client):
    """Return whether nothing was complained of and nothing asked of another server."""
    return tab.complaints == [] and all(url.startswith(str(client.base_url)) for url in tab.asked_for)


def expected(task, answer):
    """Return texts of an answer that the page must show."""
    texts = {
        "mlm": lambda: [fill["token"] for fill in answer["fills"][0]],
        "classify": lambda: answer["scores"],
        "tag": lambda: [*answer["words"], *answer["tags"]],
        "span": lambda: [answer["answer"]],
        "choice": lambda: INPUTS["choice"]["choices"],
        "electra": lambda: [token.replace(" ", "␣") for token in answer["tokens"]],
        "skipgram": lambda: [word for word, _ in answer["neighbours"]],
        "lm": lambda: ["expected", "surprising", "12 tokens"],
        "contrastive": lambda: [str(answer["score"])],
    }
    return texts[task]()


@pytest.mark.parametrize("task", INPUTS)
def test_each_task_has_a_form_and_shows_its_answer(task, tab, served, pipelines):
    open_page(tab, served, task, mode="predict", **fields(INPUTS[task]))
    text = shown(tab)
    for part in expected(task, pipelines[task](INPUTS[task])[0]):
        assert part in text
    assert quiet(tab, served)
    check_with_axe(tab)


def check_with_axe(tab):
    """Check the page for what is serious, and its colours in the dark, too."""
    assert tab.violations() == []
    tab.dark(True)
    tab.settle()
    assert tab.violations("color-contrast") == []


def test_a_translation_with_its_candidates_and_its_alignment(tab, served, reverser):
    open_page(tab, served, "translate", **{"in.text": "abcde", "option.beam": 3})
    answer = reverser("abcde", {"beam": 3, "num_return_sequences": 3})[0]
    rows = tab.run("[...document.querySelectorAll('.bars .name')].map((name) => name.textContent)")
    assert rows == [candidate["text"] for candidate in answer["candidates"]]
    assert shown(tab, ".answer-text") == answer["text"]
    weights = reverser.attention("abcde").weights
    cells = tab.run("[...document.querySelectorAll('td.weight')].map((cell) => Number(cell.textContent))")
    assert cells == pytest.approx([*weights.flatten()], abs=6e-4)
    assert quiet(tab, served)


def test_answers_are_text_and_never_elements(tab, served):
    open_page(tab, served, "classify", **fields(INPUTS["classify"]))
    taken = "document.getElementById('taken') !== null"
    assert LABEL in shown(tab)
    assert not tab.run(taken)
    tab.run(f"document.querySelector('.answer-text').innerHTML = {json.dumps(LABEL)}")
    assert tab.run(taken)  # it would be noticed
    open_page(tab, served, "span", **fields(INPUTS["span"]))
    assert "<i>crosses</i>" in shown(tab)  # the passage, around the answer
    assert not tab.run("document.querySelector('#results i') !== null")


def test_the_answer_is_marked_where_the_offsets_say(tab, served, pipelines):
    open_page(tab, served, "span", **fields(INPUTS["span"]))
    answer = pipelines["span"](INPUTS["span"])[0]
    assert shown(tab, "mark") == answer["answer"]
    before = tab.run("document.querySelector('mark').previousSibling.textContent")
    assert before == INPUTS["span"]["passage"][: answer["start"]]  # after an emoji, which JavaScript counts twice


def test_a_continuation_has_a_shade_for_each_token(tab, served):
    open_page(tab, served, "lm", **fields(INPUTS["lm"]), **{"option.max_length": 5, "option.sample": False})
    answer = served.post(
        "/v1/completions", json={"model": "lm", "prompt": "the weft", "max_tokens": 5, "temperature": 0}
    )
    assert shown(tab, ".written") == "the weft" + answer.json()["choices"][0]["text"]
    tokens = "[...document.querySelectorAll('.written .token')]"
    assert tab.run(f"{tokens}.length") == 5
    assert tab.run(f"{tokens}.every((token) => Number(token.style.getPropertyValue('--share')) > 0)")
    assert quiet(tab, served)


def test_similarities_are_cosines(tab, served, pipelines):
    texts = ["the weft", "the warp", "a red loom"]
    open_page(tab, served, "contrastive", mode="embed", **{"in.texts": "\n".join(texts)})
    vectors = pipelines["contrastive"].embed(texts, normalize=True)
    cells = tab.run("[...document.querySelectorAll('.matrix tbody td')].map((cell) => Number(cell.textContent))")
    assert cells == pytest.approx([*(vectors @ vectors.T).flatten()], abs=6e-3)
    assert quiet(tab, served)


def test_two_models_side_by_side(tab, served):
    open_page(tab, served, "translate", **{"with": "other", "in.text": "abcde"})
    titles = tab.run("[...document.querySelectorAll('.who')].map((title) => title.textContent)")
    assert titles == ["translate", "other"]
    tops = "[...document.querySelectorAll('.answer-text')].map((answer) => answer.getBoundingClientRect().top)"
    first, second = tab.run(tops)
    assert first == second
    assert "classify" not in tab.run("document.querySelector('#other').textContent")  # it does another task


def test_the_attention_of_any_head_is_explored_with_the_keys(tab, served, pipelines):
    open_page(tab, served, "mlm", mode="attention", **fields(INPUTS["mlm"]))
    last = pipelines["mlm"].attention(INPUTS["mlm"]).views[1]
    tab.run("document.querySelector('.heads button[tabindex=\"0\"]').focus()")
    tab.press("ArrowRight", "ArrowDown", "Enter")
    tab.settle()
    tab.press("ArrowRight")
    weight = f"{last.rows[0]} ← {last.columns[1]} {last.weights[1, 0, 1]:.3f}"
    assert shown(tab, ".tip") == weight
    assert quiet(tab, served)


def test_words_show_what_they_attend_to(tab, served, pipelines):
    open_page(tab, served, "classify", **fields(INPUTS["classify"]))
    view = pipelines["classify"].attention(INPUTS["classify"]).views[-1]
    names = "[...document.querySelectorAll('.words button')].map((word) => word.ariaLabel)"
    for row in (0, 1):
        weights = view.weights.mean(0)[row]
        numbers = [float(name.rsplit(" ", 1)[1]) for name in tab.run(names)]
        assert numbers == pytest.approx([*weights], abs=6e-4)
        tab.run("document.querySelector('.words button').focus()")
        tab.press("ArrowRight")


def test_examples_are_clicked_and_the_address_can_be_shared(tab, served):
    open_page(tab, served, "classify")
    tab.run("document.querySelectorAll('#examples button')[1].click()")
    answered(tab)
    address, text = tab.run("[location.href, document.querySelector('#results').innerText]")
    assert "It+broke" in address
    tab.open("about:blank")
    tab.open(address)
    answered(tab)
    assert shown(tab) == text
    model = "document.querySelector('#model')"
    tab.run(f"{model}.value = 'tag'; {model}.dispatchEvent(new Event('change'))")
    answered(tab)
    assert "Paris" in shown(tab)
    tab.run("history.back()")
    tab.until("document.querySelector('#model').value === 'classify'")
    answered(tab)
    assert shown(tab) == text
    assert quiet(tab, served)


def best(pipeline, text):
    """Return the translation that the page shows: that of a beam of 4."""
    return pipeline(text, {"beam": 4})[0]["text"]


def test_keys_alone_ask_again(tab, served, reverser):
    open_page(tab, served, "translate", **{"in.text": "abcde"})
    tab.run("const area = document.querySelector('textarea'); area.focus(); area.select()")
    tab.ask("Input.insertText", text="fedcb")
    tab.ask("Input.dispatchKeyEvent", type="keyDown", key="Enter", code="Enter", windowsVirtualKeyCode=13, modifiers=2)
    tab.until("location.hash.includes('fedcb')")
    answered(tab)
    assert shown(tab, ".answer-text") == best(reverser, "fedcb") != best(reverser, "abcde")


def test_what_runs_can_be_stopped(tab, served):
    open_page(tab, served, "lm", **fields(INPUTS["lm"]))
    tab.run("const button = document.querySelector('#run'); button.click(); button.click()")
    answered(tab)
    assert shown(tab, "#status") == "Stopped"
    tab.run("document.querySelector('#run').click()")
    answered(tab)
    assert shown(tab, "#status").startswith("Answered in ")


def test_what_is_wrong_is_said_in_place(tab, served):
    example = {"text": "weft", "choices": ["under"]}
    open_page(tab, served, "choice", **fields(example))
    answer = served.post("/v1/models/choice/predict", json=example)
    assert answer.status_code == 422
    assert shown(tab, ".error") == answer.json()["error"]["message"]


@pytest.mark.parametrize("model", ["translate", "mlm", "contrastive"])
def test_a_phone_in_the_dark(tab, served, model):
    open_page(tab, served, model, *PHONE, dark=True)
    assert tab.run("document.documentElement.scrollWidth") <= PHONE[0]
    assert tab.run("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 28)"


VIEWS = {  # besides those of each task
    "mlm attention": {"model": "mlm", "mode": "attention", **fields(INPUTS["mlm"])},
    "embed": {"model": "contrastive", "mode": "embed", "in.texts": "the weft\nthe warp"},
    "side by side": {"model": "translate", "with": "other", "in.text": "abcde"},
}


@pytest.mark.parametrize("view", VIEWS)
def test_axe_finds_nothing_serious(view, tab, served):
    open_page(tab, served, **VIEWS[view])
    check_with_axe(tab)


def test_axe_would_find_it(tab, served):
    open_page(tab, served, "classify", *PHONE)
    assert tab.violations() == []
    tab.run("document.querySelector('textarea').id = ''")
    tab.run("document.querySelector('#playground label').style.color = '#ccc'")
    assert {line.split(":")[0] for line in tab.violations()} >= {"label", "color-contrast"}
    assert {line.split(":")[0] for line in tab.violations("color-contrast")} == {"color-contrast"}


def test_the_page_asks_for_the_token(tab, reverser):
    with running({"translate": reverser}, token="0123456789abcdef") as client:
        tab.open(f"{client.base_url}#in.text=abcde")
        tab.until("!document.querySelector('#token').hidden")
        assert tab.run("document.querySelector('#playground').hidden")
        tab.ask("Input.insertText", text="fedcba9876543210")
        tab.press("Enter")
        tab.until("document.querySelector('#problem').innerText === 'The token is wrong.'")
        tab.run("document.querySelector('#secret').select()")
        tab.ask("Input.insertText", text="0123456789abcdef")  # the field has the focus
        tab.press("Enter")
        answered(tab)
        assert shown(tab, ".answer-text") == best(reverser, "abcde")


def test_nothing_is_inline_and_nothing_comes_from_elsewhere():
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*src=)|https?:", page)
    for script in STATIC.glob("*.js"):
        assert not re.search(
            r"innerHTML|insertAdjacentHTML|\beval\(|document\.write", script.read_text(encoding="utf-8")
        )
