"""The Hugging Face model families that each of weft's models can be imported from and exported to."""

from weft.formats.huggingface.bert import MAPS
from weft.formats.huggingface.gpt import GPT2_MAP, GPT_MAP
from weft.formats.huggingface.mapping import HFMapping
from weft.formats.huggingface.marian import MARIAN_MAP

FAMILIES: dict[str, tuple[HFMapping, ...]] = {"bert": MAPS, "gpt": (GPT2_MAP, GPT_MAP), "transformer": (MARIAN_MAP,)}
MODEL_NAMES = {family.model_type: name for name, families in FAMILIES.items() for family in families}
