"""How far gradients reach: what one finds by hand, for any model; and it is told where there is nothing to follow."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.conftest import reversed_pairs
from torch import nn

import weft
from weft.analysis.gradient_flow import GAINS, STEPS, GradientNorms, gradient_norms, untrained_cell_norms
from weft.errors import DataError, RoleError
from weft.nn.rnn.cells import CELLS
from weft.tasks.batch import Batch
from weft.tokens import Tokens

WORD = reversed_pairs()[0][0]


def by_differences(head, batch, side, step, size=1e-5):
    """Find the norm of the gradient at one step by nudging each number of its embedding, in float64."""

    def loss(nudge):
        def hook(module, inputs, output):
            if not torch.equal(inputs[0].flatten(), side):
                return None
            nudged = output.clone().flatten(0, -2)
            nudged[step] += nudge
            return nudged.view_as(output)

        handles = [part.register_forward_hook(hook) for part in head.modules() if isinstance(part, nn.Embedding)]
        logits = head.body.logits(batch.tokens, batch.source)[-1:]
        for handle in handles:
            handle.remove()
        return float(nn.functional.cross_entropy(logits, batch.targets[-1:]))

    nudges = torch.eye(head.body.config.width, dtype=torch.float64) * size
    with torch.no_grad():
        return float(np.linalg.norm([(loss(nudge) - loss(-nudge)) / (2 * size) for nudge in nudges]))


@pytest.fixture(scope="module")
def exact(trained_run):
    """Return the model of `trained_run` in float64."""
    pipeline = weft.load(trained_run, device="cpu")
    pipeline.head.double()
    return pipeline


def test_the_norms_are_those_of_the_derivative(exact):
    _, _, batch = exact.teacher_forced(WORD)
    found = gradient_norms(exact.task, exact.head, batch)
    assert [len(found["source"]), len(found["target"])] == [len(WORD) + 1, len(WORD) + 1]
    sides = {"source": batch.source.ids, "target": batch.tokens.ids}
    for side, step in (("source", 0), ("source", 3), ("target", 1), ("target", 5)):
        by_hand = by_differences(exact.head, batch, sides[side], step)
        assert found[side][step] == pytest.approx(by_hand, rel=1e-4)
    assert found["source"][0] != pytest.approx(by_differences(exact.head, batch, batch.source.ids, 1), rel=1e-4)


def test_a_pipeline_names_the_steps(reverser):
    source, target = reverser.gradients(WORD, "mine")
    assert (source.model, source.side, source.tokens) == ("mine", "source", [*WORD, "</s>"])
    assert (target.side, target.tokens) == ("target", ["<s>", *WORD[::-1]])
    assert all(norm > 0 for norm in (*source.norms, *target.norms))
    assert reverser.gradients(WORD)[0].model == "seq2seq"


def test_nothing_of_the_model_changes(reverser):
    answer = reverser(WORD)
    reverser.gradients(WORD)
    assert reverser(WORD) == answer
    assert all(parameter.grad is None for parameter in reverser.head.parameters())
    assert not any(part._forward_hooks for part in reverser.head.modules())


def test_points_count_back_from_the_last_step():
    assert GradientNorms("m", "text", "abc", [1e-3, 0.1, 2.0]).points == [(2, 1e-3), (1, 0.1), (0, 2.0)]


def test_a_model_without_steps_says_so(reverser):
    class Bag(nn.Module):
        def logits(self, tokens, source, at=None):
            return nn.functional.one_hot(tokens.ids[at], 9).float()

    head = nn.Module()
    head.body = Bag()
    batch = Batch(Tokens.pack([[1, 2]]), torch.tensor([2, 3]), {}, Tokens.pack([[4]]))
    with pytest.raises(RoleError, match="Bag has no nn.Embedding of its input tokens"):
        gradient_norms(reverser.task, head, batch)


def labelled(tmp_path, task, row, **model):
    """Train a body for one step on one example that is given many times, and return its pipeline."""
    (tmp_path / "rows.jsonl").write_text((json.dumps(row[0]) + "\n" + json.dumps(row[1]) + "\n") * 4)
    recipe = {
        "task": {"name": task},
        "data": {"train": str(tmp_path / "rows.jsonl")},
        "tokenizer": {"name": "characters"},
        "model": {"name": "rnn", "width": 8, **model},
        "train": {"steps": 1, "batch_tokens": 200},
    }
    return weft.train(recipe, out=tmp_path / "run")


def test_the_loss_of_a_classifier_reaches_back_through_its_text(tmp_path):
    pipeline = labelled(tmp_path, "classify", [{"text": "abcd", "label": "x"}, {"text": "dcba", "label": "y"}])
    (found,) = pipeline.gradients("abcd")
    assert (found.side, len(found.tokens)) == ("text", 6)
    assert all(norm > 0 for norm in found.norms)


def test_only_the_last_tag_of_a_tagger_is_followed_back(tmp_path):
    rows = [{"words": ["ab", "cd"], "tags": ["A", "B"]}, {"words": ["cd", "ab"], "tags": ["B", "A"]}]
    pipeline = labelled(tmp_path, "tag", rows)
    (found,) = pipeline.gradients({"words": ["ab", "cd", "ab"]})
    assert found.tokens == ["<s>", "a", "b", "c", "d", "a", "b", "</s>"]
    assert all(norm > 0 for norm in found.norms[:6])
    assert found.norms[6:] == [0.0, 0.0], "the last word is read at its first token, by a network that reads forwards"


def test_what_has_no_words_has_no_last_step(tmp_path):
    rows = [{"words": ["ab"], "tags": ["A"]}, {"words": ["cd"], "tags": ["B"]}]
    with pytest.raises(DataError, match="the text has no words, so there is no last step; give"):
        labelled(tmp_path, "tag", rows).gradients("")


@pytest.mark.parametrize("look", ["gradients", "attention"])
def test_a_text_of_several_windows_is_refused(tmp_path, look):
    rows = [{"words": ["ab"], "tags": ["A"]}, {"words": ["cd"], "tags": ["B"]}]
    pipeline = labelled(tmp_path, "tag", rows, attention="dot")
    data = pipeline.run.data.model_copy(update={"max_length": 4, "truncation": "window"})
    pipeline = replace(pipeline, run=pipeline.run.model_copy(update={"data": data}))
    with pytest.raises(DataError, match="the text is read in 2 windows, of data.max_length=4 .*; give a shorter text"):
        getattr(pipeline, look)("ab cd ab")
    getattr(pipeline, look)("ab cd")


# Fresh cells.


@pytest.fixture(scope="module")
def cells():
    return untrained_cell_norms()


def falls(norms):
    """By how much the gradient shrinks at each step back, as a factor."""
    return (norms[0] / norms[-1]) ** (1 / (len(norms) - 1))


def test_gates_let_the_gradient_pass_where_plain_networks_lose_it(cells):
    by_name = {reach.model: falls(reach.norms) for reach in cells}
    assert set(CELLS) <= set(by_name)
    assert by_name["lstm"] > by_name["elman"] + 0.1
    assert by_name["peephole"] > by_name["elman"] + 0.1
    assert by_name["jordan"] < by_name["elman"]


def test_small_weights_vanish_and_large_ones_explode(cells):
    rates = [falls(next(one.norms for one in cells if one.model == f"×{gain:g}")) for gain in GAINS]
    assert rates == sorted(rates)
    assert rates[0] < 0.6
    assert rates[-1] > 1.1
    assert all(len(one.norms) == STEPS and min(one.norms) > 0 for one in cells)


def test_fresh_cells_are_the_same_each_time_and_leave_chance_alone(cells):
    torch.manual_seed(7)
    first = torch.rand(3)
    torch.manual_seed(7)
    assert untrained_cell_norms() == cells
    assert torch.equal(torch.rand(3), first)
    assert untrained_cell_norms(seed=1) != cells
