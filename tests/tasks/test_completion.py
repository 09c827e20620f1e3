"""Completion of a knowledge base: prompts, the loss of objects alone, answers with scores, and what is new in them."""

import json
import math

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import weft
from weft.cli.main import app
from weft.config.recipes import read_recipe
from weft.config.run import Run
from weft.data.truncation import TruncationPolicy
from weft.errors import ConfigError, RoleError
from weft.tasks.completion import CompletionExample
from weft.tasks.factory import build, make_task
from weft.tasks.prepare import fit_tokenizer

LIMIT = TruncationPolicy(64, "error")
KNOWN = [
    (subject, relation, f"{subject[::-1]}{tail}")
    for subject in ("pen", "dog", "cup", "hat")
    for relation, tail in (("UsedFor", " work"), ("AtLocation", " home"))
]
BODIES = {
    "gpt": {"name": "gpt", "width": 32, "heads": 2, "layers": 1, "max_positions": 64, "dropout": 0.0},
    "rnn": {"name": "rnn", "width": 16},
    "transformer-xl": {"name": "transformer-xl", "width": 16, "heads": 2, "layers": 1, "ffn_width": 16, "mem_len": 64},
}


def recipe_for(folder, body="gpt", **train):
    path = folder / "kb.tsv"
    path.write_text("".join(f"{relation}\t{subject}\t{tail}\n" for subject, relation, tail in KNOWN))
    return {
        "task": {"name": "complete", "decode": {"max_length": 12}},
        "data": {"train": str(path), "columns": {"relation": 0, "subject": 1, "object": 2}},
        "tokenizer": {"name": "bytes"},
        "model": BODIES[body],
        "train": {"steps": 1, **train},
    }


def build_task(folder, body="gpt"):
    run = Run.parse(recipe_for(folder, body))
    torch.manual_seed(0)
    task, head = build(run, fit_tokenizer(run.tokenizer, run.data, make_task(run)))
    return task, head.double().eval()


def example(subject="pen", relation="UsedFor", tail="nep work"):
    return CompletionExample(subject=subject, relation=relation, object=tail)


def test_a_relation_is_read_as_words():
    assert example(relation="HasLastSubevent").text == "pen has last subevent"
    assert example("a b", "is near").text == "a b is near"


@torch.no_grad()
@pytest.mark.parametrize("body", BODIES)
def test_the_loss_is_that_of_the_object_and_its_end_alone(body, tmp_path):
    """Section 3.2, equation 5, one tuple at a time; the negative control: the prompt's tokens would add to it."""
    task, head = build_task(tmp_path, body)
    examples = [example(), example("cup", "AtLocation", "x"), example("dog", "UsedFor", "god work")]
    items = [task.encode(one, task.tokenizer, LIMIT)[0] for one in examples]
    batch = task.collate(items, np.random.default_rng(0))
    expected, whole = 0.0, 0.0
    for one in examples:
        prompt, written = task.tokenizer.ids([one.text, f" {one.object}"])
        ids = torch.tensor([task.tokenizer.specials.bos, *prompt, *written, task.tokenizer.specials.eos])
        read = task.collate([(ids[:-1].numpy(), ids[-1:].numpy())], np.random.default_rng(0)).tokens
        log_probs = head.body.logits(read).log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        expected -= float(log_probs[len(prompt) :].sum())
        whole -= float(log_probs.sum())
    sums, _ = head(batch)
    assert float(sums["tokens"]) == pytest.approx(expected, rel=1e-12)
    assert float(sums["tokens"]) < whole - 1
    assert batch.counts == {"tokens": sum(len(f" {one.object}") + 1 for one in examples)}


def test_it_is_generated_from_the_prompt_alone(tmp_path):
    task, head = build_task(tmp_path)
    ((prompt, written),) = task.encode(task.without_labels(example()), task.tokenizer, LIMIT)
    assert written.tolist() == [task.tokenizer.specials.eos]
    item = task.encode(example(), task.tokenizer, LIMIT)[0]
    for each in ((prompt, written), item):
        tokens, source = head.generator_inputs(task.collate([each], np.random.default_rng(0)))
        assert (tokens.ids.tolist(), source) == (prompt.tolist(), None)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kb")
    recipe = recipe_for(folder, steps=70, lr=1e-2, batch_tokens=512, save_every=70)
    return folder, weft.train(recipe, out=folder / "run")


def test_it_learns_tuples_and_measures_them(trained):
    folder, pipeline = trained
    metrics = pipeline.evaluate(str(folder / "kb.tsv"))
    assert metrics["perplexity"] == pytest.approx(math.exp(metrics["loss"]))
    assert metrics["exact_match"] == 1
    assert metrics["bleu2"] == pytest.approx(100)
    assert metrics["novel_tuples"] == metrics["novel_objects"] == metrics["unique_novel_objects"] == 0


def test_a_file_of_subjects_and_relations_is_completed(trained):
    folder, _ = trained
    (folder / "questions.tsv").write_text("UsedFor\tdog\nAtLocation\that\n")
    options = ["--set", "beam=3", "--set", "num_return_sequences=2", "--json"]
    result = CliRunner().invoke(
        app, ["predict", str(folder / "run"), "--file", str(folder / "questions.tsv"), *options]
    )
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    assert [answer["text"] for answer in answers] == ["god work", "tah home"]
    for answer in answers:
        best, second = answer["candidates"]
        assert best["score"] > second["score"]
        assert best["text"] != second["text"]


def test_objects_are_sampled_too_and_streamed(trained):
    _, pipeline = trained
    question = {"subject": "cup", "relation": "UsedFor"}
    (answer,) = pipeline([question], {"sample": True, "num_return_sequences": 3, "seed": 1})
    assert len(answer["candidates"]) == 3
    assert "".join(pipeline.stream(question)).strip() == "puc work"


def test_what_is_new_is_counted_as_in_the_paper(tmp_path):
    """N/T sro and N/T o of the generated tuples, one for each question, N/U o of the different objects."""
    task, _ = build_task(tmp_path)
    rows = [
        (example(tail="gold"), "nep work"),  # known
        (example(tail="other"), "nep work"),  # the same question: it counts once
        (example("dog"), "nep work"),  # a new tuple of a known object
        (example("cup"), "new"),
        (example("hat"), "new"),
    ]
    scores = task.score([{"text": text} for _, text in rows], [one for one, _ in rows])
    assert scores["novel_tuples"] == 3 / 4
    assert scores["novel_objects"] == 2 / 4
    assert scores["unique_novel_objects"] == 1 / 2
    assert scores["exact_match"] == 1 / 4  # the one of `dog`
    answers = [{"text": text, "score": -1.0} for _, text in rows]
    errors = task.errors(answers, [one for one, _ in rows])
    assert [error and error.gold for error in errors] == ["gold", "other", None, "nep work", "nep work"]


def test_without_the_training_data_novelty_is_left_out(tmp_path):
    task, _ = build_task(tmp_path)
    (tmp_path / "kb.tsv").unlink()
    assert task.score([{"text": "x"}], [example()]).keys() == {"exact_match", "bleu2"}


def test_what_is_of_translate_alone_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"task\.prefix: is of the task 'translate'"):
        make_task(Run.parse(read_recipe(recipe_for(tmp_path), {"task.prefix": "2en"})))


def test_a_model_that_does_not_generate_is_refused(tmp_path):
    with pytest.raises(RoleError, match="task 'complete' needs a model that scores and generates"):
        make_task(Run.parse({**recipe_for(tmp_path), "model": {"name": "cnn"}}))
