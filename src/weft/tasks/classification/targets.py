"""The three targets of text classification (one label, several, a number), each with its loss, outputs and metrics."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import BaseModel, BeforeValidator, Field
from torch import Tensor

from weft.config.json import write_json
from weft.config.schema import Section
from weft.data.labels import Label, Labels, balanced_class_weights, parse_number
from weft.nn.layers.losses import (
    binary_cross_entropy_sum,
    cross_entropy_sum,
    soft_binary_cross_entropy_sum,
    soft_cross_entropy_sum,
    squared_error_sum,
)
from weft.tasks import base
from weft.tasks.base import Answer
from weft.tasks.capabilities import WrongAnswer
from weft.tasks.classification_report import ClassificationReport, present
from weft.tasks.metrics import (
    ConfusionMatrix,
    Tally,
    exact_match,
    macro_f1,
    matthews,
    mean_f1,
    pearson,
    spearman,
    tally_labels,
)

DEFAULT_THRESHOLD = 0.5  # the probability above which a label is predicted

MAX_SCORES = 1000  # labels whose probability an answer has
# Predicted label indices and each label's probability; or [] and a number.
LabelOutput = tuple[list[int], Any]


class Threshold(Section):
    """The options of a call where a text may have several labels."""

    threshold: float = Field(DEFAULT_THRESHOLD, gt=0, lt=1)


def _split_labels(value: object) -> object:
    """Split one cell of a table at its commas into labels."""
    if not isinstance(value, str):
        return value
    return [name.strip() for name in value.split(",") if name.strip()]


def read_number(value: object) -> float:
    """Parse a number, also from a cell of a table."""
    return parse_number(value, "must be a number, since task.regression is true")


class ClassifyExample(base.Example):
    """A text or a pair of them, and for training and evaluation the gold `label`, or with `multiple` the `labels`."""

    text: str
    label: Label | None = None
    pair: str | None = None
    labels: Annotated[list[Label] | None, BeforeValidator(_split_labels)] = None


class RatedExample(base.Example):
    """A text or a pair of them, and for training and evaluation its number."""

    text: str
    label: Annotated[float, BeforeValidator(read_number)] | None = None
    pair: str | None = None


class SingleLabel:
    """One label a text, by a softmax over all labels; the base class of the other targets."""

    Example: type[BaseModel] = ClassifyExample
    label_field: str = "label"
    min_labels: int = 2  # fewer leave nothing to learn
    metrics: tuple[str, ...] = ("accuracy", "macro_f1", "matthews", "f1")
    metric: str = "accuracy"
    has_labels: bool = True

    def metric_names(self, labels: int) -> tuple[str, ...]:
        """Return the metrics that `score` computes; while the number of labels is unknown (0), all possible ones."""
        return self.metrics if labels in (0, 2) else self.metrics[:-1]

    def gold_labels(self, example: Any) -> list[str]:
        """Return the gold labels of an example."""
        return [] if example.label is None else [example.label]

    def balanced_weights(self, counts: Mapping[str, int], rows: int) -> dict[str, float]:
        """Return label weights by inverse frequency, given how many of `rows` examples have each label."""
        return balanced_class_weights(counts)

    def encode_label(self, example: Any, labels: Labels) -> np.ndarray:
        """Return an example's gold labels as the integers that an item holds."""
        return np.array([labels.index(name) for name in self.gold_labels(example)], np.int32)

    def encode_prediction(self, output: LabelOutput) -> np.ndarray:
        """Return a prediction as the integers that an item holds."""
        return np.array(output[0], np.int32)

    def targets(self, encoded: Sequence[np.ndarray], labels: int) -> Tensor:
        """Join the encoded labels of the texts into the loss's targets, one row a text."""
        return torch.from_numpy(np.concatenate(encoded).astype(np.int64))  # (B,)

    def loss(self, logits: Tensor, targets: Tensor, smoothing: float, weights: Tensor | None) -> Tensor:
        """Return the loss of the logits (B, K), summed over the texts."""
        return cross_entropy_sum(logits, targets, smoothing, weights)

    def soft_loss(self, logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
        """Return the distance of the logits (B, K) from a teacher's, summed over the texts."""
        return soft_cross_entropy_sum(logits, teacher, temperature)

    def outputs(self, logits: Tensor, options: Section) -> list[LabelOutput]:
        """Return the most probable label of each text, and the probabilities."""
        # In float32, a probability depends in its last bit on the place in the batch.
        probabilities = logits.double().softmax(-1)
        return list(zip(probabilities.argmax(-1, keepdim=True).tolist(), probabilities.cpu().numpy(), strict=True))

    def answer(self, output: LabelOutput, labels: Labels) -> Answer:
        """Return the predicted label, and the probability of each, the most probable first."""
        return {"label": labels.names[output[0][0]], "scores": _ranked_scores(output, labels)}

    def names(self, answer: Answer) -> list[str]:
        """Return the predicted labels, or the number, as text."""
        return [answer["label"]]

    def score(self, answers: Sequence[Answer], examples: Sequence[Any], labels: Labels) -> dict[str, float]:
        """Compute the metrics of labels as in scikit-learn; F1 is that of the second of two labels."""
        predicted, gold = [answer["label"] for answer in answers], [example.label or "" for example in examples]
        metrics = {
            "accuracy": exact_match(predicted, gold),
            "macro_f1": macro_f1(predicted, gold),
            "matthews": matthews(predicted, gold),
        }
        if len(labels) == 2:
            tallies = tally_labels([[label] for label in predicted], [[label] for label in gold], labels)
            metrics["f1"] = tallies[labels.names[1]].f1
        return metrics

    def confusion(self, answers: Sequence[Answer], examples: Sequence[Any], labels: Labels) -> ConfusionMatrix | None:
        """Return the confusion matrix."""
        pairs = zip(examples, answers, strict=True)
        return ConfusionMatrix.of(labels.names, [(example.label or "", answer["label"]) for example, answer in pairs])

    def report(self, answers: Sequence[Answer], examples: Sequence[Any], labels: Labels) -> ClassificationReport | None:
        """Return the classification report of the labels that are gold or predicted anywhere."""
        predicted, gold = map(self.names, answers), map(self.gold_labels, examples)
        return ClassificationReport.of(present(tally_labels(list(predicted), list(gold), labels)))

    def error(self, answer: Answer, example: Any) -> WrongAnswer | None:
        """Return a wrong label with its probability."""
        label: str = answer["label"]
        return None if label == example.label else WrongAnswer(example.label, label, answer["scores"][label])


class MultiLabel(SingleLabel):
    """Any number of labels a text, each an independent binary decision by a sigmoid and a threshold."""

    label_field = "labels"
    min_labels = 1
    metrics = ("micro_f1", "macro_f1", "exact_match")
    metric = "micro_f1"

    def metric_names(self, labels: int) -> tuple[str, ...]:
        """Return the same metrics for any number of labels."""
        return self.metrics

    def gold_labels(self, example: Any) -> list[str]:
        """Return all labels of an example, without duplicates."""
        return list(dict.fromkeys(example.labels or ()))

    def balanced_weights(self, counts: Mapping[str, int], rows: int) -> dict[str, float]:
        """Return the weight of each label's positives: the ratio of negatives to positives."""
        return {label: max(rows - count, 1) / count for label, count in counts.items()}

    def targets(self, encoded: Sequence[np.ndarray], labels: int) -> Tensor:
        """Return a multi-hot row for each text, (B, K)."""
        multi_hot = torch.zeros(len(encoded), labels)
        for row, indices in zip(multi_hot, encoded, strict=True):
            row[indices.tolist()] = 1
        return multi_hot

    def loss(self, logits: Tensor, targets: Tensor, smoothing: float, weights: Tensor | None) -> Tensor:
        """Return the binary cross-entropy, summed over texts and labels."""
        return binary_cross_entropy_sum(logits, targets, smoothing, weights)

    def soft_loss(self, logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
        """Return the distance from a teacher's decisions, summed over texts and labels."""
        return soft_binary_cross_entropy_sum(logits, teacher, temperature)

    def outputs(self, logits: Tensor, options: Section) -> list[LabelOutput]:
        """Return the labels above the threshold for each text, and the probabilities."""
        assert isinstance(options, Threshold)
        probabilities = logits.sigmoid()
        predicted = [row.nonzero().flatten().tolist() for row in (probabilities > options.threshold).cpu()]
        return list(zip(predicted, probabilities.cpu().numpy(), strict=True))

    def answer(self, output: LabelOutput, labels: Labels) -> Answer:
        """Return the predicted labels, and the probability of each, the most probable first."""
        indices, probabilities = output
        ranked = sorted(indices, key=lambda index: -probabilities[index])
        return {"labels": [labels.names[index] for index in ranked], "scores": _ranked_scores(output, labels)}

    def names(self, answer: Answer) -> list[str]:
        """Return the labels."""
        return list(answer["labels"])

    def score(self, answers: Sequence[Answer], examples: Sequence[Any], labels: Labels) -> dict[str, float]:
        """Compute the metrics of label sets as in scikit-learn."""
        predicted = [set(answer["labels"]) for answer in answers]
        gold = [set(self.gold_labels(example)) for example in examples]
        tallies = tally_labels(predicted, gold, labels).values()
        return {
            "micro_f1": sum(tallies, Tally()).f1,
            "macro_f1": mean_f1(tallies),
            "exact_match": exact_match(predicted, gold),
        }

    def confusion(self, answers: Sequence[Answer], examples: Sequence[Any], labels: Labels) -> ConfusionMatrix | None:
        """Return None: several labels a text have no confusion matrix."""
        return None

    def report(self, answers: Sequence[Answer], examples: Sequence[Any], labels: Labels) -> ClassificationReport | None:
        """Return the classification report of all labels."""
        predicted = [set(answer["labels"]) for answer in answers]
        gold = [set(self.gold_labels(example)) for example in examples]
        pairs = zip(predicted, gold, strict=True)
        samples = (Tally(len(answer & target), len(answer), len(target)) for answer, target in pairs)
        return ClassificationReport.of(tally_labels(predicted, gold, labels), samples=samples)

    def error(self, answer: Answer, example: Any) -> WrongAnswer | None:
        """Return wrong labels with the probability of the most confident wrong decision, a label or none."""
        predicted, gold, scores = answer["labels"], self.gold_labels(example), answer["scores"]
        wrong = set(predicted) ^ set(gold)
        confidence = (scores[label] if label in predicted else 1 - scores.get(label, 0.0) for label in wrong)
        return WrongAnswer(gold, predicted, round(max(confidence), 6)) if wrong else None


class Regression(SingleLabel):
    """A number a text, such as the similarity of two sentences (STS-B): one output, and the squared error."""

    Example = RatedExample
    metrics = ("spearman", "pearson")
    metric = "spearman"
    has_labels = False

    def metric_names(self, labels: int) -> tuple[str, ...]:
        """Return the correlations: there are no labels."""
        return self.metrics

    def gold_labels(self, example: Any) -> list[str]:
        """Return the number as text."""
        return [] if example.label is None else [f"{example.label:g}"]

    def encode_label(self, example: Any, labels: Labels) -> np.ndarray:
        """Return the bits of the number, since an item holds integers."""
        return np.array([example.label], np.float32).view(np.int32)

    def encode_prediction(self, output: LabelOutput) -> np.ndarray:
        """Return the bits of the predicted number."""
        return np.array(output[1], np.float32).view(np.int32)

    def targets(self, encoded: Sequence[np.ndarray], labels: int) -> Tensor:
        """Return the numbers, (B,)."""
        return torch.from_numpy(np.concatenate(encoded).astype(np.int32, copy=False).view(np.float32).copy())

    def loss(self, logits: Tensor, targets: Tensor, smoothing: float, weights: Tensor | None) -> Tensor:
        """Return the squared error, summed over the texts."""
        return squared_error_sum(logits[:, 0], targets)

    def soft_loss(self, logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
        """Return the squared error from the teacher's numbers; they have no temperature."""
        return squared_error_sum(logits[:, 0], teacher[:, 0])

    def outputs(self, logits: Tensor, options: Section) -> list[LabelOutput]:
        """Return the output layer's value as the number."""
        return [([], row) for row in logits.tolist()]

    def answer(self, output: LabelOutput, labels: Labels) -> Answer:
        """Return the number."""
        return {"score": round(output[1][0], 6)}

    def names(self, answer: Answer) -> list[str]:
        """Return the number as text."""
        return [write_json(answer["score"])]

    def score(self, answers: Sequence[Answer], examples: Sequence[Any], labels: Labels) -> dict[str, float]:
        """Compute the correlations as in scipy."""
        predicted, gold = [answer["score"] for answer in answers], [example.label for example in examples]
        return {"spearman": spearman(predicted, gold), "pearson": pearson(predicted, gold)}

    def confusion(self, answers: Sequence[Answer], examples: Sequence[Any], labels: Labels) -> ConfusionMatrix | None:
        """Return None: numbers have no confusion matrix."""
        return None

    def report(self, answers: Sequence[Answer], examples: Sequence[Any], labels: Labels) -> ClassificationReport | None:
        """Return None: numbers have no labels to report on."""
        return None

    def error(self, answer: Answer, example: Any) -> WrongAnswer | None:
        """Return a number that is not the gold one; its score is the distance, so that the furthest comes first."""
        distance = abs(answer["score"] - example.label)
        return WrongAnswer(example.label, answer["score"], round(distance, 6)) if distance else None


def _ranked_scores(output: LabelOutput, labels: Labels) -> dict[str, float]:
    """Return the probabilities of the labels, the most probable first: of very many labels, the first `MAX_SCORES`."""
    probabilities = np.asarray(output[1])
    order = np.argsort(-probabilities, kind="stable")[: max(MAX_SCORES, len(output[0]))].tolist()
    return {labels.names[index]: round(float(probabilities[index]), 6) for index in order}
