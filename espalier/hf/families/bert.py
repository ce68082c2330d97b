"""BERT for sequence classification.

The pooler is part of the head. Files of a masked language model have no pooler; if there is one,
tuning starts from it.
"""

from espalier.hf.families.family import Family

BERT = Family(
    name="bert",
    model_types=("bert",),
    kind="encoder",
    kv_heads_key="",
    blocks="bert.encoder.layer",
    linears={
        "attn.q": "attention.self.query",
        "attn.k": "attention.self.key",
        "attn.v": "attention.self.value",
        "attn.o": "attention.output.dense",
        "mlp.up": "intermediate.dense",
        "mlp.down": "output.dense",
    },
    embeddings="bert.embeddings",
    head="classifier",
    base="bert",
    norms={"norm.attn": "attention.output.LayerNorm", "norm.mlp": "output.LayerNorm"},
    head_linears={"head.dense": "bert.pooler.dense", "head.out": "classifier"},
)
