"""What the tests of classify, tag and spelling share."""

import torch

from weft.config.recipes import read_recipe
from weft.config.run import Run
from weft.tasks.factory import build, make_task, resolve_run
from weft.tasks.prepare import fit_tokenizer


def made(recipe, *overrides):
    """Make a recipe's task and head, with the labels of its data and first weights from one seed."""
    run = Run.parse(read_recipe(recipe, overrides))
    run = resolve_run(run, make_task(run))
    tokenizer = fit_tokenizer(run.tokenizer, run.data, make_task(run))
    torch.manual_seed(0)
    return build(run, tokenizer)
