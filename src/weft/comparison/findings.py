"""The findings of a comparison in sentences: the best entry, ties within noise, models that beat no classical one."""

from weft.comparison.quantities import format_p_value, listed, metric_name, plural
from weft.comparison.ranking import best_entry, is_within_noise, quality, ranked
from weft.comparison.results import ComparisonResults, Entry
from weft.comparison.table import format_quality


def title(results: ComparisonResults) -> str:
    """Return the title of the report."""
    return f"{plural(len(results.entries), 'model')} compared on the task {results.task}"


def findings(results: ComparisonResults) -> list[str]:
    """Return the findings, each in a sentence or two."""
    best = best_entry(results)
    if best is None:
        return ["No entry has a result that can be ranked."]
    metric = metric_name(results.metric)
    return [
        f"{best.name} is best: {metric} {format_quality(best, results.metric)}.{_rivals(results)}",
        *_classical(results),
        *_caveat(results),
    ]


def _rivals(results: ComparisonResults) -> str:
    """Return which entries are not significantly worse than the best."""
    tested = [entry for entry in ranked(results) if entry.versus_best is not None and entry.failure is None]
    close = [
        f"{entry.name} ({format_p_value(entry.versus_best.p_value)})"
        for entry in tested
        if entry.versus_best is not None and is_within_noise(entry)
    ]
    if close:
        verb = "is" if len(close) == 1 else "are"
        others = [entry.name for entry in tested if not is_within_noise(entry)]
        rest = f" {others[0]} is." if len(others) == 1 else " The others are." * bool(others)
        return f" {listed(close)} {verb} not significantly worse: the difference may be chance.{rest}"
    return " All that were tested against it on the same examples are significantly worse." if tested else ""


def _classical(results: ComparisonResults) -> list[str]:
    """Return which trained models do not beat the best entry that was fitted without a gradient."""
    entries = [entry for entry in ranked(results) if quality(entry, results.metric)]
    fitted = next((entry for entry in entries if entry.kind != "trained"), None)
    trained = [entry for entry in entries if entry.kind == "trained"]
    if fitted is None or not trained:
        return []
    name = f"{fitted.name} ({format_quality(fitted, results.metric)})"
    behind = [entry.name for entry in trained if not _beats(results, entry, fitted)]
    if behind:
        verb = "does" if len(behind) == 1 else "do"
        return [f"{listed(behind)} {verb} not beat the best classical model, {name}."]
    return [f"Every trained model is better than the best classical one, {name}, in the mean."]


def _caveat(results: ComparisonResults) -> list[str]:
    """Return that the examples are not unseen, where there are none for a test."""
    if results.split != "valid":
        return []
    return [
        "The data has no test examples: the entries are compared on the validation examples, which also chose the best "
        "model of each training. On new examples all of them would be somewhat worse."
    ]


def _beats(results: ComparisonResults, entry: Entry, other: Entry) -> bool:
    score, bar = quality(entry, results.metric), quality(other, results.metric)
    if score is None or bar is None:
        return False
    return score.mean > bar.mean if results.higher_is_better else score.mean < bar.mean
