"""ELECTRA's loss against its equations: generator, samples and discriminator, on small models in float64."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from weft.config.run import Run
from weft.models.base import Role
from weft.models.bert import BERT, BERTConfig
from weft.tasks.batch import Batch
from weft.tasks.electra.head import MASKED, ElectraHead, generator_config, make_generator, sample_tokens
from weft.tasks.factory import build
from weft.tokenization.trainable import train_tokenizer
from weft.tokens import Tokens

MASK, VOCAB = 4, 30
TEXTS = [[2, 9, 8, 7, 10, 11, 3], [2, 12, 13, 3]]
AT = [1, 4, 8]  # flat positions: 9, 10 and 12 are masked


def make_head(weight=50.0, seed=0, mlm_weight=0.0, **config):
    torch.manual_seed(seed)
    body = BERT(BERTConfig(name="bert", width=12, heads=3, layers=2, max_positions=9, dropout=0.0, **config), VOCAB)
    body.prune_unused({Role.ENCODER, Role.MASKED_LM} if mlm_weight else {Role.ENCODER})
    return ElectraHead(body, make_generator(body, 0.34, 1), MASK, weight, mlm_weight).double().eval()


def make_batch(padding=0):
    tokens, at = Tokens.pack(TEXTS), torch.tensor(AT)
    positions = Tokens.flat(at, torch.tensor([2, 1]))
    batch = Batch(tokens, tokens.ids[at], {"masked": 3, "replaced": 11}, positions=positions, labels=torch.zeros(2))
    if not padding:
        return batch
    longer = replace(tokens.padded_to(11 + padding, 9, 1, 4), longest=9)
    return replace(
        batch,
        tokens=longer,
        targets=F.pad(batch.targets, (0, 2), value=-100),
        positions=positions.padded_to(5, 5, 1, 5),
        labels=F.pad(batch.labels, (0, 2), value=torch.nan),
    )


def always(head, token):
    """Make the generator sample one token wherever it is asked."""
    with torch.no_grad():
        head.generator.output.bias.fill_(0).index_fill_(0, torch.tensor([token]), 1e4)
    return head


def expected_sums(head, batch, masked_ids, samples):
    """Compute both parts from the equations, a token at a time."""
    corrupted_ids = batch.tokens.ids.clone()
    for place, sample in zip(AT, samples, strict=True):
        corrupted_ids[place] = sample
    log_probs = head.generator.logits(replace(batch.tokens, ids=masked_ids)).log_softmax(-1)
    masked = -sum(log_probs[place, batch.tokens.ids[place]] for place in AT)
    states = head.body.encode(replace(batch.tokens, ids=corrupted_ids))[0]
    replaced = torch.zeros(())
    for place, state in enumerate(states):
        score = head.output(F.gelu(head.dense(state)))[0]
        is_replaced = corrupted_ids[place] != batch.tokens.ids[place]
        replaced = replaced - (score.sigmoid() if is_replaced else 1 - score.sigmoid()).log()
    return masked, replaced


@pytest.mark.parametrize("config", [{}, {"embedding": 8}, {"embedding": 4, "segments": 0}, {"shared": True}], ids=str)
def test_the_loss_is_that_of_the_equations(config):
    head, batch = make_head(weight=7.0, **config), make_batch()
    torch.manual_seed(11)
    sums, carry = head(batch)
    torch.manual_seed(11)
    is_masked = torch.rand(len(AT)) < MASKED
    assert is_masked.tolist() == [True, True, False], "one is left as it is"
    masked_ids = batch.tokens.ids.index_fill(0, torch.tensor(AT)[is_masked], MASK)
    samples = sample_tokens(head.generator.logits(replace(batch.tokens, ids=masked_ids))[AT])
    masked, replaced = expected_sums(head, batch, masked_ids, samples.tolist())
    torch.testing.assert_close(sums["masked"], masked)
    torch.testing.assert_close(sums["replaced"], 7 * replaced)
    assert carry is None
    other = expected_sums(head, batch, masked_ids, [20, 21, 22])[1]
    assert abs(float((other - replaced).detach())) > 1e-4, "the negative control: other samples"


def test_with_mlm_weight_the_body_predicts_the_chosen_tokens_and_masks_are_no_replacements():
    head, batch = always(make_head(weight=7.0, mlm_weight=3.0), 20), make_batch()
    torch.manual_seed(5)
    is_masked = torch.rand(len(AT)) < MASKED
    torch.manual_seed(5)
    _, corrupted = head._corrupt(batch)
    still_masked = corrupted.ids[AT] == MASK
    assert 0 < still_masked.sum() < len(AT), "this seed has both kinds"
    assert corrupted.ids[AT][~still_masked].tolist() == [20] * int((~still_masked).sum())
    labels = head._replaced(batch, corrupted)
    assert labels.isnan().nonzero().flatten().tolist() == torch.tensor(AT)[still_masked].tolist()
    torch.manual_seed(5)
    sums, _ = head(batch)
    masked_ids = batch.tokens.ids.index_fill(0, torch.tensor(AT)[is_masked], MASK)
    generator = F.cross_entropy(
        head.generator.logits(replace(batch.tokens, ids=masked_ids))[AT], batch.targets, reduction="sum"
    )
    body = F.cross_entropy(head.body.logits(corrupted)[AT], batch.targets, reduction="sum")
    torch.testing.assert_close(sums["masked"], generator + 3 * body)
    scores, counted = head.discriminate(corrupted), ~labels.isnan()
    replaced = F.binary_cross_entropy_with_logits(scores[counted], labels[counted].double(), reduction="sum")
    torch.testing.assert_close(sums["replaced"], 7 * replaced)
    plain = make_head(weight=7.0)
    assert MASK not in plain._corrupt(batch)[1].ids.tolist(), "the negative control: ELECTRA itself shows no mask"


def test_a_sampled_token_that_equals_the_original_counts_as_original():
    head, batch = always(make_head(), 10), make_batch()
    _, corrupted = head._corrupt(batch)
    assert corrupted.ids[AT].tolist() == [10, 10, 10]
    replaced = head._replaced(batch, corrupted)
    assert replaced.nonzero().flatten().tolist() == [1, 8], "of the chosen tokens, not the one that is 10 itself"


def test_samples_follow_the_softmax():
    logits = torch.tensor([2.0, 0.0, 1.0, -torch.inf]).expand(20000, 4)
    samples = sample_tokens(logits, torch.Generator().manual_seed(0))
    shares = samples.bincount(minlength=4) / len(samples)
    torch.testing.assert_close(shares, logits[0].softmax(-1), rtol=0, atol=0.015)
    assert shares[3] == 0
    again = sample_tokens(logits, torch.Generator().manual_seed(0))
    assert torch.equal(samples, again)
    assert not torch.equal(samples, sample_tokens(logits, torch.Generator().manual_seed(1)))


def test_sampling_has_no_gradient_and_the_embeddings_have_that_of_both():
    head, batch = make_head(), make_batch()
    gradients = {}
    for part in ("masked", "replaced"):
        head.zero_grad()
        head(batch)[0][part].backward()
        gradients[part] = {name for name, value in head.named_parameters() if value.grad is not None}
    shared = {"body.embed.weight", "body.positions.table.weight", "body.norm.weight", "body.norm.bias"}
    assert shared <= gradients["masked"] & gradients["replaced"]
    assert not any(name.startswith("generator.") for name in gradients["replaced"])
    assert not any(name.startswith("body.encoder.") for name in gradients["masked"])
    assert any(name.startswith("generator.encoder.") for name in gradients["masked"])
    assert gradients["masked"] | gradients["replaced"] == {name for name, _ in head.named_parameters()}


def test_the_gradient_is_that_of_differences():
    head, batch = make_head(weight=3.0), make_batch()
    torch.manual_seed(1)
    directions = [torch.randn_like(value) for value in head.parameters()]

    def moved(step):
        with torch.no_grad():
            for value, direction in zip(head.parameters(), directions, strict=True):
                value.add_(direction, alpha=step)
        torch.manual_seed(2)
        return sum(head(batch)[0].values())

    moved(0.0).backward()
    slope = sum(float((value.grad * d).sum()) for value, d in zip(head.parameters(), directions, strict=True))
    difference = float(moved(1e-6).detach() - moved(-2e-6).detach()) / 2e-6
    assert slope == pytest.approx(difference, rel=1e-5)


def test_what_fills_a_batch_of_one_shape_teaches_nothing():
    results = []
    for batch in (make_batch(), make_batch(padding=5)):
        head = always(make_head(), 10)
        torch.manual_seed(0)
        sums = head(batch)[0]
        sum(sums.values()).backward()
        results.append([*sums.values(), *(value.grad for value in head.parameters())])
    for plain, padded in zip(*results, strict=True):
        torch.testing.assert_close(plain, padded, rtol=1e-9, atol=1e-12)
    wrong = make_batch(padding=5)
    wrong = replace(wrong, labels=wrong.labels.nan_to_num(0))  # the negative control: fillers with a label
    difference = always(make_head(), 10)(wrong)[0]["replaced"] - results[0][1]
    assert abs(float(difference.detach())) > 1e-3


def test_only_the_chosen_positions_meet_the_vocabulary():
    head, batch, rows = make_head(), make_batch(), []
    hook = head.generator.output.register_forward_hook(lambda part, inputs, out: rows.append(len(inputs[0])))
    head(batch)
    hook.remove()
    assert rows == [len(AT)]
    own_size = 2 * (12 * 12 + 12)
    skipped = 2 * (head.generator.transform.weight.numel() + head.generator.embed.weight.numel()) * (11 - len(AT))
    bodies = head.body.flops(batch.tokens) + head.generator.flops(batch.tokens)
    assert head.flops(batch) == bodies + own_size * 11 - skipped


def test_the_generator_has_its_share_of_heads_and_the_embeddings_of_the_model():
    small = BERTConfig(name="bert", width=256, heads=4, layers=12, ffn_width=1024, embedding=128)
    generator = generator_config(small, 0.25, None)
    assert generator.eps > 1e-6, "states that are all but equal must not make gradients infinite"
    assert (generator.width, generator.heads, generator.ffn_width, generator.layers) == (64, 1, 256, 12)
    assert generator.embedding == 128
    base = generator_config(BERTConfig(name="bert"), 1 / 3, 4)
    assert (base.width, base.heads, base.ffn_width, base.layers, base.embedding) == (256, 4, 1024, 4, 768)
    assert generator_config(BERTConfig(name="bert"), 1.0, None).embedding is None, "no projection where none is needed"
    head = make_head()
    for name in ("embed", "positions", "segments", "norm"):
        assert getattr(head.generator, name) is getattr(head.body, name)
    assert head.generator.output.weight is head.body.embed.weight
    assert head.body.pooler is None


def test_without_a_generator_it_only_predicts():
    head = make_head()
    head.generator = None
    with torch.no_grad():
        predicted = head.predict(make_batch(), None)
    assert [len(row) for row in predicted] == [7, 4]
    assert all(0 < score < 1 for row in predicted for score in row)


def test_the_generators_weights_are_saved_and_the_shared_ones_once():
    raw = {
        "task": {"name": "electra"},
        "data": {"train": [], "max_length": 8},
        "tokenizer": {"name": "wordpiece", "size": 40},
        "model": {"name": "bert", "width": 12, "heads": 3, "layers": 1, "max_positions": 9},
        "train": {"steps": 1},
    }
    run = Run.parse(raw)
    _, head = build(run, train_tokenizer(run.tokenizer, iter(["the weft is a thread"])))
    names = [name for name, _ in head.named_parameters()]
    assert "body.embed.weight" in names
    assert not any(name.startswith(("generator.embed", "generator.norm", "generator.positions")) for name in names)
    assert "body.output.weight" not in names, "the discriminator has no output over the vocabulary"
    assert {"dense.weight", "output.weight", "generator.output.bias", "generator.project.weight"} <= set(names)
