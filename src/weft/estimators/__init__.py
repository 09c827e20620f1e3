"""scikit-learn estimators: a transformer of texts to vectors, and a classifier and a tagger that train a recipe.

    Pipeline([("encode", TextEncoder("runs/mine")), ("classify", LogisticRegression())]).fit(texts, labels)
    TextClassifier(model="runs/mine").fit(texts, labels).predict(texts)
    TextTagger().fit(sentences, tags).predict(sentences)

They support `clone`, grid search and `set_params` as scikit-learn's own do. `save` writes a checkpoint, without pickle,
that `weft.load` and the command line read too; `load` reads it back.
"""

from weft.estimators.encoder import TextEncoder
from weft.estimators.inputs import InputError
from weft.estimators.trained import TextClassifier, TextTagger

__all__ = ["InputError", "TextClassifier", "TextEncoder", "TextTagger"]
