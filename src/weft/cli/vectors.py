"""`weft vectors`: query and evaluate the word vectors of a run or a file, and write them to files of other formats."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.console import JsonOption, TrustOption, print_table, tell
from weft.config.json import write_json
from weft.errors import ConfigError, DataError

if TYPE_CHECKING:
    from weft.analysis.word_vectors import WordVectors

vectors_app = typer.Typer(help="Query, evaluate and export word vectors.", no_args_is_help=True)

VectorsArg = Annotated[
    str, typer.Argument(metavar="MODEL", help="A run's directory, or a file of vectors: .txt, .bin, .glove, .vec.")
]
MostOption = Annotated[int, typer.Option("--most", min=1, help="Search only the so many most frequent words.")]
CaseOption = Annotated[bool, typer.Option("--case", help="Distinguish upper and lower case.")]


CountOption = Annotated[int, typer.Option("--count", "-n", min=1, help="How many words to list.")]


@vectors_app.command("neighbours")
def vectors_neighbours(
    model: VectorsArg,
    words: Annotated[list[str], typer.Argument(metavar="WORD", help="Words to find neighbours of.")],
    count: CountOption = 10,
    as_json: JsonOption = False,
    trust: TrustOption = False,
) -> None:
    """List the words whose vectors have the highest cosine with a word's."""
    vectors = _load(model, trust)
    for word in words:
        _print_nearest(vectors.most_similar(word, topn=count), word, {"word": word}, as_json)


@vectors_app.command("analogies")
def vectors_analogies(
    model: VectorsArg,
    questions: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE | A B C", help="Questions, such as question-words.txt; or three words: A - B + C."
        ),
    ],
    count: CountOption = 10,
    most: MostOption = 300_000,
    case: CaseOption = False,
    as_json: JsonOption = False,
    trust: TrustOption = False,
) -> None:
    """Answer questions "a is to b as c is to …" of a file, by section; or list the words nearest to A - B + C."""
    if len(questions) == 3:
        a, b, c = questions
        query = {"positive": [a, c], "negative": [b]}
        nearest = _load(model, trust).most_similar(**query, topn=count, restrict_vocab=most)
        _print_nearest(nearest, f"{a} - {b} + {c}", query, as_json)
        return
    if len(questions) != 1:
        raise ConfigError(
            f"analogies: takes one file of questions, or three words such as king man woman for king - man + woman, "
            f"but has {len(questions)} arguments: {' '.join(questions)}"
        )
    vectors = _load(model, trust)
    _check_file(questions[0], "a file of questions, or three words: king man woman")
    _evaluate_analogies(vectors, questions[0], most, case, as_json)


def _evaluate_analogies(vectors: "WordVectors", file: str, most: int, case: bool, as_json: bool) -> None:
    """Print the accuracy on each section of a file."""
    result = vectors.evaluate_word_analogies(file, most, fold=not case)
    sections = [*result.sections, *result.kinds, result.total]
    if as_json:
        scores = {
            section.name: {"accuracy": section.accuracy, "correct": section.correct, "asked": section.asked}
            for section in sections
        }
        typer.echo(write_json({"sections": scores, "unknown": result.unknown}))
        return
    rows = [[section.name, f"{section.accuracy:.1%}", str(section.correct), str(section.asked)] for section in sections]
    print_table(["section", "accuracy", "correct", "questions"], rows)
    tell(f"{result.unknown:,} questions have an unknown word and are left out")


@vectors_app.command("similarity")
def vectors_similarity(
    model: VectorsArg,
    pairs: Annotated[
        list[str],
        typer.Argument(metavar="FILE... | A B", help="Pairs of words, with ratings of their similarity; or two words."),
    ],
    most: MostOption = 300_000,
    case: CaseOption = False,
    as_json: JsonOption = False,
    trust: TrustOption = False,
) -> None:
    """Correlate cosines with human ratings (WordSim-353, SimLex-999 and others); or print the cosine of two words."""
    vectors = _load(model, trust)
    if len(pairs) == 2 and not any(_is_file(name, vectors) for name in pairs):
        cosine = vectors.similarity(*pairs)
        answer = write_json({"words": pairs, "cosine": round(cosine, 6)})
        typer.echo(answer if as_json else f"{cosine:.4f}")
        return
    for file in pairs:
        _check_file(file, "files of pairs with ratings, or two words: cat dog")
    _evaluate_pairs(vectors, pairs, most, case, as_json)


def _evaluate_pairs(vectors: "WordVectors", files: list[str], most: int, case: bool, as_json: bool) -> None:
    """Print the correlation on each file."""
    rows = []
    for file in files:
        result = vectors.evaluate_word_pairs(file, most, fold=not case)
        if as_json:
            scores = {"spearman": result.spearman, "pearson": result.pearson}
            typer.echo(write_json({"file": file, **scores, "pairs": result.pairs, "unknown": result.unknown}))
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

    file_format, vectors = vector_format(out, format), _load(model, trust)
    rows = [row for row, word in enumerate(vectors.words) if word and not any(map(str.isspace, word))]
    write_vectors(out, [vectors.words[row] for row in rows], vectors.rows[rows], file_format)
    left_out = len(vectors.words) - len(rows)
    if as_json:
        typer.echo(write_json({"file": out, "format": file_format, "vectors": len(rows), "left_out": left_out}))
        return
    note = f"; {left_out:,} tokens with a space in them are left out" if left_out else ""
    typer.echo(f"{len(rows):,} vectors of {vectors.rows.shape[1]} numbers in {out} ({file_format}){note}")


def _load(model: str, trust: bool) -> "WordVectors":
    from weft.vectors import load

    return load(model, trust)


def _is_file(name: str, vectors: "WordVectors") -> bool:
    """Return whether a name is a file's and no word: it exists, or it has an ending and is no known word."""
    return Path(name).exists() or (bool(Path(name).suffix) and name not in vectors)


def _check_file(path: str, wanted: str) -> None:
    if not Path(path).exists():
        raise DataError(f"{path}: there is no such file; give {wanted}")


def _print_nearest(nearest: list[tuple[str, float]], title: str, query: dict[str, Any], as_json: bool) -> None:
    """Print words and their cosines, under a title or, as JSON, beside what was asked."""
    if as_json:
        pairs = [[word, round(cosine, 6)] for word, cosine in nearest]
        typer.echo(write_json({**query, "neighbours": pairs}))
    else:
        print_table([title, "cosine"], [[word, f"{cosine:.4f}"] for word, cosine in nearest])
