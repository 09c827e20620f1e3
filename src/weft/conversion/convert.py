"""Conversion between checkpoint formats, chosen by the paths of source and target, with a parity report.

    Hugging Face directory -> weft checkpoint        weft checkpoint -> Hugging Face directory
    .arpa, .arpa.gz        -> weft checkpoint        an n-gram's checkpoint -> .arpa, .arpa.gz
    a folder of ELMo's options.json and weights (.hdf5) -> weft checkpoint
    any model that weft loads, an encoder -> .onnx

The result is loaded again, and both models run on a sample; where `transformers` is installed, it runs on it, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from weft.checkpoint.atomic_io import new_files, wrap_os_errors
from weft.conversion.parity import ParityCheck, compare_models
from weft.errors import CheckpointError, ConfigError
from weft.formats.huggingface.folder import is_hf, save_hf
from weft.formats.huggingface.hub import find_model
from weft.formats.sentence_transformers import export_pooling, transformer_folder
from weft.pipeline import Pipeline, load
from weft.tasks.contrastive import Contrastive
from weft.tasks.feature_extraction import Embed, EmbedConfig

ARPA, ONNX = (".arpa", ".arpa.gz"), ".onnx"


@dataclass(frozen=True)
class ConversionReport:
    """The path that was written, and the comparisons that were made."""

    path: Path
    checks: Sequence[ParityCheck] = ()
    kept: bool = True  # whether what was written stays there, also where it differs

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return the headers and rows of a table."""
        rows = [row for check in self.checks for row in check.rows()]
        return ["compared", "with", "numbers", "largest difference", "allowed"], rows

    def largest(self) -> str:
        """Describe the largest difference relative to its tolerance."""
        worst = max(self.checks, key=lambda check: check.difference / check.tolerance)
        return f"largest difference: {worst.difference:.1e}, in {worst.quantity}, with {worst.against}"

    def demand(self) -> None:
        """Raise an error if a difference exceeds its tolerance."""
        for check in self.checks:
            if not check.matches:
                raise CheckpointError(
                    f"{self.path}: {check.quantity} differ by {check.difference:.3g} from those of {check.against}, "
                    f"where {check.tolerance:.1g} is allowed; "
                    + ("it is left there to be looked at" if self.kept else "nothing was written")
                )


def convert(source: str | Path, target: str | Path, task: str | None = None) -> ConversionReport:
    """Convert a model, of several tasks the one that `task` names, into a new file or folder, and compare both."""
    source_path, target_path = Path(source), Path(target)
    if str(source_path).endswith(ARPA) or str(target_path).endswith(ARPA):
        _check_no_task(task, "an n-gram model")
        from weft.formats.arpa import export_arpa, import_arpa

        return ConversionReport(
            (import_arpa if str(source_path).endswith(ARPA) else export_arpa)(source_path, target_path)
        )
    if source_path.suffix == ONNX:
        raise CheckpointError(
            f"{source}: weft writes ONNX models, and reads none; give the model that it was made from"
        )
    if target_path.suffix == ONNX:
        return _export_onnx(source_path, target_path, task)
    source_path = find_model(source_path)
    if any(source_path.glob("*.hdf5")):
        _check_no_task(task, "an ELMo")
        return ConversionReport(_import_elmo_folder(source_path, target_path))
    original = load(source_path, device="cpu").for_task(task)
    source_path = transformer_folder(source_path)
    if is_hf(source_path):
        original.save(target_path)
        return ConversionReport(target_path, compare_models(original, load(target_path, device="cpu"), source_path))
    original = _without_projection(original)
    save_hf(target_path, original.run, original.tokenizer, original.head)
    if original.pooling is not None:
        export_pooling(target_path, original.pooling, original.head.body.width)
    return ConversionReport(target_path, compare_models(original, load(target_path, device="cpu"), target_path))


def _check_no_task(task: str | None, model: str) -> None:
    if task is not None:
        raise ConfigError(f"task: {task!r} is named, but {model} has one task alone; leave it out")


def _export_onnx(source: Path, target: Path, task: str | None) -> ConversionReport:
    """Export an encoder with its head, and its tokenizer beside it; nothing is left where the two models differ."""
    package = find_spec("onnx")
    if package is None or package.origin is None:  # a folder of this name has none
        raise ConfigError("an .onnx needs onnx, which is not installed: pip install 'weft[onnx]'")
    if target.exists():
        raise CheckpointError(f"{target}: exists already; choose a new name")
    from weft.conversion.parity_onnx import compare_onnx
    from weft.formats.onnx.export import check_exportable, write_onnx

    original = _without_projection(load(source, device="cpu").for_task(task))
    check_exportable(original.run)
    problem, remedy = "cannot be written", "choose a folder where you may write"
    with wrap_os_errors(target, problem, remedy), new_files(target.parent) as folder:
        write_onnx(folder, target.name, original.run, original.tokenizer, original.head, original.pooling)
        report = ConversionReport(target, compare_onnx(original, folder / target.name), kept=False)
        report.demand()
    return report


def _without_projection(pipeline: Pipeline) -> Pipeline:
    """Return a model of sentence vectors as a bare encoder with its pooling; another model as it is."""
    if not isinstance(pipeline.task, Contrastive) or pipeline.pooling is None:
        return pipeline
    config = EmbedConfig(name="embed", pooler=False)
    task, run = Embed(config), pipeline.run.model_copy(update={"task": config})
    task.tokenizer = pipeline.tokenizer
    pooling = replace(pipeline.pooling, longest=pipeline.embedder().longest)
    return replace(pipeline, run=run, task=task, head=task.head(pipeline.head.body).eval(), pooling=pooling)


def _import_elmo_folder(folder: Path, target: Path) -> Path:
    """Import a folder of ELMo's published files: options, weights, and optionally a vocabulary of words."""
    from weft.formats.elmo import import_elmo

    options, weights, words = (sorted(folder.glob(pattern)) for pattern in ("*options.json", "*.hdf5", "*vocab*.txt"))
    if len(options) != 1 or len(weights) != 1 or len(words) > 1:
        names = ", ".join(path.name for path in (*options, *weights, *words))
        raise CheckpointError(
            f"{folder}: must hold one ELMo, that is one *options.json, one *.hdf5 and at most one *vocab*.txt, but has "
            f"{names}; put them into a folder of their own"
        )
    return import_elmo(options[0], weights[0], target, words[0] if words else None)
