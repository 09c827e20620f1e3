"""What each text costs a language model: its sum is what the evaluation says."""

import numpy as np
import pytest
import torch

import weft
from weft.data.truncation import TruncationPolicy
from weft.tasks.encoding import EvaluationData

TEXTS = ["the cat sat", "on a mat", "the dog ran far away from the cat", "so it did"] * 3
READINGS = [
    ({"name": "rnn", "width": 8}, {"sequences": "bptt", "bptt": 4}),
    ({"name": "rnn", "width": 8, "direction": "backward"}, {"sequences": "windows", "stride": 3}),
    ({"name": "gpt", "width": 8, "heads": 2, "layers": 1}, {"sequences": "windows", "stride": 5}),
    ({"name": "gpt", "width": 8, "heads": 2, "layers": 1}, {"sequences": "documents"}),
    ({"name": "ngram", "order": 2}, {}),
]


@pytest.mark.parametrize(("model", "reading"), READINGS, ids=lambda value: str(value))
def test_the_texts_add_up_to_the_evaluation(tmp_path, model, reading):
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS) + "\n")
    recipe = {
        "task": {"name": "lm", **reading},
        "data": {"train": str(tmp_path / "texts.txt"), "max_length": 8, "truncation": "window"},
        "tokenizer": {"name": "words"},
        "model": model,
        "train": {"steps": 1, "batch_tokens": 32},
    }
    pipeline = weft.train(recipe, out=tmp_path / "run")
    task, texts = pipeline.task, [*TEXTS[:5], "a hat that it never saw"]
    examples = [(number, task.Example(text=text)) for number, text in enumerate(texts)]
    data = EvaluationData.of(task, examples, TruncationPolicy(8, "window"))
    with torch.inference_mode():
        losses = task.text_losses(pipeline.head.eval(), data)
        whole = task.evaluate(pipeline.head, data).metrics
    assert losses.metric("perplexity") == pytest.approx(whole["perplexity"])
    assert losses.metric("bits_per_byte") == pytest.approx(whole["bits_per_byte"])
    assert losses.tokens.tolist() == [len(text.split()) + 1 for text in texts]
    assert losses.spelling[-1] > 0 == losses.spelling[0], "an unknown word is spelled"
    rows = np.array([1, 1, 4])
    assert losses.of(rows).metric("bits_per_byte") == pytest.approx(losses.metric("bits_per_byte", rows))
