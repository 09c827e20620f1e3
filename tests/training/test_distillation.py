"""A student against the formulas of what it learns from its teacher; nothing of the teacher changes or is saved."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.training.test_finetuning import losses, reviews, weights_at
from torch.nn import functional as F

import weft
from weft.config.sections import Distill
from weft.conversion.convert import convert
from weft.data.batching.loader import Loader
from weft.data.truncation import TruncationPolicy
from weft.formats.pretrained import open_model, read_run
from weft.registry import resolve
from weft.tasks.batch import IGNORE_INDEX, Batch
from weft.tasks.factory import build, make_task, resolve_run
from weft.tasks.lm.head import LMHead
from weft.tasks.prepare import fit_tokenizer, pack_split
from weft.tasks.qa.head import SpanHead
from weft.tokens import Tokens
from weft.training.distillation import Distillation, TaughtBatch, Teacher, make_distillation

LIMIT = TruncationPolicy(64, "error")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("distillation")


@pytest.fixture(scope="module")
def teacher(folder):
    """Return the directory of a trained bert; not to be changed."""
    weft.train(reviews(folder), ["train.steps=12"], folder / "teacher")
    return folder / "teacher"


def student(folder, teacher, model="bert", tokenizer=None, **distill):
    """Return the recipe of a student, by default of its teacher's kind and with its tokenizer."""
    recipe = reviews(folder, model, distill={"teacher": str(teacher), **distill})
    del recipe["tokenizer"]
    return recipe if tokenizer is None else {**recipe, "tokenizer": tokenizer}


def distillation_of(recipe, *overrides):
    """Return what a fresh student minimises, and a loader of its batches."""
    run = read_run(recipe, overrides)
    run = resolve_run(run, make_task(run))
    theirs = open_model(run.train.distill.teacher)[1].tokenizer
    own = run.tokenizer.name == "characters"
    torch.manual_seed(0)
    task, head = build(run, fit_tokenizer(run.tokenizer, run.data, make_task(run)) if own else theirs)
    packed, _ = pack_split(run.data, "train", task, task.tokenizer)
    loader = Loader(packed, task.collate, run.train.batch_tokens, 1)
    return make_distillation(run, task, head, packed, torch.device("cpu")), loader


def batches_of(distillation, loader, count=3):
    stream = loader.stream()
    return [distillation.attach(next(stream)).batch for _ in range(count)]


# The objective.


@pytest.mark.parametrize(("alpha", "temperature"), [(1.0, 1.0), (0.3, 4.0), (0.0, 2.0)])
def test_the_loss_is_hintons(folder, teacher, alpha, temperature):
    distillation, loader = distillation_of(student(folder, teacher, alpha=alpha, temperature=temperature))
    distillation.student.eval()
    taught = distillation.teacher.head
    for batch in batches_of(distillation, loader):
        logits, answers = distillation.student.read(batch)[0], taught.read(batch)[0]
        p, q = ((scores / temperature).softmax(-1) for scores in (answers, logits))
        soft = temperature**2 * (p * (p.log() - q.log())).sum()
        hard = F.cross_entropy(logits, batch.targets, reduction="sum")
        sums, _ = distillation(batch)
        assert list(sums) == list(batch.counts) == ["texts"]
        torch.testing.assert_close(sums["texts"], alpha * soft + (1 - alpha) * hard)


def test_a_student_that_is_its_teacher_has_nothing_to_learn_from_it(folder, teacher):
    recipe = student(folder, teacher, alpha=1.0)
    distillation, loader = distillation_of(recipe)
    distillation.student.load_state_dict(distillation.teacher.head.state_dict())
    distillation.student.eval()
    (batch,) = batches_of(distillation, loader, 1)
    sums, _ = distillation(batch)
    sums["texts"].backward()
    assert abs(sums["texts"].item()) < 1e-5
    assert all(p.grad is None or p.grad.abs().max() < 1e-5 for p in distillation.parameters())
    distillation.student.output.weight.data.mul_(-1)  # the negative control
    assert distillation(batch)[0]["texts"].item() > 1e-3


def test_a_teacher_with_another_tokenizer_reads_the_same_examples(folder, teacher):
    recipe = student(folder, teacher, "rnn", {"name": "characters"})
    distillation, loader = distillation_of(recipe)
    for batch in batches_of(distillation, loader, 5):
        assert isinstance(batch, TaughtBatch)
        assert torch.equal(batch.targets, batch.teacher.targets)
        own, theirs = loader.collate.__self__.tokenizer, distillation.teacher.task.tokenizer
        sides = (side.split(side.ids) for side in (batch.tokens, batch.teacher.tokens))
        for mine, other in zip(*sides, strict=True):
            assert own.decode(mine.tolist()) == theirs.decode(other.tolist())


def test_states_are_compared_by_their_angle(folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("a b c d e\nb c a e d\nd a e c b\n" * 9)
    model = {"name": "bert", "width": 8, "heads": 2, "layers": 2, "max_positions": 16, "dropout": 0.0}
    recipe = {
        "task": {"name": "mlm", "next_sentence": False, "sequences": "documents"},
        "data": {"train": str(text), "max_length": 12},
        "tokenizer": {"name": "wordpiece", "size": 40},
        "model": model,
        "train": {"steps": 2, "batch_tokens": 60},
    }
    weft.train(recipe, out=tmp_path / "teacher")
    taught = {**recipe, "model": {"weights": str(tmp_path / "teacher"), "keep_layers": [1]}}
    del taught["tokenizer"]
    distill = {"teacher": str(tmp_path / "teacher"), "cosine": 0.5, "alpha": 0.7}
    taught["train"] = {**recipe["train"], "distill": distill}
    distillation, loader = distillation_of(taught)
    (batch,) = batches_of(distillation, loader, 1)
    assert batch.counts["states"] == len(batch.tokens.ids)
    sums, _ = distillation(batch)
    heads = (distillation.student, distillation.teacher.head)
    states, theirs = (head.body.encode(batch.tokens)[0] for head in heads)
    cosines = (states * theirs).sum(-1) / states.norm(dim=-1) / theirs.norm(dim=-1)
    torch.testing.assert_close(sums["states"], 0.5 * (1 - cosines).sum())
    logits, answers = (head.body.logits(batch.tokens, batch.positions.ids) for head in heads)
    p, q = ((scores / 2).softmax(-1) for scores in (answers, logits))
    hard = F.cross_entropy(logits, batch.targets, reduction="sum")
    torch.testing.assert_close(sums["masked"], 0.7 * 4 * (p * (p.log() - q.log())).sum() + 0.3 * hard)
    weft.train(taught, out=tmp_path / "student")
    ours, whole = weights_at(tmp_path / "student", 0), load_file(tmp_path / "teacher" / "best" / "model.safetensors")
    assert not any("blocks.1" in name for name in ours)
    for name, value in ours.items():
        assert torch.equal(value, whole[name.replace("blocks.0", "blocks.1")]), name


def test_the_ends_of_an_answer_are_compared_window_by_window():
    body = resolve("model", "rnn")(resolve("model", "rnn").Config(name="rnn", width=4), 9)
    head, tokens = SpanHead(body, "last", 0.0, 5), Tokens.pack([[1, 2, 3], [4], [5, 6, 7, 8]])
    rng = torch.Generator().manual_seed(0)
    logits, answers = (torch.randn(8, 2, generator=rng, dtype=torch.float64) for _ in range(2))
    targets = torch.tensor([0, IGNORE_INDEX, 3, 3, 0, IGNORE_INDEX, 1, 2])
    found = head.soft_losses(logits, answers, Batch(tokens, targets), 2.0)["windows"]
    expected = 0.0
    for rows in ([0, 2], [3], [4, 6, 7]):  # of each window, where an answer can be
        for column in (0, 1):
            p, q = ((scores[rows, column] / 2).softmax(0) for scores in (answers, logits))
            expected += 4 * float((p * (p.log() - q.log())).sum()) / 2
    assert float(found) == pytest.approx(expected)


def test_a_language_model_learns_what_its_teacher_expects_next():
    bodies = [resolve("model", "rnn")(resolve("model", "rnn").Config(name="rnn", width=4), 9) for _ in range(2)]
    own, taught = (LMHead(body, 1, ()) for body in bodies)
    assert own.has_soft_targets
    assert not LMHead(bodies[0], 1, (), carries=True).has_soft_targets
    tokens = Tokens.pack([[1, 2, 3], [4, 5]])
    batch = Batch(tokens, torch.tensor([2, 3, IGNORE_INDEX, 5, 1]), {"tokens": 4})
    logits, answers = own.read(batch)[0], taught.read(batch)[0]
    torch.testing.assert_close(own.losses(logits, batch), own(batch)[0])
    p, q = ((scores[[0, 1, 3, 4]] / 3).softmax(-1) for scores in (answers, logits))
    torch.testing.assert_close(own.soft_losses(logits, answers, batch, 3.0)["tokens"], 9 * (p * (p / q).log()).sum())


# The training.


def test_of_labels_alone_it_is_the_training_without_a_teacher(folder, teacher, tmp_path):
    taught = student(folder, teacher, alpha=0.0)
    weft.train(taught, out=tmp_path / "taught")
    alone = {**taught, "train": {key: value for key, value in taught["train"].items() if key != "distill"}}
    alone["tokenizer"] = reviews(folder)["tokenizer"]
    weft.train(alone, out=tmp_path / "alone")
    ours, theirs = (weights_at(tmp_path / name, 4) for name in ("taught", "alone"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    weft.train(student(folder, teacher, alpha=0.5), out=tmp_path / "half")
    half = weights_at(tmp_path / "half", 4)
    assert not torch.equal(half["output.weight"], ours["output.weight"]), "the negative control"


def test_a_student_comes_nearer_to_its_teacher_which_stays_as_it_was(folder, teacher, tmp_path):
    before = load_file(teacher / "best" / "model.safetensors")
    recipe = student(folder, teacher, "rnn", {"name": "characters"}, alpha=1.0)
    distillation, loader = distillation_of(recipe)
    batches, optimizer = batches_of(distillation, loader, 4), torch.optim.Adam(distillation.parameters(), 0.02)
    distances = []
    for _ in range(12):
        loss = sum(distillation(batch)[0]["texts"] for batch in batches)
        distances.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert distances[-1] < 0.7 * distances[0]
    theirs = distillation.teacher.head.state_dict()
    assert all(torch.equal(theirs[name], value) for name, value in before.items())
    assert not any(parameter.requires_grad for parameter in distillation.teacher.head.parameters())
    assert {id(p) for p in distillation.parameters()} == {id(p) for p in distillation.student.parameters()}


def test_a_resume_is_exact_and_nothing_of_the_teacher_is_saved(folder, teacher, tmp_path):
    recipe = student(folder, teacher, "rnn", {"name": "characters"}, alpha=0.8)
    weft.train(recipe, ["train.steps=6"], tmp_path / "whole")
    weft.train(recipe, ["train.steps=3"], tmp_path / "parts")
    weft.train(recipe, ["train.steps=6"], tmp_path / "parts", resume=True)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    ours, theirs = (weights_at(tmp_path / name, 6) for name in ("parts", "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    _, _, head = open_model(tmp_path / "parts")
    assert ours.keys() == dict(head.named_parameters()).keys()


def test_a_student_of_some_layers_starts_from_them_and_goes_on_when_resumed(folder, teacher, tmp_path):
    recipe = student(folder, teacher)
    recipe["model"] = {"weights": str(teacher), "keep_layers": [0, 2]}
    weft.train(recipe, out=tmp_path / "student")
    assert read_run(recipe).model.layers == 2
    ours, whole = weights_at(tmp_path / "student", 0), load_file(teacher / "best" / "model.safetensors")
    for name, value in ours.items():
        assert torch.equal(value, whole[name.replace("blocks.1", "blocks.2")]), name
    weft.train(recipe, ["train.steps=6"], tmp_path / "student", resume=True)
    convert(tmp_path / "student", tmp_path / "hf")  # the format has no name for where a model started
    for kept, reason in (([0, 3], "has the layers 0 to 2, but 3 is kept"), ([2, 0], "must rise")):
        recipe["model"]["keep_layers"] = kept
        with pytest.raises(weft.ConfigError, match=f"model.keep_layers.*{reason}"):
            weft.train(recipe, out=tmp_path / "other")
    with pytest.raises(weft.ConfigError, match="are those of model.weights, but there is none"):
        read_run(reviews(folder), ["model.keep_layers=[0, 1, 2]"])


# What does not go together.


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"task.labels": ["good", "bad"]}, r"its task.labels is \('bad', 'good'\), and the student's"),
        ({"train.distill.cosine": 1.0}, "train.distill.cosine: a head reads the pooled output of its body alone"),
        ({"train.distill.teacher": "nowhere"}, "train.distill.teacher: nowhere"),
        ({"train.distill.alpha": 1.5}, r"train.distill.alpha"),
        (
            {"data.truncation": "drop", "model.max_positions": 64, "tokenizer": {"name": "characters"}},
            "data.truncation=drop does not allow",
        ),
    ],
)
def test_what_cannot_be_taught_is_refused(folder, teacher, tmp_path, changes, reason):
    with pytest.raises(weft.WeftError, match=reason):
        weft.train(student(folder, teacher), changes, tmp_path / "run")


def test_a_teacher_that_cuts_words_elsewhere_is_refused_where_it_is_seen(folder, teacher):
    distillation, loader = distillation_of(student(folder, teacher, "rnn", {"name": "characters"}))
    (batch,) = batches_of(distillation, loader, 1)
    other = distillation.teacher.batch(np.arange(2))
    with pytest.raises(weft.DataError, match=r"train.distill.teacher: gives \(2, 2\) answers"):
        distillation(TaughtBatch(batch.tokens, batch.targets, batch.counts, teacher=other))
    assert Distillation(distillation.student, Teacher(None, distillation.teacher.head), Distill(teacher="x")).config
