"""A BERT of transformers in ours, weight by weight, and a batch of ours as theirs."""

import torch
from torch.nn.utils.rnn import pad_sequence


def small_config(vocab):
    """Say how large a small one is, in their words."""
    from transformers import BertConfig

    return BertConfig(
        vocab_size=vocab,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
        attn_implementation="eager",
    )


@torch.no_grad()
def copy_bert(theirs, ours):
    """Copy the weights of a BertModel, made strange enough that each of them matters, into a BERT of weft."""
    torch.manual_seed(3)
    for name, weight in theirs.named_parameters():
        weight.normal_(mean=float("LayerNorm.weight" in name), std=0.3)
    table = theirs.embeddings
    pairs = [
        (ours.embed, table.word_embeddings),
        (ours.positions.table, table.position_embeddings),
        (ours.segments, table.token_type_embeddings),
        (ours.norm, table.LayerNorm),
    ]
    for block, layer in zip(ours.encoder.blocks, theirs.encoder.layer, strict=True):
        own = layer.attention.self
        for name in ("weight", "bias"):
            stacked = torch.cat([getattr(part, name) for part in (own.query, own.key, own.value)])
            getattr(block.attention.in_proj, name).copy_(stacked)
        pairs += [
            (block.attention.out_proj, layer.attention.output.dense),
            (block.attention_residual.norm, layer.attention.output.LayerNorm),
            (block.feed_forward.fc1, layer.intermediate.dense),
            (block.feed_forward.fc2, layer.output.dense),
            (block.feed_forward_residual.norm, layer.output.LayerNorm),
        ]
    if ours.pooler is not None:
        pairs.append((ours.pooler, theirs.pooler.dense))
    for mine, yours in pairs:
        mine.load_state_dict(yours.state_dict())


def padded(tokens):
    """Return ids, segments and mask (B, T)."""
    ids, segments = (pad_sequence(tokens.split(part), batch_first=True) for part in (tokens.ids, tokens.segments))
    mask = pad_sequence([torch.ones_like(one) for one in tokens.split()], batch_first=True)
    return ids, segments, mask
