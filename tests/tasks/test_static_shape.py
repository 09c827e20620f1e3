"""Batches of one shape, of labels for texts and for words: they teach what bare batches teach, on a CPU as well."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.labelling import made

from weft.config.recipes import read_recipe
from weft.config.run import Run
from weft.data.batching.packed_items import pack
from weft.data.batching.static_shape import StaticShape
from weft.data.readers.examples import Skipped
from weft.data.truncation import TruncationPolicy
from weft.registry import resolve
from weft.tasks.batch import IGNORE_INDEX, Batch
from weft.tasks.factory import make_task
from weft.tasks.prepare import read_split
from weft.tokens import Tokens
from weft.training.compile import make_loader
from weft.training.distributed import World

WORDS = [f"w{number}" for number in range(20)]
SIZES = {"width": 16, "heads": 2, "layers": 2, "max_positions": 64, "dropout": 0}
BUDGET = 96


def rows(write, count=40, seed=0):
    rng = np.random.default_rng(seed)
    return "\n".join(
        write(rng, lambda: [str(one) for one in rng.choice(WORDS, rng.integers(1, 9))]) for _ in range(count)
    )


FILES = {
    "one.tsv": lambda rng, some: f"{' '.join(some())}\t{rng.choice(['a', 'b', 'c'])}",
    "pairs.tsv": lambda rng, some: f"{' '.join(some())}\t{rng.choice(['a', 'b'])}\t{' '.join(some())}",
    "rated.tsv": lambda rng, some: f"{' '.join(some())}\t{rng.normal()}",
    "several.csv": lambda rng, some: (
        f'{" ".join(some())},"{",".join(rng.choice(["a", "b", "c"], rng.integers(0, 3)))}"'
    ),
    "tags.conll": lambda rng, some: "\n".join(f"{word} {rng.choice(['A', 'B', 'C'])}" for word in some()) + "\n",
}
CASES = {
    "one": ("one.tsv", {}),
    "weighted": ("one.tsv", {"weights": {"b": 3.0}, "label_smoothing": 0.1}),
    "mixed": ("one.tsv", {"layers": "mix"}),
    "pairs": ("pairs.tsv", {}),
    "symmetric": ("pairs.tsv", {"symmetric": True}),
    "number": ("rated.tsv", {"regression": True}),
    "several": ("several.csv", {"multiple": True, "weights": {"a": 2.0}}),
    "tags": ("tags.conll", {"name": "tag"}),
    "weighted tags": ("tags.conll", {"name": "tag", "weights": "balanced", "label_smoothing": 0.1, "layers": [0, 2]}),
}


@pytest.fixture(params=["bert", "gpt"])
def recipes(request, tmp_path):
    for name, write in FILES.items():
        (tmp_path / name).write_text("text,labels\n" * name.endswith("csv") + rows(write) + "\n")

    def recipe(case):
        file, task = CASES[case]
        return {
            "task": {"name": "classify", "dropout": 0, **task},
            "data": {"train": str(tmp_path / file)},
            "tokenizer": {"name": "words"} if "tags" not in case else {"name": "characters"},
            "model": {"name": request.param, **SIZES},
            "train": {"steps": 1, "batch_tokens": BUDGET, "precision": "bf16"},
        }

    return recipe


def packed(recipe):
    """Return the task, its head and the data's items, as training has them."""
    task, head = made(recipe)
    run = Run.parse(read_recipe(recipe, ()))
    examples = [example for _, example in read_split(run.data, "train", task, Skipped())]
    items = [item for one in task.encode_batch(examples, task.tokenizer, TruncationPolicy(60, "error")) for item in one]
    return task, head.double().train(), pack(items, num_token_arrays=task.num_token_arrays)


def learnt(head, batch):
    head.zero_grad()
    (loss,) = head(batch)[0].values()
    loss.backward()
    grads = [torch.zeros_like(one) if one.grad is None else one.grad.clone() for one in head.parameters()]
    return [loss.detach(), *grads]


def bare_and_framed(task, data, numbers):
    frame = StaticShape.of(task.sequence_lengths(data), BUDGET)
    batch = task.collate([data[number] for number in numbers], np.random.default_rng(0))
    return batch, batch.to_static_shape(frame)


@pytest.mark.parametrize("case", CASES)
def test_what_fills_a_batch_up_changes_neither_the_loss_nor_a_gradient(recipes, case):
    task, head, data = packed(recipes(case))
    batch, framed = bare_and_framed(task, data, range(5))
    assert len(framed.tokens) > len(batch.tokens)
    assert (framed.counts, framed.size) == (batch.counts, batch.size)
    must = learnt(head, batch)
    for got, own in zip(learnt(head, framed), must, strict=True):
        torch.testing.assert_close(got, own, rtol=1e-9, atol=1e-9)
    assert all(grad.any() for grad, one in zip(must[1:], head.parameters(), strict=True) if one.ndim > 1)
    # the control: what fills it up is read as if it had a target
    targets = framed.targets.nan_to_num(1) if framed.targets.is_floating_point() else framed.targets.clamp(min=0)
    read = learnt(head, replace(framed, targets=targets))
    assert abs(read[0] - must[0]) > 0.1
    assert not torch.allclose(read[-1], must[-1], rtol=1e-3)


@pytest.mark.parametrize("case", CASES)
def test_all_batches_of_a_compiled_run_have_one_shape(recipes, case):
    task, head, data = packed(recipes(case))
    run = Run.parse(read_recipe(recipes(case), ()))
    loader = make_loader(run, task, head.body, data, World(0, 1, torch.device("cuda")))
    loader.workers = 0  # which pin memory, where there is a GPU
    assert loader.static_shape is not None
    shapes, read = set(), 0
    for drawn, _ in zip(loader.stream(), range(8), strict=False):
        batch = drawn.batch
        sides = [side for side in (batch.tokens, batch.source, batch.positions) if side is not None]
        shapes.add((*((side.ids.shape, side.starts.shape, side.longest) for side in sides), batch.targets.shape))
        taught = batch.targets.isfinite() if batch.targets.is_floating_point() else batch.targets != IGNORE_INDEX
        assert int((taught if taught.ndim == 1 else taught.all(-1)).sum()) == sum(batch.counts.values())
        read += batch.size
    assert len(shapes) == 1
    assert read > 0


@pytest.mark.parametrize("changes", [{"task": {"name": "tag", "crf": True}}, {"model": {"name": "rnn", "chars": 4}}])
def test_what_has_no_one_shape_says_so(recipes, changes):
    recipe = recipes("tags")
    run = Run.parse({**recipe, **changes})
    assert make_task(run).sequence_lengths(pack([])) is None
    assert not resolve("model", "rnn").supports_compile


def test_targets_of_tokens_stay_with_their_tokens_even_where_each_sequence_has_one():
    frame, tokens = StaticShape.of(np.array([[1, 1, 4]]), 64), Tokens.pack([[5], [6]])
    framed = Batch(tokens, torch.tensor([7, 8])).to_static_shape(frame)
    assert len(framed.targets) == len(framed.tokens.ids) != len(framed.tokens)
    labelled = Batch(Tokens.pack([[5, 5], [6]]), torch.tensor([7, 8])).to_static_shape(frame)
    assert labelled.targets.tolist() == [7, 8] + [IGNORE_INDEX] * (len(labelled.tokens) - 2)


def test_places_that_fill_a_batch_up_are_within_it():
    frame = StaticShape.of(np.array([[3, 2, 4]]), 64)
    batch = Batch(
        Tokens.pack([[5, 6, 7], [8, 9]]),
        torch.tensor([1, 2, 3]),
        positions=Tokens.pack([[0, 2], [4]]),
        labels=torch.tensor([1, 0]),
    )
    framed = batch.to_static_shape(frame)
    assert framed.positions.ids[:3].tolist() == [0, 2, 4]
    assert not framed.positions.ids[3:].any()
    assert framed.targets[:3].tolist() == [1, 2, 3]
    assert set(framed.targets[3:].tolist()) == {IGNORE_INDEX}
    assert len(framed.targets) == len(framed.positions.ids)
    assert framed.labels.tolist() == [1, 0] + [IGNORE_INDEX] * (len(framed.tokens) - 2)
    assert framed.positions.starts[-1] == len(framed.positions.ids)
