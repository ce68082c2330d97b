"""RoBERTa and XLM-RoBERTa for sequence classification: BERT's blocks and a separate head."""

from dataclasses import replace

from espalier.hf.families.bert import BERT

ROBERTA = replace(
    BERT,
    name="roberta",
    model_types=("roberta", "xlm-roberta"),
    blocks="roberta.encoder.layer",
    embeddings="roberta.embeddings",
    base="roberta",
    first_position_after_padding=True,
    head_linears={"head.dense": "classifier.dense", "head.out": "classifier.out_proj"},
)
