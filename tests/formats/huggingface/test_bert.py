"""Import and export of the BERT family with every head: parity with transformers."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.bert_folders import FAMILIES, HEADS, PIECES, make
from tests.hf_folders import LINES, TEXTS, transformers
from tests.transformer_equations import spread_weights

import weft
from weft.config.run import Run
from weft.conversion.parity import compare_models
from weft.errors import CheckpointError
from weft.formats.huggingface.folder import family_for, save_hf
from weft.tasks.factory import build
from weft.tokenization.trainable import train_tokenizer
from weft.tokens import Tokens

PRETRAINED = ("bert", "albert", "electra")  # with next-sentence or sentence-order prediction, or as a discriminator
CASES = [(family, head) for family in FAMILIES for head in HEADS if head != "ForPreTraining" or family in PRETRAINED]
CLOSE = {"rtol": 0, "atol": 1e-5}


@torch.no_grad()
def check_same(pipeline, model, tokenizer):
    """Compare tokens, all layers and logits; each text alone in transformers, all in one batch in weft."""
    special, body = pipeline.tokenizer.specials, pipeline.head.body
    ids = [[special.bos, *pipeline.tokenizer.encode(text).ids, special.eos] for text in TEXTS]
    assert ids == [tokenizer(text).input_ids for text in TEXTS]
    batch, layers = Tokens.pack(ids), range(pipeline.run.model.layers + 1)
    states, outputs = body.encode(batch, layers), logits(pipeline, batch)
    for row, tokens in enumerate(batch.split()):
        ids = tokens[None, None] if pipeline.run.task.name == "choice" else tokens[None]
        expected = model(ids, output_hidden_states=True)
        span = slice(int(batch.starts[row]), int(batch.starts[row + 1]))
        for layer in layers:
            torch.testing.assert_close(states[layer, span], expected.hidden_states[layer][0], **CLOSE)
        for name, mine in outputs.items():
            theirs = expected[name]
            theirs = theirs.flatten(0, 1) if theirs.ndim == 3 else theirs.view(-1, *mine.shape[1:])
            torch.testing.assert_close(mine[span] if len(mine) == len(batch.ids) else mine[[row]], theirs, **CLOSE)


def logits(pipeline, read):
    """Return the outputs of a head by their names in transformers."""
    head, task = pipeline.head, pipeline.run.task.name
    if task == "mlm" and head.next is not None:
        follows = "sop_logits" if pipeline.run.model.shared else "seq_relationship_logits"
        return {"prediction_logits": head.body.logits(read), follows: head.next(head.body.pooled_output(read))}
    if task == "span":
        return dict(zip(("start_logits", "end_logits"), head.scores(read).split(1, -1), strict=True))
    if task == "embed":
        return {"pooler_output": head.body.pooled_output(read)} if pipeline.run.task.pooler else {}
    known = {
        "mlm": lambda: head.body.logits(read),
        "classify": lambda: head.scores(head.pooled_output(read)),
        "tag": lambda: head.scores(head.states(read)),
        "electra": lambda: head.discriminate(read),
        "choice": lambda: head.scores(read)[:, None],
    }
    return {"logits": known[task]()}


def read_back(folder, kind):
    model, loading_info = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(loading_info.values()), "no weight is missing there, and none is too many"
    return model.eval(), transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_special_tokens_in_texts_are_those_of_transformers_where_it_is_asked_for(tmp_path, family):
    _, tokenizer = make(tmp_path / "hf", family, "Model")
    marked = f"the lambda {tokenizer.mask_token} x {tokenizer.sep_token}"
    theirs = tokenizer(marked, add_special_tokens=False).input_ids
    for path in (tmp_path / "hf", weft.load(tmp_path / "hf", device="cpu").save(tmp_path / "weft")):
        plain = weft.load(path, device="cpu")
        assert tokenizer.mask_token_id in theirs
        assert tokenizer.mask_token_id not in plain.tokenizer.ids([marked])[0]
        special = weft.load(path, device="cpu", overrides={"tokenizer.split_special_tokens": False})
        assert special.tokenizer.ids([marked])[0] == theirs
        assert abs(plain.embed([marked]) - special.embed([marked])).max() > 1e-3, "vectors are of these tokens"


@pytest.mark.parametrize(("family", "head"), CASES)
def test_there_and_back_again_nothing_changes(tmp_path, family, head):
    model, tokenizer = make(tmp_path / "hf", family, head)
    pipeline = weft.load(tmp_path / "hf", device="cpu")
    assert family_for(pipeline.run).model_type == family
    check_same(pipeline, model, tokenizer)
    pipeline.save(tmp_path / "weft")
    back = weft.load(tmp_path / "weft", device="cpu")
    save_hf(tmp_path / "back", back.run, back.tokenizer, back.head)
    there, cut = read_back(tmp_path / "back", type(model))
    check_same(back, there, cut)
    marked = f"the lambda{tokenizer.mask_token} x"
    assert cut(marked).input_ids == tokenizer(marked).input_ids, "what spells a special is still one there"
    mine, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "back"))
    assert set(mine) == set(theirs)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    again = weft.load(tmp_path / "back", device="cpu")
    assert (again.run.model, again.run.task, again.run.tokenizer) == (back.run.model, back.run.task, back.run.tokenizer)
    assert all(check.matches for check in compare_models(again, back, tmp_path / "back")), "of a pair, too"


def test_a_weight_in_anothers_place_is_caught(tmp_path):
    """The negative control: keys and values, which have the same shapes, are swapped."""
    model, tokenizer = make(tmp_path / "hf", "bert", "ForSequenceClassification")
    path = tmp_path / "hf" / "model.safetensors"
    tensors, place = load_file(path), "bert.encoder.layer.1.attention.self."
    names = [f"{place}{part}.weight" for part in ("key", "value")]
    tensors |= dict(zip(names, [tensors[name] for name in reversed(names)], strict=True))
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(AssertionError):
        check_same(weft.load(tmp_path / "hf", device="cpu"), model, tokenizer)


@pytest.mark.parametrize(
    ("family", "head", "config"),
    [
        ("bert", "ForMaskedLM", {"tie_word_embeddings": False, "hidden_act": "relu", "layer_norm_eps": 1e-5}),
        ("bert", "Model", {"type_vocab_size": 3, "hidden_act": "gelu_new", "num_hidden_layers": 1}),
        ("distilbert", "ForMaskedLM", {"tie_word_embeddings": False, "activation": "relu"}),
        ("roberta", "ForMaskedLM", {"tie_word_embeddings": False, "type_vocab_size": 2}),
        ("albert", "ForMaskedLM", {"embedding_size": 24, "hidden_act": "gelu", "num_hidden_layers": 3}),
        ("electra", "ForMaskedLM", {"embedding_size": 24}),
        ("electra", "ForSequenceClassification", {"embedding_size": 24, "hidden_dropout_prob": 0.0}),
    ],
    ids=str,
)
def test_other_configurations_are_read(tmp_path, family, head, config):
    model, tokenizer = make(tmp_path / "hf", family, head, **config)
    pipeline = weft.load(tmp_path / "hf", device="cpu")
    check_same(pipeline, model, tokenizer)
    save_hf(tmp_path / "back", pipeline.run, pipeline.tokenizer, pipeline.head)
    check_same(pipeline, *read_back(tmp_path / "back", type(model)))


@pytest.mark.parametrize(
    ("config", "task"),
    [
        ({"id2label": {0: "no", 1: "yes"}}, {"labels": ("no", "yes")}),
        ({"num_labels": 2}, {"labels": ("LABEL_0", "LABEL_1"), "dropout": 0.1}),
        ({"num_labels": 1}, {"regression": True, "labels": None}),
        ({"num_labels": 1, "problem_type": "regression"}, {"regression": True}),
        (
            {"num_labels": 3, "problem_type": "multi_label_classification", "classifier_dropout": 0.25},
            {"multiple": True, "dropout": 0.25},
        ),
    ],
    ids=str,
)
def test_what_a_classifier_says_is_told(tmp_path, config, task):
    make(
        tmp_path / "hf",
        "bert",
        "ForSequenceClassification",
        **{"num_labels": len(config.get("id2label", "12")), **config},
    )
    pipeline = weft.load(tmp_path / "hf", device="cpu")
    assert {key: getattr(pipeline.run.task, key) for key in task} == task
    save_hf(tmp_path / "back", pipeline.run, pipeline.tokenizer, pipeline.head)
    assert weft.load(tmp_path / "back", device="cpu").run.task == pipeline.run.task
    back = transformers.AutoConfig.from_pretrained(tmp_path / "back")
    assert back.num_labels == len(pipeline.run.task.labels or "1")
    assert list(back.id2label.values()) == list(pipeline.run.task.labels or ["LABEL_0"])


def test_tags_are_those_of_transformers(tmp_path):
    make(tmp_path / "hf", "bert", "ForTokenClassification", id2label={0: "A", 1: "B", 2: "C"}, num_labels=3)
    (answer,) = weft.load(tmp_path / "hf", device="cpu")({"words": ["the", "lambda", "it"]})
    pipe = transformers.pipeline("token-classification", str(tmp_path / "hf"), device="cpu")
    theirs = [entity for entity in pipe("the lambda it") if not entity["word"].startswith("##")]
    assert answer["tags"] == [entity["entity"] for entity in theirs]
    assert answer["scores"] == pytest.approx([float(entity["score"]) for entity in theirs], abs=1e-5)


@pytest.mark.parametrize(("family", "mask"), [("bert", "[MASK]"), ("roberta", "<mask>"), ("albert", "[MASK]")])
def test_masks_are_filled_as_there(tmp_path, family, mask):
    text = f"The lambda {mask} is new."
    _, tokenizer = make(tmp_path / "hf", family, "ForMaskedLM")
    if family == "roberta":  # as it was published, but its vocabulary does not say so: the space belongs to the mask
        token = transformers.AddedToken(mask, lstrip=True, special=True)
        tokenizer = type(tokenizer).from_pretrained(tmp_path / "hf", mask_token=token)
    pipeline = weft.load(tmp_path / "hf", device="cpu")
    mine = pipeline(text)[0]["fills"][0]
    pipe = transformers.pipeline("fill-mask", str(tmp_path / "hf"), tokenizer=tokenizer, device="cpu", top_k=12)
    special = vars(pipeline.tokenizer.specials).values()
    theirs = [prediction["score"] for prediction in pipe(text) if prediction["token"] not in special]
    assert [prediction["score"] for prediction in mine] == pytest.approx(theirs[: len(mine)], abs=1e-5)


# Directories in older formats.


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors), folder / "model.safetensors", metadata={"format": "pt"})


def edit(path, **changes):
    config = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in {**config, **changes}.items() if value != "GONE"}))


def test_the_first_bert(tmp_path):
    """Declared as masked LM, with old names of norms, copies of tied weights, and a next-sentence head."""
    model, tokenizer = make(tmp_path / "hf", "bert", "ForPreTraining")

    def old(tensors):
        tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"].clone()
        tensors["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"].clone()
        tensors["bert.embeddings.position_ids"] = torch.arange(96)[None]
        worn = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
        return {name.replace(new, was): tensor for name, tensor in tensors.items() for new, was in [pick(name, worn)]}

    def pick(name, worn):
        return next(((new, was) for new, was in worn.items() if name.endswith(new)), ("", ""))

    rewrite(tmp_path / "hf", old)
    assert "bert.embeddings.LayerNorm.gamma" in load_file(tmp_path / "hf" / "model.safetensors")
    edit(tmp_path / "hf" / "config.json", architectures=["BertForMaskedLM"])
    pipeline = weft.load(tmp_path / "hf", device="cpu")
    assert pipeline.run.task.next_sentence
    check_same(pipeline, model, tokenizer)


def test_a_summary_that_no_task_reads_is_left_out_and_a_body_may_have_its_prefix(tmp_path):
    model, tokenizer = make(tmp_path / "hf", "roberta", "ForMultipleChoice")
    filler, _ = make(tmp_path / "fill", "roberta", "ForMaskedLM", seed=0)
    both = load_file(tmp_path / "hf" / "model.safetensors")
    pooler = {name: tensor for name, tensor in both.items() if "pooler" in name}
    assert len(pooler) == 2
    rewrite(tmp_path / "fill", lambda tensors: tensors | pooler)
    check_same(weft.load(tmp_path / "fill", device="cpu"), filler, tokenizer)
    edit(tmp_path / "hf" / "config.json", architectures=["RobertaModel"])
    rewrite(
        tmp_path / "hf", lambda tensors: {n: value for n, value in tensors.items() if not n.startswith("classifier")}
    )
    assert weft.load(tmp_path / "hf", device="cpu").run.task.pooler
    check_same(weft.load(tmp_path / "hf", device="cpu"), model.roberta, tokenizer)


def test_a_body_without_a_pooler_is_read_without_one(tmp_path):
    _, tokenizer = make(tmp_path / "hf", "bert", "Model")
    rewrite(tmp_path / "hf", lambda tensors: {name: tensor for name, tensor in tensors.items() if "pooler" not in name})
    pipeline = weft.load(tmp_path / "hf", device="cpu")
    assert not pipeline.run.task.pooler
    assert pipeline.head.body.pooler is None
    bare = transformers.BertModel.from_pretrained(tmp_path / "hf", add_pooling_layer=False).eval()
    check_same(pipeline, bare, tokenizer)
    assert pipeline.embed(["the lambda"]).shape == (1, 24)


@pytest.mark.parametrize(("head", "task"), [("Model", "embed"), ("ForMaskedLM", "mlm")])
def test_where_no_class_is_named_the_weights_tell(tmp_path, head, task):
    model, tokenizer = make(tmp_path / "hf", "bert", head)
    edit(tmp_path / "hf" / "config.json", architectures="GONE")
    pipeline = weft.load(tmp_path / "hf", device="cpu")
    assert pipeline.run.task.name == task
    check_same(pipeline, model, tokenizer)


def test_electras_discriminator_detects_and_is_a_body_for_other_tasks(tmp_path):
    make(tmp_path / "hf", "electra", "ForPreTraining")
    pipeline = weft.load(tmp_path / "hf", device="cpu")
    (answer,) = pipeline("the lambda")
    assert len(answer["tokens"]) == len(answer["scores"]) > 1
    with pytest.raises(weft.errors.TrainingError, match=r"task\.generator_size: this model has no generator"):
        pipeline.evaluate([{"text": "the lambda expression"}])


def test_the_discriminator_is_written_and_the_generator_is_not(tmp_path):
    pipeline = own({"name": "electra"}, {"embedding": 8}, None)
    assert pipeline.head.generator is not None
    save_hf(tmp_path / "hf", pipeline.run, pipeline.tokenizer, pipeline.head)
    there, cut = read_back(tmp_path / "hf", transformers.ElectraForPreTraining)
    check_same(pipeline, there, cut)
    again = weft.load(tmp_path / "hf", device="cpu")
    assert again.head.generator is None
    assert again.run.task.generator_size == 0


def test_electras_generator_is_a_masked_language_model_of_its_own(tmp_path):
    pipeline = own({"name": "electra", "generator_size": 0.3}, {"embedding": 8})
    generator = pipeline.head.generator
    sizes = generator.config.model_dump(exclude={"name", "weights", "pooler", "tie"})
    alone = own({"name": "mlm", "next_sentence": False}, {**sizes, "pooler": "gelu"})
    alone.head.body.load_state_dict(generator.state_dict())
    save_hf(tmp_path / "hf", alone.run, alone.tokenizer, alone.head)
    check_same(alone, *read_back(tmp_path / "hf", transformers.ElectraForMaskedLM))
    alone.head.body.norm.eps = generator.norm.eps  # that of the embeddings, which is the discriminator's, too
    tokens = Tokens.pack([[2, 9, 4, 11, 3]])
    torch.testing.assert_close(generator.logits(tokens), alone.head.body.logits(tokens))


BAD = {
    "several layers in turn": ("albert", {"num_hidden_groups": 2}, "num_hidden_groups is 2, but weft supports only 1"),
    "a decoder": ("bert", {"is_decoder": True}, "is_decoder is True, but weft supports only False"),
    "relative": ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key', but"),
    "another activation": ("roberta", {"hidden_act": "relu"}, "hidden_act is 'relu', which weft does not support"),
    "another class": (
        "bert",
        {"architectures": ["BertLMHeadModel"]},
        "architectures is .*of bert it reads BertForMask",
    ),
    "no labels": ("bert", {"id2label": {"5": "x", "6": "y"}}, "id2label must name labels 0, 1, …"),
    "no names": ("bert", {"id2label": 3}, "id2label says how the 3 labels are named, but is 3"),
    "no number": (
        "bert",
        {"id2label": None, "num_labels": "3"},
        "num_labels says how the 3 labels are named",
    ),
    "many labels": ("bert", {"id2label": None, "num_labels": 10**10}, "how the 3 labels are named, but is 10000000000"),
    "odd labels": ("bert", {"id2label": {"0": [], "1": "b", "2": "c"}}, r"id2label must name labels, but has \[\]"),
    "a list": ("bert", {"model_type": ["bert"]}, r"model_type is \['bert'\], which weft does not read"),
    "an object": ("bert", {"model_type": {"a": 1}}, r"model_type is {'a': 1}, which weft does not read"),
    "lists of classes": ("bert", {"architectures": [["BertModel"]]}, r"architectures is \[\['BertModel'\]\]"),
    "classes by name": ("bert", {"architectures": {"BertModel": 1}}, r"architectures is {'BertModel': 1}"),
    "activations": ("bert", {"hidden_act": ["gelu"]}, r"hidden_act is \['gelu'\], which weft does not support"),
    "an activation": ("bert", {"hidden_act": {"gelu": 1}}, "hidden_act is {'gelu': 1}, which weft does not support"),
    "true layers": ("bert", {"num_hidden_layers": True}, "model.layers: should be a valid integer, but is True"),
    "spelt heads": ("bert", {"num_attention_heads": "3"}, "model.heads: should be a valid integer, but is '3'"),
    "a true size": ("bert", {"vocab_size": True}, "vocab_size must be a number of tokens, but is True"),
    "no positions": ("bert", {"max_position_embeddings": "many"}, "config.json: model.max_positions: .* but is 'many'"),
    "no padding": ("roberta", {"pad_token_id": "none"}, "pad_token_id must be a whole number, but is 'none'"),
    "two numbers": ("bert", {"problem_type": "regression"}, "a regression of 3 numbers; weft gives one"),
    "fewer labels": ("bert", {"id2label": {"0": "x", "1": "y"}}, r"output.weight must be \(2, 24\), but is \(3, 24\)"),
    "too few layers": ("bert", {"num_hidden_layers": 1}, "has the weight encoder.layer.1.*weft.s bert does not have"),
    "too many": ("distilbert", {"n_layers": 3}, "lacks the weight transformer.layer.2.attention.q_lin.weight"),
    "no words": ("bert", {"vocab_size": 9}, r"vocab_size is 9, but the embeddings .* are \(400, 24\)"),
}


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory):
    root = tmp_path_factory.mktemp("bad")
    for family in ("bert", "distilbert", "roberta", "albert"):
        make(root / family, family, "ForSequenceClassification")
    return root


@pytest.mark.parametrize("bad", BAD)
def test_bad_folders_are_refused(classifiers, tmp_path, bad):
    family, changes, message = BAD[bad]
    shutil.copytree(classifiers / family, tmp_path / "it")
    edit(tmp_path / "it" / "config.json", **changes)
    with pytest.raises(CheckpointError, match=message) as caught:
        weft.load(tmp_path / "it", device="cpu")
    assert str(tmp_path) in str(caught.value)


def test_a_weight_too_many_is_refused(classifiers, tmp_path):
    shutil.copytree(classifiers / "bert", tmp_path / "it")
    rewrite(tmp_path / "it", lambda tensors: tensors | {"qa_outputs.weight": torch.zeros(2, 24)})
    with pytest.raises(CheckpointError, match="has the weight qa_outputs.weight, which weft's bert does not have"):
        weft.load(tmp_path / "it", device="cpu")


# Models trained by weft.


def own(task, model=None, tokenizer=None, seed=0):
    raw = {
        "task": task,
        "data": {"train": [], "max_length": 60},
        "tokenizer": tokenizer or {"name": "wordpiece", "size": 400},
        "model": {
            "name": "bert",
            "width": 24,
            "heads": 3,
            "layers": 2,
            "ffn_width": 40,
            "max_positions": 96,
            **(model or {}),
        },
        "train": {"steps": 1},
    }
    run = Run.parse(raw)
    cut = train_tokenizer(run.tokenizer, iter(LINES))
    built_task, head = build(run, cut)
    torch.manual_seed(seed)
    spread_weights(head, 0.2)
    return weft.Pipeline(run, built_task, cut, head.eval())


ROBERTA = {"segments": 1, "eps": 1e-5}
ROBERTAS = {"pad": "<pad>", "mask": "<mask>", "unk": "<unk>"}
OWN = {
    "BertForPreTraining": ({"name": "mlm"}, {}, None),
    "BertForMaskedLM": (
        {"name": "mlm", "next_sentence": False},
        {"tie": False},
        {"name": "wordpiece", "lowercase": True},
    ),
    "BertForSequenceClassification": ({"name": "classify", "labels": ["a", "b"]}, {}, None),
    "BertForTokenClassification": ({"name": "tag", "labels": ["O", "B-X"]}, {}, None),
    "BertForQuestionAnswering": ({"name": "span", "max_question_length": 20}, {}, None),
    "BertForMultipleChoice": ({"name": "choice"}, {}, None),
    "BertModel": ({"name": "embed"}, {}, None),
    "DistilBertForSequenceClassification": (
        {"name": "classify", "regression": True},
        {"segments": 0, "pooler": "relu"},
        None,
    ),
    "RobertaForMaskedLM": (
        {"name": "mlm"},
        {**ROBERTA, "offset": 3},
        {"name": "bpe", "size": 400, "num_separators": 2, "specials": ROBERTAS},
    ),
    "AlbertForPreTraining": (
        {"name": "mlm", "sentence_order": True},
        {"shared": True, "embedding": 8, "activation": "gelu-tanh"},
        None,
    ),
    "ElectraForPreTraining": ({"name": "electra"}, {"pooler": "gelu"}, None),
    "ElectraForSequenceClassification": (
        {"name": "classify", "labels": ["a", "b"], "multiple": True},
        {"embedding": 8, "pooler": "gelu"},
        {"name": "unigram", "size": 400, "specials": {"pad": "<pad>"}},
    ),
}


@pytest.mark.parametrize("kind", OWN)
def test_what_weft_wrote_is_answered_the_same_by_transformers(tmp_path, kind):
    task, model, tokenizer = OWN[kind]
    pipeline = own(task, model, tokenizer)
    save_hf(tmp_path / "it", pipeline.run, pipeline.tokenizer, pipeline.head)
    there, cut = read_back(tmp_path / "it", getattr(transformers, kind))
    assert transformers.AutoConfig.from_pretrained(tmp_path / "it").architectures == [kind]
    check_same(pipeline, there, cut)
    back = weft.load(tmp_path / "it", device="cpu")
    assert (back.run.model, back.run.tokenizer) == (pipeline.run.model, pipeline.run.tokenizer)
    assert all(check.matches for check in compare_models(pipeline, back, tmp_path / "it"))
    assert cut.pad_token_id == pipeline.tokenizer.specials.pad
    pair = cut("the lambda", "x")
    special, between = pipeline.tokenizer.specials, pipeline.tokenizer.pair_separator
    first, second = ([*pipeline.tokenizer.encode(text).ids] for text in ("the lambda", "x"))
    assert pair.input_ids == [special.bos, *first, *between, *second, special.eos]
    if "token_type_ids" in pair:
        assert pair.token_type_ids == [0] * (len(first) + 1 + len(between)) + [1] * (len(second) + 1)
    if task["name"] == "mlm":
        text = f"the {cut.mask_token} x"
        assert cut(text, add_special_tokens=False).input_ids == pipeline.task.blanks.ids(text)
    if task["name"] != "choice":
        there(**cut(["the lambda", "x"], return_tensors="pt", padding=True))  # it takes what its tokenizer gives


REFUSED = {
    "no segments": ({"name": "embed"}, {"segments": 0}, None, "model.name: 'bert', as configured, has no counterpart"),
    "no pooler": ({"name": "embed"}, {"pooler": "none"}, None, "has no counterpart in the Hugging Face format"),
    "positions": (
        {"name": "tag", "labels": ["O", "B-X"]},
        {**ROBERTA, "offset": 2},
        None,
        "counts positions from the id of its padding token, which must be 1, but is 0 .* model.offset: 1",
    ),
    "pairs": (
        {"name": "mlm"},
        {"pooler": "gelu"},
        None,
        "task.next_sentence: this head has no counterpart .*electra",
    ),
    "another objective": (
        {"name": "mlm", "sentence_order": True},
        {},
        None,
        "task.sentence_order: this head has no counterpart .*bert",
    ),
    "a CRF": ({"name": "tag", "labels": ["O", "B-X"], "crf": True}, {}, None, "task.crf: True cannot be expressed"),
    "a mixture": ({"name": "tag", "labels": ["O", "B-X"], "layers": "mix"}, {}, None, "task.layers: 'mix' cannot be"),
    "heads": ({"name": "embed"}, {"pruned_heads": {0: [1]}}, None, r"model.pruned_heads.0: \[1\] cannot be expressed"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_said_there_is_refused(tmp_path, case):
    task, model, tokenizer, message = REFUSED[case]
    pipeline = own(task, model, tokenizer)
    with pytest.raises(CheckpointError, match=message):
        save_hf(tmp_path / "it", pipeline.run, pipeline.tokenizer, pipeline.head)
    assert not any(tmp_path.iterdir())


def test_a_bare_encoder_starts_a_training(tmp_path):
    make(tmp_path / "hf", "distilbert", "Model")
    rows = "".join(f"{word} it is\t{label}\n" for word, label in (("the", "a"), ("lambda", "b")) for _ in range(8))
    (tmp_path / "rows.tsv").write_text(rows, encoding="utf-8")
    recipe = {
        "task": {"name": "classify"},
        "data": {"train": str(tmp_path / "rows.tsv")},
        "model": {"name": "bert", "weights": str(tmp_path / "hf")},
        "train": {"steps": 2, "batch_tokens": 64, "lr": 1e-9},
    }
    trained = weft.train(recipe, out=tmp_path / "run")
    theirs = load_file(tmp_path / "hf" / "model.safetensors")["transformer.layer.1.ffn.lin1.weight"]
    torch.testing.assert_close(
        trained.head.body.encoder.blocks[1].feed_forward.fc1.weight.detach(), theirs, rtol=0, atol=1e-6
    )
    assert trained.run.model.pooler == "relu"
    assert trained.head.body.pooler is not None
    assert trained.tokenizer.specials.bos == PIECES.index("[CLS]")
