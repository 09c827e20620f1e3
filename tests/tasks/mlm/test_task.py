"""Masked language modelling and next-sentence prediction, from recipe to answers, on small models."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.evaluation import encoded

import weft
from weft.config.recipes import read_recipe
from weft.config.run import Run
from weft.data.batching.loader import Position
from weft.data.batching.packed_items import pack
from weft.data.corpus.format import open_split
from weft.data.truncation import TruncationPolicy
from weft.errors import ConfigError, DataError, RoleError
from weft.models.bert import BERT
from weft.tasks.batch import IGNORE_INDEX
from weft.tasks.corpus.build import prepare
from weft.tasks.evaluation import evaluate
from weft.tasks.factory import build, make_task
from weft.tokenization.trainable import train_tokenizer
from weft.tokens import Tokens
from weft.training.compile import PaddedCollate, make_loader
from weft.training.distributed import World
from weft.training.metric_ranking import sign_of
from weft.training.trainer import Trainer

WORDS = ["the", "weft", "is", "a", "thread", "that", "runs", "through", "all", "of", "it", "woven"]
BYTES = {"name": "bpe", "size": 300, "specials": {"mask": "<mask>"}}
PLAIN = {"name": "words", "specials": {"mask": "[MASK]"}}
RNN = {"name": "rnn", "width": 16, "direction": "both"}
CUDA = World(0, 1, torch.device("cuda"))


def lines(count=30, seed=0):
    rng = np.random.default_rng(seed)
    return [". ".join(" ".join(rng.choice(WORDS, 5).tolist()) for _ in range(rng.integers(1, 9))) for _ in range(count)]


def recipe(**sections):
    raw = {
        "task": {"name": "mlm"},
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
    encoded = task.encode_batch(
        [task.Example(text=text) for text in texts], task.tokenizer, TruncationPolicy(24, "window")
    )
    return pack(item for items in encoded for item in items)


def drawn(run, task, data, count=4, world=World(0, 1, torch.device("cpu"))):  # noqa: B008
    loader = make_loader(run, task, BERT, data, world)
    loader.workers = 0  # which pin memory, where there is a GPU
    return [one for one, _ in zip(loader.stream(), range(count), strict=False)]


KINDS = {
    "pairs": {},
    "order": {"task": {"sentence_order": True}},
    "windows": {"task": {"next_sentence": False}},
    "whole words": {"task": {"whole_words": True}},
    "rows": {"task": {"sequences": "documents"}, "data": {"truncation": "window"}},
    "one segment": {"model": {"segments": 1, "max_positions": 34, "offset": 2}, "tokenizer": BYTES},
}


@pytest.fixture(params=KINDS)
def kind(request):
    return build_task(recipe(**KINDS[request.param]))


def test_next_sentences_are_for_models_that_tell_segments_apart():
    assert {name: build_task(recipe(**own))[1].pairs for name, own in KINDS.items()} == {
        "pairs": True,
        "order": True,
        "windows": False,
        "whole words": True,
        "rows": False,
        "one segment": False,
    }
    assert build_task(recipe(model={"segments": 1}, task={"next_sentence": True}))[1].pairs


def test_a_batch_hides_words_and_knows_which(kind):
    run, task, _ = kind
    special = {task.tokenizer.specials.bos, task.tokenizer.specials.eos}
    for one in drawn(run, task, packed(task, lines())):
        batch = one.batch
        assert batch.tokens.longest <= run.data.max_length
        assert batch.counts["masked"] == len(batch.positions.ids) == len(batch.targets)
        hidden = batch.tokens.ids[batch.positions.ids] == task.tokenizer.specials.mask
        assert hidden.double().mean() > 0.5
        assert not special & set(batch.targets.tolist())
        for row, sequence in enumerate(batch.tokens.split()):
            assert sequence[0] == task.tokenizer.specials.bos
            assert sequence[-1] == task.tokenizer.specials.eos
            count = sum(id not in special for id in sequence.tolist())
            allowed = max(1, round(0.15 * count))
            assert int(batch.positions.lengths[row]) <= allowed
            assert task.config.whole_words or int(batch.positions.lengths[row]) == allowed
        assert (batch.labels is None) == (not task.pairs)


def test_masks_are_new_each_time_and_follow_from_the_place_in_the_training(kind):
    run, task, _ = kind
    data = packed(task, lines())
    first, again = drawn(run, task, data), drawn(run, task, data)
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one.batch.tokens.ids, other.batch.tokens.ids)
        assert torch.equal(one.batch.positions.ids, other.batch.positions.ids)
    loader = make_loader(run, task, BERT, data, World(0, 1, torch.device("cpu")))
    third = next(iter(loader.stream(first[2].batch_index.position)))
    assert torch.equal(third.batch.tokens.ids, first[2].batch.tokens.ids)
    special = task.tokenizer.specials
    items = [(np.array([special.bos, *range(8, 32), special.eos]),)]
    read = [task.collate(items, np.random.default_rng(seed)).tokens.ids.tolist() for seed in (1, 1, 2)]
    assert read[0] == read[1] != read[2]


def test_the_loss_is_that_of_the_words_that_were_chosen_and_of_what_follows(kind):
    run, task, head = kind
    batch = drawn(run, task, packed(task, lines()), 1)[0].batch
    sums = head(batch)[0]
    logits = head.body.logits(batch.tokens).log_softmax(-1)  # every place, here
    right = torch.full((len(batch.tokens.ids),), IGNORE_INDEX)
    right[batch.positions.ids] = batch.targets
    must = -sum(logits[place, id] for place, id in enumerate(right.tolist()) if id != IGNORE_INDEX)
    torch.testing.assert_close(sums["masked"], must)
    assert set(sums) == {"masked", *([task.objective] if task.pairs else [])} == set(batch.counts)
    if task.pairs:
        scores = head.next(head.body.pooled_output(batch.tokens)).log_softmax(-1)
        torch.testing.assert_close(sums[task.objective], -scores[torch.arange(len(scores)), batch.labels].sum())
    assert (head.body.pooler is None) == (head.next is None) == (not task.pairs)


def test_a_batch_with_nothing_to_choose_changes_no_mean():
    run, task, head = build_task(recipe(task={"sequences": "documents", "whole_words": True}))
    bos, eos = task.tokenizer.specials.bos, task.tokenizer.specials.eos
    empty = task.collate([(np.array([bos, eos], np.int32),)], np.random.default_rng(0))
    full = drawn(run, task, packed(task, lines()), 1)[0].batch
    assert empty.counts == {"masked": 0}
    loader = make_loader(run, task, BERT, packed(task, lines()), World(0, 1, torch.device("cpu")))
    trainer = Trainer(run, task, head, loader, World(0, 1, torch.device("cpu")), print)
    trainer._carried = [None, None]  # two batches an update at most
    alone, both, none = (
        float(trainer._backward(list(some), [Position()] * len(some))[0]) for some in ([full], [empty, full], [empty])
    )
    assert alone == pytest.approx(head(full)[0]["masked"].item() / len(full.targets))
    assert both == alone
    assert none == 0


def test_only_the_words_that_were_chosen_meet_the_vocabulary(kind):
    run, task, head = kind
    batch, seen = drawn(run, task, packed(task, lines()), 1)[0].batch, []
    hook = head.body.output.register_forward_hook(lambda part, given, out: seen.append(len(given[0])))
    head(batch)
    hook.remove()
    assert seen == [len(batch.positions.ids)]
    matrices = head.body.transform.weight.numel() + head.body.output.weight.numel()
    spared = len(batch.tokens.ids) - len(batch.positions.ids)
    own = 0 if head.next is None else 2 * head.next.weight.numel() * len(batch.tokens)
    assert head.flops(batch) == head.body.flops(batch.tokens) - 2 * matrices * spared + own


def learnt(head, batch):
    head.zero_grad()
    sums = head(batch)[0]
    sum(sums.values()).backward()
    return [*sums.values(), *(value.grad.clone() for value in head.parameters())]


def test_batches_of_one_shape_teach_the_same(kind):
    run, task, head = kind
    data = packed(task, lines(60))
    run = run.model_copy(update={"train": run.train.model_copy(update={"precision": "bf16"})})
    loader = make_loader(run, task, BERT, data, CUDA)
    loader.workers = 0  # which pin memory, where there is a GPU
    assert isinstance(loader.collate, PaddedCollate)
    shapes = set()
    for one, _ in zip(loader.stream(), range(12), strict=False):
        batch = one.batch
        labels = None if batch.labels is None else len(batch.labels)
        tokens, positions = ((len(side.ids), len(side), side.longest) for side in (batch.tokens, batch.positions))
        shapes.add((*tokens, *positions, len(batch.targets), labels))
        assert int((batch.targets != IGNORE_INDEX).sum()) == len(batch.unpadded.positions.ids) == batch.counts["masked"]
        assert batch.size == len(batch.unpadded.tokens.ids)
    assert len(shapes) == 1
    for got, must in zip(learnt(head, batch), learnt(head, batch.unpadded), strict=True):
        torch.testing.assert_close(got, must, rtol=1e-9, atol=1e-9)
    # the negative control: a filler that has a target
    wrong = replace(batch, targets=batch.targets.masked_fill(batch.targets == IGNORE_INDEX, 7))
    assert (
        len(batch.targets) == len(batch.unpadded.targets) or abs(learnt(head, wrong)[0] - learnt(head, batch)[0]) > 1e-3
    )


def test_labels_are_true_to_the_documents():
    """Each document has words of its own."""
    texts = [" ".join([word] * 60) for word in WORDS]
    run, task, _ = build_task(recipe(tokenizer=PLAIN))
    owner = {task.tokenizer.ids([word])[0][0]: number for number, word in enumerate(WORDS)}
    seen = []
    for one in drawn(run, task, packed(task, texts), 8):
        batch = one.batch
        ids = batch.tokens.ids.clone()
        ids[batch.positions.ids] = batch.targets
        kinds = batch.tokens.split(batch.tokens.segments)
        for text, segment, label in zip(batch.tokens.split(ids), kinds, batch.labels.tolist(), strict=True):
            first, second = (
                {owner[id] for id in part.tolist() if id in owner} for part in (text[segment == 0], text[segment == 1])
            )
            assert len(first) == len(second) == 1
            assert (first == second) == (label == 0)
            seen.append(label)
    assert 0.3 < np.mean(seen) < 0.7


def by_hand(task, head, text):
    """Return the pseudo-log-likelihood, computed with one masked copy at a time."""
    specials = task.tokenizer.specials
    ids = [specials.bos, *task.tokenizer.ids([text])[0], specials.eos]
    total = 0.0
    for place in range(1, len(ids) - 1):
        read = [*ids[:place], specials.mask, *ids[place + 1 :]]
        logits = head.body.logits(Tokens.pack([read]), direction=head.direction).log_softmax(-1)
        total += float(logits[place, ids[place]].detach())
    return total, len(ids) - 2


@pytest.mark.parametrize("own", [{}, {"model": RNN, "tokenizer": BYTES}], ids=["bert", "rnn"])
def test_a_text_is_as_likely_as_its_tokens_masked_in_turn(own):
    _, task, head = build_task(recipe(**own))
    texts = ["the weft is a thread", "", "that runs", "all of it. woven"]
    with torch.no_grad():
        result = task.log_probs(head, texts)
    assert result == pytest.approx([by_hand(task, head, text)[0] for text in texts], rel=1e-9)
    assert result[1] == 0
    if not own:
        with pytest.raises(DataError, match="the model reads 32; give a shorter one"):
            task.log_probs(head, ["weft " * 40])


def test_an_evaluation_is_always_the_same_and_says_what_it_is_of(kind):
    _, task, head = kind
    examples = [task.Example(text=text) for text in lines(20, 5)]
    result = [evaluate(task, head, encoded(task, examples, TruncationPolicy(24, "window"))) for _ in range(2)]
    assert result[0] == result[1]
    metrics = result[0].metrics
    assert metrics.keys() == {"loss", *task.metrics}
    assert metrics["perplexity"] == pytest.approx(
        math.exp(metrics["loss"]) if not task.pairs else metrics["perplexity"]
    )
    assert 0 <= metrics["masked_accuracy"] < 0.5
    assert result[0].note.startswith("pseudo_perplexity: of the first ")
    if task.config.sequences == "windows":
        with torch.no_grad():
            known = [by_hand(task, head, " ".join(text.split()))[0] for text in ["the weft", "is a thread that runs"]]
            examples = [task.Example(text=text) for text in ["the weft", "is a thread that runs"]]
            short = evaluate(task, head, encoded(task, examples, TruncationPolicy(24, "error")))
        count = sum(len(ids) for ids in task.tokenizer.ids(["the weft", "is a thread that runs"]))
        assert short.metrics["pseudo_perplexity"] == pytest.approx(math.exp(-sum(known) / count), rel=1e-9)


def test_an_evaluation_counts_what_is_right():
    _, task, head = build_task(recipe())
    examples = [task.Example(text=text) for text in lines(20, 5)]
    loss = correct = total = follows = pairs = 0
    for _, batch in task.evaluation_batches(packed(task, [one.text for one in examples])):
        logits = head.body.logits(batch.tokens)[batch.positions.ids].log_softmax(-1).detach()
        loss -= float(logits.gather(1, batch.targets[:, None]).sum())
        correct += int((logits.argmax(-1) == batch.targets).sum())
        total += len(batch.targets)
        follows += int((head.next(head.body.pooled_output(batch.tokens)).argmax(-1) == batch.labels).sum())
        pairs += len(batch.labels)
    metrics = evaluate(task, head, encoded(task, examples, TruncationPolicy(24, "window"))).metrics
    assert metrics["perplexity"] == pytest.approx(math.exp(loss / total))
    assert metrics["masked_accuracy"] == pytest.approx(correct / total)
    assert 0 < follows < pairs
    assert metrics["next_accuracy"] == pytest.approx(follows / pairs)


def test_one_document_has_an_order_of_sentences_to_learn():
    _, task, head = build_task(recipe(task={"sentence_order": True}))
    one = [task.Example(text=" ".join(lines(3)))]
    result = evaluate(task, head, encoded(task, one, TruncationPolicy(24, "window")))
    assert 0 <= result.metrics["order_accuracy"] <= 1
    assert "next_accuracy" not in result.metrics


def test_one_document_is_judged_without_next_sentences():
    _, task, head = build_task(recipe())
    result = evaluate(
        task, head, encoded(task, [task.Example(text=" ".join(lines(3)))], TruncationPolicy(24, "window"))
    )
    assert "next_accuracy" not in result.metrics
    assert result.note.startswith("next_accuracy: not given, since there is but one document; pseudo_perplexity")
    one = [task.Example(text="a")]
    assert task.unavailable_metric("next_accuracy", one) == "there is but one document"
    assert task.unavailable_metric("next_accuracy", one * 2) == task.unavailable_metric("perplexity", one) == ""
    with pytest.raises(DataError, match="not one word is left"):
        evaluate(task, head, encoded(task, [task.Example(text="")], TruncationPolicy(24, "window")))


def test_to_train_next_sentences_takes_two_documents(tmp_path):
    (tmp_path / "a.txt").write_text(" ".join(lines(9)))
    with pytest.raises(DataError, match=r"needs two documents .* see data\.documents"):
        weft.train(recipe(data={"train": str(tmp_path / "a.txt")}), out=tmp_path / "run")


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"tokenizer": {"name": "bpe", "size": 300}}, r"tokenizer\.specials: .* 'bpe' has none; add .*mask"),
        (
            {"task": {"sequences": "documents", "next_sentence": True}},
            r"task\.next_sentence: .* set task\.sequences: windows",
        ),
        (
            {"task": {"next_sentence": True, "sentence_order": True}},
            r"task\.sentence_order: is learnt in place of task\.next_sentence; leave one of them out",
        ),
        (
            {"task": {"sequences": "documents", "sentence_order": True}},
            r"task\.sentence_order: .* set task\.sequences: windows",
        ),
        ({"data": {"max_length": 64}}, r"data\.max_length: sequences of 64 tokens, but the model reads 32"),
        (
            {"model": {"max_positions": 32, "offset": 9}},
            r"data\.max_length: sequences of 24 tokens, but the model reads 23",
        ),
        ({"data": {"max_length": 5}}, r"data\.max_length: must have room .* 6 at least: got 5"),
        ({"train": {"metric": "next_acuracy"}, "data": {"valid": "none.txt"}}, "did you mean 'next_accuracy'"),
        (
            {"train": {"metric": "next_accuracy"}, "data": {"valid": "none.txt"}, "model": {"segments": 0}},
            "has no metric",
        ),
        ({"task": {"mask_probability": 0}}, r"task\.mask_probability"),
    ],
)
def test_what_does_not_go_together_is_refused_before_any_data_is_read(sections, message):
    with pytest.raises(ConfigError, match=message):
        make_task(Run.parse(recipe(**sections)))


def test_a_model_that_does_not_fill_is_refused_and_one_that_does_is_no_language_model():
    with pytest.raises(RoleError, match="task 'mlm' needs a model that fills; 'gpt'"):
        make_task(Run.parse(recipe(model={"name": "gpt", "width": 16, "heads": 2, "layers": 1})))
    with pytest.raises(ConfigError, match="try mlm"):
        make_task(Run.parse(recipe(task={"name": "lm"})))


def test_more_accuracy_is_better_and_less_perplexity():
    for metric, sign in ((None, 1), ("pseudo_perplexity", 1), ("masked_accuracy", -1), ("loss", 1)):
        run = Run.parse(recipe(train={"metric": metric}, data={"valid": "none.txt"}))
        assert sign_of(run, make_task(run)) == sign


def test_rows_are_cut_at_the_limit_their_specials_counted():
    _, task, _ = build_task(recipe(task={"sequences": "documents"}, tokenizer=PLAIN))
    text = " ".join(["weft"] * 50)
    for policy, sizes in (("window", [24, 24, 8]), ("cut", [24]), ("drop", [])):
        items = task.encode(task.Example(text=text), task.tokenizer, TruncationPolicy(24, policy))
        assert [len(item[0]) for item in items] == sizes
    with pytest.raises(DataError, match="got 52 tokens"):
        task.encode(task.Example(text=text), task.tokenizer, TruncationPolicy(24, "error"))
    assert task.encode(task.Example(text=""), task.tokenizer, TruncationPolicy(24, "error")) == []


def test_what_spells_a_mask_is_text_to_learn_from_and_a_mask_to_fill():
    _, task, _ = build_task(recipe())
    example, limit = task.Example(text="the [MASK] is"), TruncationPolicy(24, "error")
    mask = task.tokenizer.specials.mask
    assert mask not in task.encode(example, task.tokenizer, limit)[0][0]
    assert task.encode(task.without_labels(example), task.tokenizer, limit)[0][0].tolist().count(mask) == 1


# ---- whole runs ----


def write(folder, texts=None):
    path = folder / "text.txt"
    path.write_text("\n".join(texts or lines(200)) + "\n", encoding="utf-8")
    return path


def weights(pipeline):
    return torch.cat([one.detach().flatten() for one in pipeline.head.parameters()])


def briefly(data, steps, **task):
    return recipe(
        task={"name": "mlm", **task},
        data={"train": None, "max_length": 32, "truncation": "window", **data},
        tokenizer={"size": 400, "lowercase": True},
        model={"dropout": 0.1},
        train={"steps": steps, "batch_tokens": 512, "lr": 1e-3, "save_every": 5, "report_every": 5, "keep": 9},
    )


def resumed(data, folder, **task):
    """Train in one go, and in two."""
    whole = weights(weft.train(briefly(data, 9, **task), out=folder / "whole"))
    weft.train(briefly(data, 5, **task), out=folder / "parts")
    return whole, weights(weft.train(briefly(data, 9, **task), out=folder / "parts", resume=True))


def test_a_resume_in_the_middle_changes_not_a_bit(tmp_path):
    whole, on = resumed({"sample": "pydoc"}, tmp_path)
    assert torch.equal(on, whole)


@pytest.mark.parametrize("task", [{"next_sentence": False, "whole_words": True}, {"sequences": "documents"}])
def test_nor_does_it_in_other_ways_to_read(task, tmp_path):
    data = {"train": str(write(tmp_path))}
    whole, on = resumed(data, tmp_path, **task)
    assert torch.equal(on, whole)
    other = weft.train(briefly(data, 9, **task), ["train.seed=2"], tmp_path / "other")
    assert not torch.equal(weights(other), whole)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mlm")
    texts = ["one two three four five six seven eight nine ten", "a b c d e f g h i j k l m n o p"] * 20
    raw = recipe(
        data={"train": str(write(folder, texts)), "valid": str(folder / "text.txt"), "max_length": 20},
        tokenizer={"size": 80},
        model={"width": 32},
        train={"steps": 150, "batch_tokens": 400, "lr": 5e-3, "schedule": "warmup-linear", "warmup": 20},
    )
    weft.train(raw, out=folder / "run")
    return weft.load(folder / "run", device="cpu")


def test_it_learns_and_fills(trained):
    answer, other = trained(["one two [MASK] four five six seven", "a b [MASK] d e f g [MASK] i j"], {"top": 2})
    assert answer["text"] == "one two three four five six seven"
    assert other["text"] == "a b c d e f g h i j"
    assert [len(fill) for fill in other["fills"]] == [2, 2]
    assert answer["fills"][0][0]["token"] == "three"
    assert answer["fills"][0][0]["score"] > answer["fills"][0][1]["score"] > 0
    assert trained.task.format_answer(answer) == answer["text"]
    best = [f"{one['token']} {one['score']:.3f}" for one in answer["fills"][0]]
    assert trained.task.format_alternatives(answer) == f"{answer['text']}\t{best[0]}, {best[1]}"
    assert trained.task.format_alternatives(other).count("\t") == 2, "one for each mask"
    assert len(trained("one [MASK] three")[0]["fills"][0]) == 5
    given = [one["token"] for one in trained("one [MASK] three", {"top": 10**6})[0]["fills"][0]]
    specials = {trained.tokenizer.token(id) for id in trained.head.specials}
    assert len(given) == len(set(given)) == len(trained.tokenizer) - len(specials)
    assert not specials & set(given), "a special is no word"
    result = trained.evaluate()
    assert result["masked_accuracy"] > 0.6
    assert result["pseudo_perplexity"] < 4


def test_a_question_needs_a_mask(trained):
    with pytest.raises(DataError, match=r"example 2: the text has no \[MASK\] to fill"):
        trained(["one [MASK]", "one two"])
    with pytest.raises(DataError, match="got 52 tokens"):
        trained("one [MASK] " * 25)


def test_a_likely_text_has_the_higher_pseudo_log_likelihood(trained, tmp_path):
    good, bad = trained.log_probs(["one two three four", "one four b three"])
    assert good > bad
    row = {
        "sentence_good": "one two three four",
        "sentence_bad": "one four b three",
        "UID": "letters",
        "linguistics_term": "order",
    }
    (tmp_path / "letters.jsonl").write_text(json.dumps(row) + "\n")
    assert trained.minimal_pairs(tmp_path).accuracy == 1


def test_it_can_be_looked_into(trained):
    plain, masked = trained.attention("one two three"), trained.attention("one [MASK] three")
    assert plain.source == ["[CLS]", "one", "two", "three", "[SEP]"]
    assert plain.answer_line.startswith("pseudo-log-likelihood -")
    assert masked.source == ["[CLS]", "one", "[MASK]", "three", "[SEP]"]
    assert masked.answer_line == "one two three"
    assert {view.layer for view in masked.views} == {0, 1}
    with pytest.raises(RoleError, match="reads both sides, so it has no last step"):
        trained.gradients("one two three")


@pytest.mark.parametrize("task", [{}, {"next_sentence": False}, {"sequences": "documents"}])
def test_prepared_or_not_it_is_the_same_training_and_the_same_judgement(task, tmp_path):
    path = write(tmp_path)
    own = {"train": str(path), "valid": str(path), "truncation": "window", "max_length": 20}
    raw = recipe(task={"name": "mlm", **task}, data=own, train={"steps": 4, "report_every": 1, "lr": 1e-2})
    prepare(Run.parse(raw), tmp_path / "corpus", workers=1)
    assert open_split(tmp_path / "corpus", "train").ids.dtype == np.uint16
    text = weft.train(raw, out=tmp_path / "text")
    changes = [f"data.train={tmp_path / 'corpus'}", f"data.valid={tmp_path / 'corpus'}"]
    corpus = weft.train(read_recipe(raw, changes), out=tmp_path / "arrays")
    assert torch.equal(weights(text), weights(corpus))
    rows = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("text", "arrays")]
    valid = [json.loads(lines[-1])["valid"] for lines in rows]
    assert valid[0] == valid[1]


def test_it_learns_what_follows(tmp_path):
    """Each document has words of its own, so that they tell."""
    texts = [" ".join([word] * 480) for word in ("a", "b", "c", "d")]
    raw = recipe(
        data={"train": str(write(tmp_path, texts)), "valid": str(tmp_path / "text.txt"), "max_length": 15},
        task={"name": "mlm", "short_sequence_probability": 0},
        tokenizer=PLAIN,
        model={"width": 32},
        train={"steps": 200, "batch_tokens": 600, "lr": 3e-3, "schedule": "warmup-linear", "warmup": 20},
    )
    result = weft.train(raw, out=tmp_path / "run").evaluate()
    assert result["next_accuracy"] > 0.85


def test_a_two_sided_rnn_learns_too(tmp_path):
    raw = recipe(
        data={"train": str(write(tmp_path))}, model=RNN, tokenizer=BYTES, train={"steps": 3, "batch_tokens": 400}
    )
    pipeline = weft.train(raw, out=tmp_path / "run")
    assert len(pipeline("the <mask> is")[0]["fills"][0]) == 5
    assert pipeline.head.next is None
