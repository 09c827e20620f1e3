"""ELECTRA's pre-training from recipe to answers, on small models."""

import json

import numpy as np
import pytest
import torch
from tests.evaluation import encoded

import weft
from weft.config.run import Run
from weft.data.batching.packed_items import pack
from weft.data.truncation import TruncationPolicy
from weft.errors import ConfigError, DataError
from weft.models.bert import BERT
from weft.tasks.evaluation import evaluate
from weft.tasks.factory import build, make_task
from weft.tokenization.trainable import train_tokenizer
from weft.training.compile import PaddedCollate, make_loader
from weft.training.distributed import World
from weft.training.metric_ranking import sign_of

WORDS = ["the", "weft", "is", "a", "thread", "that", "runs", "through", "all", "of", "it", "woven"]
CPU, CUDA = World(0, 1, torch.device("cpu")), World(0, 1, torch.device("cuda"))
LIMIT = TruncationPolicy(24, "window")


def lines(count=30, seed=0):
    rng = np.random.default_rng(seed)
    return [". ".join(" ".join(rng.choice(WORDS, 5).tolist()) for _ in range(rng.integers(1, 9))) for _ in range(count)]


def recipe(**sections):
    raw = {
        "task": {"name": "electra", "generator_size": 0.5},
        "data": {"train": "none.txt", "max_length": 24},
        "tokenizer": {"name": "wordpiece", "size": 60},
        "model": {"name": "bert", "width": 16, "heads": 2, "layers": 2, "max_positions": 32, "dropout": 0.0},
        "train": {"steps": 1, "batch_tokens": 200},
    }
    for name, own in sections.items():
        raw[name] = own if "name" in own else {**raw[name], **own}
    return raw


def build_task(raw, seed=0):
    torch.manual_seed(seed)
    run = Run.parse(raw)
    task, head = build(run, train_tokenizer(run.tokenizer, iter(lines())))
    return run, task, head.double().eval()


def packed(task, texts):
    items = task.encode_batch([task.Example(text=text) for text in texts], task.tokenizer, LIMIT)
    return pack(item for some in items for item in some)


KINDS = {
    "pairs": {},
    "windows": {"task": {"pairs": False}},
    "whole words": {"task": {"whole_words": True, "mask_probability": 0.3}},
    "masks filled": {"task": {"mlm_weight": 1.0}},
    "texts": {"task": {"sequences": "documents"}, "data": {"truncation": "window"}},
}


@pytest.fixture(params=KINDS)
def kind(request):
    return build_task(recipe(**KINDS[request.param]))


def test_a_batch_has_its_text_and_which_tokens_to_mask(kind):
    run, task, head = kind
    loader = make_loader(run, task, BERT, packed(task, lines()), CPU)
    special = {task.tokenizer.specials.bos, task.tokenizer.specials.eos}
    for loaded, _ in zip(loader.stream(), range(4), strict=False):
        batch = loaded.batch
        assert task.tokenizer.specials.mask not in batch.tokens.ids.tolist(), "the head masks them"
        assert torch.equal(batch.targets, batch.tokens.ids[batch.positions.ids])
        assert not special & set(batch.targets.tolist())
        assert batch.counts == {"masked": len(batch.targets), "replaced": len(batch.tokens.ids)}
        assert batch.labels.tolist() == [0] * len(batch.tokens)
        assert (batch.tokens.segments is not None) == task.pairs
        assert set(head(batch)[0]) == set(batch.counts)


def test_of_a_pair_the_second_follows_the_first():
    run, task, _ = build_task(recipe())
    data = packed(task, lines())
    stream = data.ids.tolist()
    batch = next(iter(make_loader(run, task, BERT, data, CPU).stream())).batch
    for text, segments in zip(batch.tokens.split(), batch.tokens.split(batch.tokens.segments), strict=True):
        inside = [*text[segments == 0][1:-1].tolist(), *text[segments == 1][:-1].tolist()]
        assert any(stream[start : start + len(inside)] == inside for start in range(len(stream)))


def test_batches_of_one_shape_have_no_more_to_learn(kind):
    run, task, _ = kind
    run = run.model_copy(update={"train": run.train.model_copy(update={"precision": "bf16"})})
    loader = make_loader(run, task, BERT, packed(task, lines(60)), CUDA)
    loader.workers = 0  # which pin memory, where there is a GPU
    assert isinstance(loader.collate, PaddedCollate)
    shapes = set()
    for loaded, _ in zip(loader.stream(), range(6), strict=False):
        batch = loaded.batch
        shapes.add((len(batch.tokens.ids), len(batch.tokens), len(batch.positions.ids), len(batch.labels)))
        assert int((batch.labels == 0).sum()) == len(batch.unpadded.tokens)
        assert batch.labels[len(batch.unpadded.tokens) :].isnan().all()
    assert len(shapes) == 1


def test_an_evaluation_is_always_the_same_and_counts_what_is_right(kind):
    _, task, head = kind
    examples = [task.Example(text=text) for text in lines(20, 5)]
    torch.manual_seed(1)
    state = torch.get_rng_state()
    with torch.no_grad():
        head.output.bias.fill_(-2.5)  # near the scores, so that both answers occur
        head.output.weight.mul_(40)
        results = [evaluate(task, head, encoded(task, examples, LIMIT)).metrics for _ in range(2)]
    assert results[0] == results[1]
    assert torch.equal(torch.get_rng_state(), state), "an evaluation leaves the training's samples as they are"
    assert results[0].keys() == {"loss", *task.metrics}
    rng, rows, masked = torch.Generator().manual_seed(0), [], []
    with torch.no_grad():
        for number, batch in task.evaluation_batches(packed(task, [example.text for example in examples])):
            logits, corrupted = head._corrupt(batch, rng.manual_seed(number))
            masked += (logits.argmax(-1) == batch.targets).tolist()
            answers, truths = head.discriminate(corrupted) > 0, corrupted.ids != batch.tokens.ids
            counted = (corrupted.ids != head.mask) | (head.mlm_weight == 0)
            rows += zip(answers[counted].tolist(), truths[counted].tolist(), strict=True)
    both = sum(answer and truth for answer, truth in rows)
    assert results[0]["masked_accuracy"] == pytest.approx(np.mean(masked))
    assert results[0]["replaced_accuracy"] == pytest.approx(np.mean([answer == truth for answer, truth in rows]))
    assert results[0]["replaced_precision"] == pytest.approx(both / max(1, sum(answer for answer, _ in rows)))
    assert results[0]["replaced_recall"] == pytest.approx(both / sum(truth for _, truth in rows))


def test_nothing_to_evaluate_on_is_an_error():
    _, task, head = build_task(recipe())
    with pytest.raises(DataError, match="not one word is left"):
        evaluate(task, head, encoded(task, [task.Example(text="")], LIMIT))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"name": "rnn", "width": 16}}, r"model\.name: task 'electra' pre-trains a bert, but this is 'rnn'"),
        ({"task": {"sequences": "documents", "pairs": True}}, r"task\.pairs: .* set task\.sequences: windows"),
        ({"tokenizer": {"name": "bpe", "size": 300}}, r"tokenizer\.specials: task 'electra' hides words .* add"),
        ({"data": {"max_length": 64}}, r"data\.max_length: sequences of 64 tokens, but the model reads 32"),
        ({"task": {"generator_size": 1.5}}, r"task\.generator_size"),
        ({"train": {"metric": "perplexity"}, "data": {"valid": "none.txt"}}, "has no metric 'perplexity'"),
    ],
)
def test_what_does_not_go_together_is_refused_before_any_data_is_read(sections, message):
    with pytest.raises(ConfigError, match=message):
        make_task(Run.parse(recipe(**sections)))


def test_less_loss_is_better_and_more_of_all_else():
    for metric, sign in ((None, -1), ("loss", 1), ("replaced_recall", -1), ("masked_accuracy", -1)):
        run = Run.parse(recipe(train={"metric": metric}, data={"valid": "none.txt"}))
        assert sign_of(run, make_task(run)) == sign
    run = Run.parse(recipe(task={"mlm_weight": 1.0}))
    assert (make_task(run).metric, make_task(Run.parse(recipe())).metric) == ("mlm_accuracy", "masked_accuracy")


# ---- whole runs ----


def weights(pipeline):
    return torch.cat([value.detach().flatten() for value in pipeline.head.parameters()])


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("electra") / "text.txt"
    path.write_text("\n".join(lines(200)) + "\n", encoding="utf-8")
    return path


def briefly(text, steps, seed=1):
    return recipe(
        data={"train": str(text)},
        model={"dropout": 0.1},
        train={"steps": steps, "batch_tokens": 300, "lr": 1e-3, "save_every": 3, "keep": 9, "seed": seed},
    )


def test_a_resume_in_the_middle_changes_not_a_bit(text, tmp_path):
    whole = weights(weft.train(briefly(text, 6), out=tmp_path / "whole"))
    weft.train(briefly(text, 3), out=tmp_path / "parts")
    resumed = weft.train(briefly(text, 6), out=tmp_path / "parts", resume=True)
    assert torch.equal(weights(resumed), whole)
    assert not torch.equal(weights(weft.train(briefly(text, 6, seed=2), out=tmp_path / "other")), whole)


def test_fine_tuning_takes_the_discriminator(text, tmp_path):
    pretrained = weft.train(briefly(text, 3), out=tmp_path / "run")
    rows = [{"text": line, "label": line.split()[0]} for line in lines(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    raw = {
        "task": {"name": "classify"},
        "data": {"train": str(tmp_path / "rows.jsonl"), "truncation": "cut"},
        "model": {"weights": str(tmp_path / "run")},
        "train": {"steps": 1, "lr": 1e-30, "optimizer": "sgd"},
    }
    tuned = weft.train(raw, out=tmp_path / "tuned").head.body.state_dict()
    own = pretrained.head.body.state_dict()
    assert all(torch.equal(tuned[name], value) for name, value in own.items())


def test_it_learns_to_tell_what_was_replaced(tmp_path):
    texts = ["one two three four five six seven eight nine ten", "a b c d e f g h i j k l m n o p"] * 20
    (tmp_path / "text.txt").write_text("\n".join(texts) + "\n")
    raw = recipe(
        task={"sequences": "documents", "generator_layers": 1, "mask_probability": 0.25},
        data={"train": str(tmp_path / "text.txt"), "valid": str(tmp_path / "text.txt"), "max_length": 20},
        tokenizer={"size": 80},
        model={"width": 32},
        train={"steps": 200, "batch_tokens": 400, "lr": 5e-3, "schedule": "warmup-linear", "warmup": 20},
    )
    pipeline = weft.train(raw, out=tmp_path / "run")
    metrics = pipeline.evaluate()
    assert metrics["replaced_precision"] > 0.9
    assert metrics["replaced_recall"] > 0.9
    (answer,) = weft.load(tmp_path / "run", device="cpu")("one two d four five six")
    assert answer["tokens"] == ["one", "two", "d", "four", "five", "six"]
    assert max(zip(answer["scores"], answer["tokens"], strict=True))[1] == "d"
    assert pipeline.task.format_answer(answer) == "one two [d] four five six"
