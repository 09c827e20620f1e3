"""Properties of every model, by its roles; `weft.testing` checks them.

Two outputs are equal here if no value of one differs from the other's by more than TOLERANCE of the largest magnitude
among them. Bitwise equality is not required: the matrix kernel that a library chooses, and so its order of summation,
depends on the shapes of a batch and on the CPU, and other tokens may mean other shapes (ELMo encodes each distinct word
of a batch once). A sum of n products in another order differs by at most about n eps of its magnitude, eps = 2.2e-16 in
float64: 4e-15 of the magnitude is the most in weft's models up to 12 layers of width 256, and a norm that divides by
a small number may multiply it by a thousand. A wrong index, mask or state changes an output by a fraction of itself.

Bitwise equal are outputs for the same input: repeated, from saved weights, and from a state that was used before.
"""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file
from torch import Tensor

from weft.checkpoint.contents import load_weights, weights
from weft.models.base import Role
from weft.testing.case import LENGTHS, SOURCE_LENGTHS, Answers, Case

TOLERANCE = 1e-9  # of the magnitude: far above float64 rounding, far below the effect of a wrong index or mask
Check = Callable[[Case], None]  # raises AssertionError if a property does not hold


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def _difference(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference, as a share of the largest finite magnitude; NaN if a value is NaN."""
    # -inf equals -inf, NaN differs from everything.
    difference = torch.where(actual == expected, 0.0, (actual - expected).abs())
    finite = expected[expected.isfinite()].abs()
    largest = float(difference.max()) if difference.numel() else 0.0
    return largest / (float(finite.max()) or 1.0) if finite.numel() else largest


def _expect_equal(actual: Tensor, expected: Tensor, what: str, exact: bool = False) -> None:
    shapes = tuple(actual.shape), tuple(expected.shape)
    _expect(shapes[0] == shapes[1], f"{what} must have the shape {shapes[1]}, but has {shapes[0]} instead")
    difference, allowed = _difference(actual, expected), 0.0 if exact else TOLERANCE
    _expect(difference <= allowed, f"{what} differs by {difference:.3g} of its magnitude, where {allowed:g} is allowed")


def _expect_equal_answers(actual: Answers, expected: Answers, exact: bool = False) -> None:
    for method, rows in actual.items():
        for number, pair in enumerate(zip(rows, expected[method], strict=True)):
            _expect_equal(*pair, f"{method} of sequence {number} in a batch of {len(rows)}", exact)


def _expect_changed(new: Tensor, old: Tensor, position: int, changed: int) -> None:
    depends = _difference(new[position], old[position]) > TOLERANCE
    _expect(depends, f"position {position} does not depend on position {changed}")


def the_config_reads_back_from_what_it_dumps(case: Case) -> None:
    """A validator that changes its input, or refuses its own output."""
    for dump in (case.config.model_dump(), case.config.model_dump(mode="json", exclude_none=True)):
        config = type(case.config).model_validate(dump)
        _expect(config == case.config, f"{case.config!r} is read back as {config!r}")


def the_roles_are_a_set_of_roles(case: Case) -> None:
    """Names in place of members of weft.models.base.Role."""
    valid = isinstance(case.roles, set | frozenset) and all(isinstance(role, Role) for role in case.roles)
    _expect(valid and bool(case.roles), f"roles(config) is {case.roles!r}")


def every_parameter_is_finite(case: Case) -> None:
    """A torch.empty with no initialisation after it."""
    for name, value in case.model.named_parameters():
        _expect(bool(value.isfinite().all()), f"{name} is not finite")


def every_answer_has_its_shape(case: Case) -> None:
    """Flat (N, ...) taken for batch (B, ...), the source's vocabulary for the target's, `layers` or `width` ignored."""
    width = case.model.width if Role.ENCODER in case.roles else 0
    for method, outputs in case.answers(case.rows, case.sources).items():
        lengths = SOURCE_LENGTHS if method == "encode" and Role.SEQ2SEQ in case.roles else LENGTHS
        for steps, output in zip(lengths, outputs, strict=True):
            vocab = case.target_vocab
            shapes = {"start": (vocab,), "encode": (2, steps, width), "summary": (width,)}
            shape, expected = tuple(output.shape), shapes.get(method, (steps, vocab))
            _expect(shape == expected, f"{method} of {steps} tokens must be {expected}, but is {shape} instead")


def every_parameter_gets_a_gradient(case: Case) -> None:
    """A parameter that no output uses, or one cut off by detach() or no_grad()."""
    trained = {name: value for name, value in case.model.named_parameters() if value.requires_grad}
    with torch.enable_grad():
        answers = case.answers(case.rows, case.sources).values()
        loss = torch.stack([output.square().sum() for outputs in answers for output in outputs]).sum()
        grads = torch.autograd.grad(loss, list(trained.values()), allow_unused=True) if trained else ()
    for name, grad in zip(trained, grads, strict=True):
        _expect(grad is not None, f"{name} gets no gradient")
        _expect(bool(grad.isfinite().all()), f"the gradient of {name} is not finite")


def the_same_input_twice_gives_the_same_answers(case: Case) -> None:
    """Dropout that ignores self.training, or a cache that is kept between calls."""
    _expect_equal_answers(case.answers(case.rows, case.sources), case.answers(case.rows, case.sources), exact=True)


def saved_weights_give_the_same_answers(case: Case) -> None:
    """A tensor that is neither a parameter nor a saved buffer."""
    fresh, saved = case.fresh(), {name: value.contiguous() for name, value in weights(case.model).items()}
    with TemporaryDirectory() as folder:
        save_file(saved, Path(folder) / "model.safetensors")
        load_weights(Path(folder), fresh)
    _expect_equal_answers(
        case.answers(case.rows, case.sources, fresh), case.answers(case.rows, case.sources), exact=True
    )


def a_sequence_alone_answers_as_in_any_batch(case: Case) -> None:
    """A mean, a norm or a softmax that runs over the whole batch, or over padding."""
    alone = [case.answers([row], [source]) for row, source in zip(case.rows, case.sources, strict=True)]
    for picked in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 0], [2, 2, 1]):
        together = case.answers([case.rows[row] for row in picked], [case.sources[row] for row in picked])
        expected = {method: [alone[row][method][0] for row in picked] for method in together}
        _expect_equal_answers(together, expected)


def the_flops_of_a_batch_are_those_of_its_sequences(case: Case) -> None:
    """Padding that is counted, as if all sequences were as long as the longest, or pairs of tokens of two sequences."""
    together = case.model.flops(*case.reads(case.rows, case.sources))
    apart = [
        case.model.flops(*case.reads([row], [source])) for row, source in zip(case.rows, case.sources, strict=True)
    ]
    _expect(together == sum(apart), f"flops are {together} for the batch, {sum(apart)} for its sequences one by one")


def future_tokens_change_nothing(case: Case) -> None:
    """Attention without a causal mask, a backward direction, or a mean over the whole sequence."""
    before = case.answers(case.rows, case.sources)["forward logits"]
    for cut in range(1, max(LENGTHS)):
        changed = [[*row[:cut], *((token + 1) % case.target_vocab for token in row[cut:])] for row in case.rows]
        after = case.answers(changed, case.sources)["forward logits"]
        ended = case.answers([row[:cut] for row in case.rows], case.sources)["forward logits"]
        for old, new, short in zip(before, after, ended, strict=True):
            _expect_equal(new[:cut], old[:cut], f"the logits before position {cut}, when the ids from there on change,")
            _expect_equal(short, old[:cut], f"the logits before position {cut}, when sequences end there,")


def past_tokens_change_nothing(case: Case) -> None:
    """A recurrence in the wrong direction, or a mean over the whole sequence."""
    before = case.answers(case.rows, case.sources)["backward logits"]
    for cut in range(1, max(LENGTHS)):
        changed = [[*((token + 1) % case.target_vocab for token in row[:cut]), *row[cut:]] for row in case.rows]
        after = case.answers(changed, case.sources)["backward logits"]
        begun = case.answers([row[cut:] for row in case.rows], case.sources)["backward logits"]
        for old, new, short in zip(before, after, begun, strict=True):
            _expect_equal(new[cut:], old[cut:], f"the logits from position {cut} on, when the ids before it change,")
            _expect_equal(short, old[cut:], f"the logits from position {cut} on, when sequences begin there,")


def a_position_depends_on_both_sides_but_not_on_itself(case: Case) -> None:
    """Directions that read the token they predict, or are mixed below the last layer; one direction left out."""
    before = case.answers(case.rows, case.sources)["both logits"]
    for position in range(max(LENGTHS)):
        changed = [list(row) for row in case.rows]
        for row in changed:
            row[position : position + 1] = [(token + 1) % case.target_vocab for token in row[position : position + 1]]
        for old, new in zip(before, case.answers(changed, case.sources)["both logits"], strict=True):
            span = slice(position, position + 1)
            _expect_equal(new[span], old[span], f"the logits of position {position}, when it changes,")
            for near in {position - 1, position + 1} & set(range(len(old) if position < len(old) else 0)):
                _expect_changed(new, old, near, position)


def every_position_depends_on_its_whole_sequence(case: Case) -> None:
    """A causal mask, or attention that does not reach the ends; a mean over the whole batch, where others change."""
    before = case.answers(case.rows, case.sources)["masked logits"]
    for row, position in ((row, position) for row, length in enumerate(LENGTHS) for position in range(length)):
        changed = [list(ids) for ids in case.rows]
        changed[row][position] = (changed[row][position] + 1) % case.target_vocab
        after = case.answers(changed, case.sources)["masked logits"]
        for number, (old, new) in enumerate(zip(before, after, strict=True)):
            if number != row:
                _expect_equal(new, old, f"the logits of sequence {number}, when another one changes,")
            for other in range(len(old) if number == row else 0):
                _expect_changed(new, old, other, position)


def at_gives_the_rows_of_the_whole(case: Case) -> None:
    """`at` ignored, or counted within each sequence: its positions are those of flat (N,)."""
    at, reads = torch.tensor([9, 0, 4, 4, sum(LENGTHS) - 1]), case.reads(case.rows, case.sources)
    for direction in case.directions:
        _expect_equal(case.logits(reads, direction, at), case.logits(reads, direction)[at], "logits(at=...)")


def the_source_matters(case: Case) -> None:
    """The source is not read, or its encoding reaches no output."""
    before = case.answers(case.rows, case.sources)
    for method, outputs in case.answers(case.rows, case.other_sources).items():
        for number, (new, old) in enumerate(zip(outputs, before[method], strict=True)):
            _expect(_difference(new, old) > TOLERANCE, f"{method} of sequence {number} is the same for another source")


def the_sources_of_others_change_nothing(case: Case) -> None:
    """Attention over the whole batch, or sources in another order than the tokens."""
    before, others = case.answers(case.rows, case.sources), case.other_sources
    for number, source in enumerate(case.sources):
        for method, outputs in case.answers(case.rows, [*others[:number], source, *others[number + 1 :]]).items():
            _expect_equal(outputs[number], before[method][number], f"{method} of sequence {number}")


def start_and_step_agree_with_reading_all_at_once(case: Case) -> None:
    """A position that is off by one, or ragged prompts that do not each end at their own last token."""
    rows, (logits, state) = case.rows, case.model.start(*case.reads(case.rows, case.sources))
    _expect_equal(logits, case.following(rows, case.sources), "start")
    for number in range(1, 5):
        rows = [[*row, *case.draw(1)] for row in rows]
        logits, state = case.model.step(torch.tensor([row[-1] for row in rows]), state)
        _expect_equal(logits, case.following(rows, case.sources), f"step {number}")


def select_reorders_repeats_and_drops_rows(case: Case) -> None:
    """A tensor of the state that select leaves out, or as many rows as asked for, but the wrong ones."""
    for picked in ([2, 0, 3, 1], [1, 1, 3, 0, 3, 2], [3]):
        rows, sources, (_, state) = case.rows, case.sources, case.model.start(*case.reads(case.rows, case.sources))
        for choice in (picked, list(range(len(picked)))[::-1]):  # the second selection is from the selected rows
            rows, sources = [[*rows[row], *case.draw(1)] for row in choice], [sources[row] for row in choice]
            logits, state = case.model.step(torch.tensor([row[-1] for row in rows]), state.select(torch.tensor(choice)))
            _expect_equal(logits, case.following(rows, sources), f"step after select({choice})")


def a_state_is_a_value_that_nothing_changes(case: Case) -> None:
    """Step or select that writes into the tensors of the state that it is given."""
    ids, step = torch.tensor(case.draw(len(LENGTHS))), case.model.step
    _, state = case.model.start(*case.reads(case.rows, case.sources))
    (first, after), other = step(ids, state), (ids + 1) % case.target_vocab
    second, _ = step(ids, after)
    step(ids, step(other, state)[1])  # step on from a sibling state
    step(other[:3], state.select(torch.tensor([3, 0, 0])))
    _expect_equal(step(ids, after)[0], second, "a second step from a state, after a step from a sibling", exact=True)
    _expect_equal(
        step(ids, state)[0], first, "a second step from a state, after other steps and a selection from it", exact=True
    )


PROPERTIES: dict[Check, set[Role | str]] = {  # in the order of checks, with the roles and directions that require it
    the_config_reads_back_from_what_it_dumps: set(),
    the_roles_are_a_set_of_roles: set(),
    every_parameter_is_finite: set(),
    every_answer_has_its_shape: set(),
    every_parameter_gets_a_gradient: set(),
    the_same_input_twice_gives_the_same_answers: set(),
    saved_weights_give_the_same_answers: set(),
    a_sequence_alone_answers_as_in_any_batch: set(),
    the_flops_of_a_batch_are_those_of_its_sequences: set(),
    future_tokens_change_nothing: {Role.LANGUAGE_MODEL, "forward"},
    past_tokens_change_nothing: {Role.LANGUAGE_MODEL, "backward"},
    a_position_depends_on_both_sides_but_not_on_itself: {Role.MASKED_LM, "both"},
    every_position_depends_on_its_whole_sequence: {Role.MASKED_LM, "masked"},
    at_gives_the_rows_of_the_whole: {Role.LANGUAGE_MODEL},
    the_source_matters: {Role.SEQ2SEQ},
    the_sources_of_others_change_nothing: {Role.SEQ2SEQ},
    start_and_step_agree_with_reading_all_at_once: {Role.GENERATOR},
    select_reorders_repeats_and_drops_rows: {Role.GENERATOR},
    a_state_is_a_value_that_nothing_changes: {Role.GENERATOR},
}
