"""BERT for sequence classification.

Its pooler is part of the head: files of a masked language model have none, and where there is one it is where tuning starts.
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
