"""Batches of one shape teach what batches of any shape teach, and a run that cannot be compiled says why."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

import weft
from weft.config.run import Run
from weft.data.batching.packed_items import pack
from weft.data.batching.static_shape import StaticShape
from weft.models.transformer import Transformer, TransformerConfig
from weft.registry import resolve
from weft.tasks.batch import IGNORE_INDEX
from weft.tasks.factory import make_task
from weft.tasks.translate import TranslateHead
from weft.training.compile import PaddedCollate, make_loader, num_workers
from weft.training.distributed import World

RECIPE = {
    "task": {"name": "translate"},
    "data": {"sample": "dates", "workers": 0},
    "tokenizer": {"name": "bpe", "size": 300},
    "model": {"name": "transformer", "width": 16, "heads": 2, "layers": 1, "ffn_width": 16},
    "train": {"steps": 1, "batch_tokens": 400, "precision": "bf16"},
}
VOCAB = 50
CUDA = World(0, 1, torch.device("cuda"))
CPU = World(0, 1, torch.device("cpu"))


def items(count=80, seed=0):
    rng = np.random.default_rng(seed)
    return [
        (rng.integers(0, VOCAB, rng.integers(1, 20)), rng.integers(0, VOCAB, rng.integers(2, 25))) for _ in range(count)
    ]


def changed(**sections):
    return Run.parse({name: {**part, **sections.get(name, {})} for name, part in RECIPE.items()})


@pytest.fixture(scope="module")
def head():
    torch.manual_seed(0)
    config = TransformerConfig(name="transformer", width=16, heads=2, layers=2, ffn_width=32, dropout=0)
    return TranslateHead(Transformer(config, VOCAB).double(), 1, [0], 0.1)


def learnt(head, batch):
    head.zero_grad()
    loss = head(batch)[0]["tokens"]
    loss.backward()
    return [loss.detach(), *(value.grad.clone() for value in head.parameters())]


def test_what_fills_a_batch_up_changes_neither_the_loss_nor_a_gradient(head):
    task, data = make_task(changed()), pack(items())
    frame = StaticShape.of(task.sequence_lengths(data), 400)
    batch = task.collate([data[number] for number in range(9)], np.random.default_rng(0))
    framed = batch.to_static_shape(frame)
    for got, must in zip(learnt(head, framed), learnt(head, batch), strict=True):
        torch.testing.assert_close(got, must, rtol=1e-9, atol=1e-9)
    # the negative control: fillers that a loss reads
    read = framed.targets.masked_fill(framed.targets == IGNORE_INDEX, 3)

    assert abs(learnt(head, replace(framed, targets=read))[0] - learnt(head, batch)[0]) > 1


def test_all_batches_have_one_shape_and_count_their_real_tokens():
    task, data = make_task(changed()), pack(items())
    loader = make_loader(changed(), task, Transformer, data, CUDA)
    shapes = set()
    for drawn, _ in zip(loader.stream(), range(15), strict=False):
        batch = drawn.batch
        shapes.add((len(batch.tokens.ids), len(batch.source.ids), len(batch.tokens), batch.tokens.longest))
        assert batch.size == sum(len(data[n][0]) + len(data[n][1]) - 1 for n in drawn.batch_index.items.tolist())
        assert batch.counts["tokens"] == int((batch.targets != IGNORE_INDEX).sum())
    assert len(shapes) == 1


def test_without_a_gpu_nothing_is_compiled_unless_asked_for_which_is_refused():
    task, data = make_task(changed()), pack(items())
    assert make_loader(changed(), task, Transformer, data, CPU).static_shape is None
    assert make_loader(changed(train={"compile": False}), task, Transformer, data, CUDA).static_shape is None
    with pytest.raises(weft.ConfigError, match=r"train\.compile: pays on a GPU in bf16, but this is cpu in bf16"):
        make_loader(changed(train={"compile": True}), task, Transformer, data, CPU)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"train": {"precision": "fp32"}}, "this is cuda in fp32"),
        ({"model": {}}, "the model 'seq2seq' does not go into one graph"),
    ],
)
def test_what_does_not_go_into_one_graph_is_said(sections, message):

    train = {"compile": True, **sections.pop("train", {})}
    model = {"name": "seq2seq", "width": 16} if "model" in sections else RECIPE["model"]
    run = Run.parse({**RECIPE, "model": model, "train": {**RECIPE["train"], **train}})
    with pytest.raises(weft.ConfigError, match=message):
        make_loader(run, make_task(run), resolve("model", run.model.name), pack(items()), CUDA)


def test_a_task_without_sides_is_not_compiled():
    run = changed(train={"compile": True})
    task = make_task(run)
    task.sequence_lengths = lambda data: None
    with pytest.raises(weft.ConfigError, match="the batches of the task 'translate' have no one shape"):
        make_loader(run, task, Transformer, pack(items()), CUDA)


@pytest.mark.parametrize(
    ("device", "workers", "cpus", "ranks", "expected"),
    [
        ("cpu", None, 16, 1, 0),
        ("cuda", None, 16, 1, 4),
        ("cuda", None, 16, 8, 1),
        ("cuda", None, 3, 1, 2),
        ("cuda", None, 1, 1, 0),
        ("cuda", 0, 16, 1, 0),
        ("cpu", 3, 2, 1, 3),
    ],
)
def test_a_gpu_has_loader_workers_by_default_as_the_cores_allow(device, workers, cpus, ranks, expected, monkeypatch):
    monkeypatch.setattr("weft.training.compile.num_cpus", lambda: cpus)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    run = changed(data={"workers": workers})
    assert num_workers(run, World(0, ranks, torch.device(device))) == expected


def test_a_framed_collate_goes_to_workers():

    framed = PaddedCollate(make_task(changed()), StaticShape.of(np.array([[3, 4], [5, 6]]), 64))
    again = pickle.loads(pickle.dumps(framed))
    assert again.static_shape == framed.static_shape
