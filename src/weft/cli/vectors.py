"""`weft vectors`: evaluate the word vectors of a run or a file, and write them to files of other formats."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.console import JsonOption, TrustOption, print_table, tell
from weft.errors import ConfigError

if TYPE_CHECKING:
    from weft.analysis.word_vectors import WordVectors

vectors_app = typer.Typer(help="Query, evaluate and export word vectors.", no_args_is_help=True)

VectorsArg = Annotated[
    str, typer.Argument(metavar="MODEL", help="A run's directory, or a file of vectors: .txt, .bin, .glove, .vec.")
]
MostOption = Annotated[int, typer.Option("--most", min=1, help="Search only the so many most frequent words.")]
CaseOption = Annotated[bool, typer.Option("--case", help="Distinguish upper and lower case.")]


@vectors_app.command("neighbours")
def vectors_neighbours(
    model: VectorsArg,
    words: Annotated[list[str], typer.Argument(metavar="WORD", help="Words to find neighbours of.")],
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="How many of each.")] = 10,
    as_json: JsonOption = False,
    trust: TrustOption = False,
) -> None:
    """List the words whose vectors have the highest cosine with a word's."""
    vectors = _read_vectors(model, trust)
    for word in words:
        nearest = vectors.neighbours(word, count)
        if as_json:
            pairs = [[other, round(cosine, 6)] for other, cosine in nearest]
            typer.echo(json.dumps({"word": word, "neighbours": pairs}, ensure_ascii=False))
        else:
            print_table([word, "cosine"], [[other, f"{cosine:.4f}"] for other, cosine in nearest])


@vectors_app.command("analogies")
def vectors_analogies(
    model: VectorsArg,
    file: Annotated[str, typer.Argument(metavar="FILE", help="Questions, such as question-words.txt.")],
    most: MostOption = 300_000,
    case: CaseOption = False,
    as_json: JsonOption = False,
    trust: TrustOption = False,
) -> None:
    """Answer questions "a is to b as c is to …", and print the accuracy by section."""
    result = _read_vectors(model, trust).analogies(file, most, fold=not case)
    sections = [*result.sections, *result.kinds, result.total]
    if as_json:
        scores = {
            section.name: {"accuracy": section.accuracy, "correct": section.correct, "asked": section.asked}
            for section in sections
        }
        typer.echo(json.dumps({"sections": scores, "unknown": result.unknown}, ensure_ascii=False))
        return
    rows = [[section.name, f"{section.accuracy:.1%}", str(section.correct), str(section.asked)] for section in sections]
    print_table(["section", "accuracy", "correct", "questions"], rows)
    tell(f"{result.unknown:,} questions have an unknown word and are left out")


@vectors_app.command("similarity")
def vectors_similarity(
    model: VectorsArg,
    files: Annotated[
        list[str], typer.Argument(metavar="FILE", help="Pairs of words, with ratings of their similarity.")
    ],
    most: MostOption = 300_000,
    case: CaseOption = False,
    as_json: JsonOption = False,
    trust: TrustOption = False,
) -> None:
    """Correlate cosines with human ratings: WordSim-353, SimLex-999 and others, of tab-separated columns."""
    vectors, rows = _read_vectors(model, trust), []
    for file in files:
        result = vectors.similarity(file, most, fold=not case)
        if as_json:
            scores = {"spearman": result.spearman, "pearson": result.pearson}
            typer.echo(json.dumps({"file": file, **scores, "pairs": result.pairs, "unknown": result.unknown}))
        share = f"{100 * result.unknown:.1f}%"
        rows.append([Path(file).name, f"{result.spearman:.4f}", f"{result.pearson:.4f}", str(result.pairs), share])
    if not as_json:
        print_table(["file", "Spearman", "Pearson", "pairs", "unknown"], rows)


@vectors_app.command("export")
def vectors_export(
    model: VectorsArg,
    out: Annotated[str, typer.Argument(metavar="OUT", help="The file: .txt, .bin or .glove; .gz too.")],
    format: Annotated[
        str | None, typer.Option("--format", help="word2vec, binary or glove; by default, by the ending of OUT.")
    ] = None,
    as_json: JsonOption = False,
    trust: TrustOption = False,
) -> None:
    """Write vectors to a file in a format that other tools read."""
    from weft.data.word_vectors.write import vector_format, write_vectors

    file_format, vectors = vector_format(out, format), _read_vectors(model, trust)
    rows = [row for row, word in enumerate(vectors.words) if word and not any(map(str.isspace, word))]
    write_vectors(out, [vectors.words[row] for row in rows], vectors.rows[rows], file_format)
    left_out = len(vectors.words) - len(rows)
    if as_json:
        typer.echo(json.dumps({"file": out, "format": file_format, "vectors": len(rows), "left_out": left_out}))
        return
    note = f"; {left_out:,} tokens with a space in them are left out" if left_out else ""
    typer.echo(f"{len(rows):,} vectors of {vectors.rows.shape[1]} numbers in {out} ({file_format}){note}")


def _read_vectors(model: str, trust: bool) -> "WordVectors":
    """Return the vectors of a file, or the token embeddings of a run's model."""
    from weft.analysis.word_vectors import WordVectors

    if not Path(model).is_dir():
        from weft.data.word_vectors.read import read_table

        return WordVectors(*read_table(model))
    from torch import nn

    from weft.pipeline import load

    pipeline = load(model, "cpu", trust)
    embed = getattr(pipeline.head.body, "embed", None)
    if not isinstance(embed, nn.Embedding):
        raise ConfigError(
            f"{model}: the model {pipeline.run.model.name!r} has no word vectors; give a word2vec run, or a file"
        )
    special = {pipeline.tokenizer.specials.bos, pipeline.tokenizer.specials.eos, pipeline.tokenizer.specials.unk}
    ids = [id for id in range(len(pipeline.tokenizer)) if id not in special]
    # A space at the start of a token becomes ▁, as in SentencePiece: words in files of vectors have no spaces.
    words = [pipeline.tokenizer.token(id).replace(" ", "▁") for id in ids]
    return WordVectors(words, embed.weight.detach()[ids].numpy())
