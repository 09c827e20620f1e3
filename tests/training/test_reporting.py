"""Records to rows, files and event files."""

import json
import math
from pathlib import Path

import pytest

from weft.errors import CheckpointError
from weft.training.reporting import (
    CheckpointSaved,
    Eval,
    MetricsFile,
    Notice,
    Reporters,
    Step,
    TensorBoard,
    read_metrics,
)


def step(number, **changes):
    fields = {"loss": 0.1 * number, "lr": 0.01, "grad_norm": 1.0, "tokens_per_s": 5.0, "mfu": 0.25, "epoch": 0}
    return Step(**{"step": number, **fields, "elapsed": 1.0, "spent": 0.5, **changes})


def written(path, *records, upto=-1):
    file = MetricsFile(path, upto)
    for record in records:
        file(record)
    file.close()
    return read_metrics(path)


def notice(path, upto):
    file = MetricsFile(path, upto)
    file.close()
    return file.notice


def steps(path):
    return [row["step"] for row in read_metrics(path)]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def test_a_step_is_a_row(path):
    rows = written(path, step(2), step(4, valid={"loss": 0.5}))
    assert [row["step"] for row in rows] == [2, 4]
    assert "valid" not in rows[0]
    assert rows[1]["valid"] == {"loss": 0.5}
    names = {"step", "loss", "lr", "grad_norm", "tokens_per_s", "mfu", "epoch", "elapsed", "spent", "flops"}
    assert names == set(rows[0])


def test_numbers_come_back_exactly(path):
    (row,) = written(path, step(1, loss=0.1 + 0.2, lr=1 / 3))
    assert (row["loss"], row["lr"]) == (0.1 + 0.2, 1 / 3)


@pytest.mark.parametrize("lost", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_null(path, lost):
    (row,) = written(path, step(2, loss=lost, valid={"loss": lost, "bleu": 1.0}))
    assert row["loss"] is None
    assert row["valid"] == {"loss": None, "bleu": 1.0}


def test_other_records_are_no_rows(path):
    assert written(path, Eval(1, {"loss": 1.0}), CheckpointSaved(1, Path("x")), Notice("so")) == []


def test_a_row_is_on_the_disk_at_once(path):
    file = MetricsFile(path, -1)
    file(step(1))
    assert steps(path) == [1]
    file.close()


def test_a_resumed_run_appends_after_its_checkpoint(path):
    written(path, step(2), step(4), step(6), step(8))
    before = path.read_text().splitlines()
    written(path, step(6, loss=9.0), upto=5)
    assert steps(path) == [2, 4, 6]
    assert path.read_text().splitlines()[:2] == before[:2]
    assert read_metrics(path)[-1]["loss"] == 9.0
    assert list(path.parent.iterdir()) == [path]


def test_a_fresh_run_begins_with_an_empty_file(path):
    written(path, step(2))
    written(path, upto=-1)
    assert path.read_text() == ""


@pytest.mark.parametrize("torn", ['{"step": 6, "lo', "{", '{"step": 6, "loss": 0.1}{"st', "\x00\x00"])
def test_a_torn_last_line_is_left_out_and_cut_off(path, torn):
    written(path, step(2), step(4))
    with path.open("a") as file:
        file.write(torn)
    assert steps(path) == [2, 4]
    written(path, step(6), upto=4)
    assert steps(path) == [2, 4, 6]
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_tensorboard_reads_what_is_written(tmp_path, no_tensorboard):
    board = TensorBoard(tmp_path)
    board(step(2))
    board(step(4, valid={"exact_match": 0.25}))
    board(Notice("so"))
    board.close()
    assert no_tensorboard(), "as it is outside of the tests"
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    (events,) = tmp_path.glob("events.out.tfevents.*")
    scalars = {
        (value.tag, event.step): value.tensor.float_val[0]
        for event in EventFileLoader(str(events)).Load()
        for value in event.summary.value
    }
    assert {tag for tag, _ in scalars} == {
        "train/loss", "train/lr", "train/grad_norm", "train/tokens_per_s", "train/mfu",
        "valid/exact_match",
    }  # fmt: skip
    assert scalars["train/loss", 2] == pytest.approx(0.2)
    assert scalars["valid/exact_match", 4] == 0.25


class Listener:
    def __init__(self, heard):
        self.heard = heard

    def __call__(self, record):
        self.heard.append(record)

    def close(self):
        self.heard.append("closed")


def test_several_reporters_are_one():
    heard = [[], []]
    reporters = Reporters(Listener(records) for records in heard)
    reporters(step(1))
    reporters.close()
    assert heard == [[step(1), "closed"]] * 2
    Reporters([])(step(1))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_told_without_a_traceback(path):
    file = MetricsFile(path, -1)
    file._file.close()
    file._file = Path("/dev/full").open("w")  # noqa: SIM115
    with pytest.raises(CheckpointError, match="metrics.jsonl: cannot be written: No space left on device"):
        file(step(1))
    file.close()


def test_rows_that_are_gone_or_are_none_are_told_when_a_run_goes_on(path):
    assert notice(path, -1) == ""
    assert notice(path, 8) == ""  # an empty file: no row was due
    path.unlink()
    assert notice(path, 8) == f"{path}: is missing: it will have no rows of the steps up to 8"
    written(path, step(2), step(4))
    path.write_text("garbage\n" + "[" * 100_000 + "\n" + path.read_text() + '{"step": ' + "9" * 5000 + "}\n")
    assert notice(path, 8) == f"{path}: 3 lines are no rows of metrics, and are left out"
    assert steps(path) == [2, 4]


def test_a_line_that_a_kill_has_cut_is_not_told(path):
    written(path, step(2), step(4))
    path.write_text(path.read_text()[:-5])
    assert notice(path, 8) == ""
    assert steps(path) == [2]


def test_the_remedy_is_that_of_the_error(path):
    path.mkdir()
    with pytest.raises(CheckpointError, match="Is a directory; move what is there, or choose another place"):
        MetricsFile(path, -1)
