"""Muon beside torch's own, and its orthogonalisation beside a singular value decomposition."""

import pytest
import torch
from torch import nn

import weft
from weft.config.schema import Train
from weft.errors import ConfigError
from weft.training.finetuning import hidden_matrices
from weft.training.muon import Muon, orthogonalize
from weft.training.optim import make_optimizer

SHAPES = [(6, 6), (9, 4), (4, 9), (6, 6)]


def matrices(seed=0):
    torch.manual_seed(seed)
    return nn.ParameterList([nn.Parameter(torch.randn(*shape)) for shape in SHAPES])


def set_gradients(parameters, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def muon(parameters, **settings):
    train = Train(**{"steps": 1, "optimizer": "muon", "lr": 0.02, "weight_decay": 0.1, **settings})
    return make_optimizer(parameters, train, hidden=set(parameters))


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 16, 5), (4, 5, 16)])
def test_singular_vectors_stay_and_singular_values_come_near_one(shape):
    torch.manual_seed(1)
    given = torch.randn(shape, dtype=torch.float64)
    left, values, right = torch.linalg.svd(given, full_matrices=False)
    # A singular value s of the normalised matrix becomes p(p(… s)), the iteration on numbers.
    numbers = values / values.norm(dim=-1, keepdim=True)
    for _ in range(5):
        numbers = 3.4445 * numbers - 4.7750 * numbers**3 + 2.0315 * numbers**5
    expected = left @ torch.diag_embed(numbers) @ right
    assert torch.allclose(orthogonalize(given), expected, atol=1e-9)
    assert ((numbers > 0.6) & (numbers < 1.3)).all()
    assert not torch.allclose(given / values.mean(), expected, atol=0.1), "the matrices must not be orthogonal already"


def test_updates_are_those_of_torch():
    ours, theirs = matrices(), matrices()
    optimizer = muon(ours)
    plain = torch.optim.Muon(list(theirs), lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    before = [parameter.detach().clone() for parameter in ours]
    for seed in range(4):
        set_gradients(ours, seed)
        set_gradients(theirs, seed)
        optimizer.step()
        plain.step()
    for first, a, b in zip(before, ours, theirs, strict=True):
        moved = (b - first).norm()
        assert (a - b).norm() < 0.03 * moved  # torch's iteration is in bf16, of 8 bits
        assert moved > 0.05


def test_the_other_parameters_are_adamws():
    parameters, alone = nn.Linear(4, 3), nn.Linear(4, 3)
    alone.load_state_dict(parameters.state_dict())
    train = Train(steps=1, optimizer="muon", lr=0.02)
    optimizer = make_optimizer(parameters, train, hidden={parameters.weight})
    plain = make_optimizer(alone, train.model_copy(update={"optimizer": "adamw"}))
    for _ in range(3):
        inputs = torch.randn(5, 4)
        for module, chosen in ((parameters, optimizer), (alone, plain)):
            module.weight.grad, module.bias.grad = inputs.new_ones(3, 4), inputs.sum(0)[:3].clone()
            chosen.step()
    assert torch.equal(parameters.bias, alone.bias)
    assert not torch.allclose(parameters.weight, alone.weight, atol=1e-3)


def test_an_update_that_is_skipped_changes_nothing():
    parameters, optimizer = matrices(), None
    optimizer = muon(parameters)
    set_gradients(parameters, 0)
    optimizer.step()
    before = [
        (parameter.detach().clone(), optimizer.state[parameter]["momentum_buffer"].clone()) for parameter in parameters
    ]
    for parameter in parameters:
        parameter.grad.fill_(torch.nan)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    for parameter, (weight, momentum) in zip(parameters, before, strict=True):
        assert torch.equal(parameter, weight)
        assert torch.equal(optimizer.state[parameter]["momentum_buffer"], momentum)
    optimizer.found_inf = torch.zeros(())
    set_gradients(parameters, 1)
    optimizer.step()
    assert not torch.equal(parameters[0], before[0][0])


def recipe(tmp_path, **train):
    (tmp_path / "text.txt").write_text("a b c d e f g\n" * 40)
    return {
        "task": {"name": "lm"},
        "data": {"train": str(tmp_path / "text.txt"), "max_length": 16},
        "tokenizer": {"name": "words"},
        "model": {"name": "gpt", "width": 8, "heads": 2, "layers": 2, "max_positions": 16, "dropout": 0.0},
        "train": {"steps": 20, "batch_tokens": 64, "device": "cpu", "optimizer": "muon", "lr": 0.01, **train},
    }


def test_it_is_chosen_by_a_recipe_for_the_layers_and_not_for_embeddings(tmp_path):
    model = weft.train(recipe(tmp_path), out=tmp_path / "run")
    hidden = hidden_matrices(model.head)
    names = {name for name, parameter in model.head.named_parameters() if parameter in hidden}
    assert names
    assert all("decoder.blocks" in name and name.endswith("weight") for name in names)
    assert {parameter.ndim for parameter in hidden} == {2}


def test_without_hidden_matrices_it_is_refused():
    train = Train(steps=1, optimizer="muon")
    with pytest.raises(ConfigError, match=r"train.optimizer: muon updates the matrices of hidden layers"):
        make_optimizer(nn.Linear(2, 2), train)
    assert isinstance(muon(matrices()), Muon)
