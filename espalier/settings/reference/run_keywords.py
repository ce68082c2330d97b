"""Types of the settings as keyword arguments; written from the schema, do not edit.

``espalier.settings.reference.keywords`` explains the names, docs/reference/settings.md the keys.
"""

from os import PathLike
from typing import Literal, TypedDict

Text = str | PathLike[str]
"""Text, in many cases a path."""


class RunKeywords(TypedDict, total=False):
    """Settings of a run by keyword."""

    method: Literal[
        "fed-sb",
        "fedpetuning",
        "fedprllm",
        "fedsoda",
        "fedspallm",
        "fedspine",
        "flap",
        "flora",
        "hetlora",
        "llm-pruner",
        "llm-streamline",
        "pooled-pruning",
        "sft-p",
        "slicegpt",
    ]
    model: Text
    seed: int
    num_clients: int
    quorum: float
    threads: int
    device: Literal["auto", "cpu", "cuda"]
    dtype: Literal["float32", "bfloat16", "float16"]
    attention: Literal["sdpa", "flash_attention_2", "eager"]
    activations: Literal["memory", "disk"]
    out_dir: Text
    resume_from: Text
    tracking: Literal["none", "tensorboard", "trackio", "wandb", "mlflow"]
    part_bytes: int
    site_keys: Text
    enrol_seconds: float
    deadline_seconds: float
    attempts: int
    round_seconds: float
    data_source: Literal["auto", "documentation", "code", "files", "hub"]
    data_path: Text
    data_field: Text
    data_hub_config: Text
    data_hub_split: Text
    data_columns: Text
    data_prompt: Text
    data_labels: Text
    data_group: Text
    data_partition: Text
    data_partition_field: Text
    data_partition_arguments: Text
    data_alpha: float
    data_num_samples: int
    data_sequence_length: int
    evaluation_texts: Text
    evaluation_sequence_length: int
    evaluation_max_samples: int
    evaluation_local_baseline: bool
    evaluation_own_text: bool
    evaluation_centralized: Literal["auto", "off"]
    evaluation_every: int
    privacy_epsilon: float
    privacy_delta: float
    privacy_clip_norm: float
    privacy_sampling_rate: float
    privacy_max_sequences: int
    privacy_noise: Literal["secure", "seed"]
    privacy_honest_fraction: float
    federation_rounds: int
    federation_sampled_clients: float
    federation_client_weights: Literal[
        "auto",
        "equal",
        "samples",
        "norms",
        "importance",
        "importance-samples",
    ]
    federation_max_weight_ratio: float
    federation_aggregation_rule: Literal["auto", "mean", "clipped-mean", "trimmed-mean", "median"]
    federation_trimmed_clients: int
    federation_max_update_ratio: float
    federation_max_update_norm: float
    federation_wire_dtype: Literal["float32", "bfloat16", "nf4"]
    federation_secure_sum: bool
    federation_fleet: Text
    lora_rank: int
    lora_alpha: float
    lora_ranks: Text
    lora_dropout: float
    lora_targets: Text
    lora_layers: Text
    lora_merge: bool
    lora_keep_zeros: bool
    training_base: Literal["float32", "bfloat16", "nf4"]
    training_steps: int
    training_batch_size: int
    training_accumulation: int
    training_learning_rate: float
    training_schedule: Literal["constant", "linear", "cosine"]
    training_weight_decay: float
    training_proximal: float
    training_gradient_checkpointing: bool
    training_compile: bool
    task_name: Literal[
        "text",
        "sst2",
        "mnli",
        "boolq",
        "arc-easy",
        "arc-challenge",
        "openbookqa",
        "mmlu",
        "piqa",
        "hellaswag",
        "winogrande",
        "gsm8k",
        "dolly",
        "alpaca",
        "chat",
        "completion",
        "classification",
    ]
    task_test_path: Text
    task_max_test_items: int
    task_max_tokens: int
    task_max_test_tokens: int
    task_chat_template: Literal["tokenizer", "chatml"]
    task_packing: bool
    task_answer_tokens: int
    pruning_form: Literal["auto", "compact", "plain", "zero-filled"]
    pruning_ratio: float
    pruning_channel_multiple: int
    pruning_selection: Literal["auto", "global", "block", "kind", "search"]
    pruning_sparsity: float
    pruning_pattern: Text
    pruning_strategy: Literal["one-shot", "iterative"]
    pruning_metric: Literal["wanda", "magnitude", "ria", "sparsegpt"]
    pruning_comparison_group: Literal["layer", "row", "column"]
    pruning_keep_models: bool
    public_text: Text
    public_samples: int
    fed_sb_frozen_bases: Literal["weights", "seed"]
    fedpetuning_aggregation: Literal["factors", "svd", "fedex", "ffa", "rolora"]
    fedprllm_vote_group: Literal["layer", "row", "column"]
    fedprllm_ties: Literal["magnitude", "index", "random"]
    fedprllm_weight_scaling: bool
    fedprllm_continue_behind: Literal["masked", "scaled"]
    fedsoda_adapter_layers: int
    fedsoda_first_layers: int
    fedsoda_drop: Literal["similar", "uniform"]
    fedsoda_group_layers: int
    fedsoda_groups: int
    fedsoda_uniform_rounding: Literal["nearest", "down"]
    fedsoda_emulator: Literal["nf4", "stored"]
    fedsoda_pre_align_steps: int
    fedsoda_realign_steps: int
    fedsoda_realign_every: int
    fedsoda_align_learning_rate: float
    fedspallm_local_method: Literal["sparsegpt", "wanda", "ria", "magnitude"]
    fedspallm_damping_mean: Literal["live", "all"]
    fedspallm_aggregation: Literal["l0", "mean"]
    fedspallm_mask_expansion: bool
    fedspallm_schedule: Literal["constant", "linear", "cubic"]
    fedspallm_sampled_layers: float
    fedspallm_capabilities: Text
    fedspallm_coverage: Literal["every-round", "over-rounds"]
    fedspine_prune_rounds: int
    fedspine_prune_from: int
    fedspine_allocation: Literal["bandit", "fixed", "random"]
    fedspine_arm_space: Literal["relative", "absolute"]
    fedspine_adaptive_pruning: bool
    fedspine_adaptive_rank: bool
    fedspine_rank: int
    fedspine_discount: float
    fedspine_granularity: float
    fedspine_exploration: float
    fedspine_reward: Literal["scaled", "literal"]
    fedspine_score: Literal["exact", "group", "mask"]
    fedspine_normalise: bool
    fedspine_eta: float
    fedspine_aggregation: Literal["coverage", "zero-fill"]
    flap_bias_compensation: bool
    hetlora_aggregation: Literal["zero-pad", "svd"]
    hetlora_rank_weights: Literal["all", "holders"]
    hetlora_gamma: float
    hetlora_regularisation: float
    llm_pruner_element: Literal["absolute", "signed", "squared"]
    llm_pruner_spare_first: int
    llm_pruner_spare_last: int
    llm_pruner_rearrange: Literal["off", "groups", "all"]
    llm_pruner_rescale: Literal["off", "groups", "all"]
    llm_streamline_replacement: Literal["layer", "none"]
    llm_streamline_last_hidden_state: Literal["after-norm", "before-norm"]
    llm_streamline_steps: int
    llm_streamline_batch_size: int
    llm_streamline_learning_rate: float
    pooled_pruning_weighting: Literal["tokens", "equal"]
    sft_p_ratios: Text
    sft_p_ratio_of: Literal["blocks", "model"]
    sft_p_conditioned: bool
    sft_p_adapters: bool
    sft_p_heads: Literal["per-gate", "shared"]
    sft_p_embedding: int
    sft_p_embedding_deviation: float
    sft_p_budget_input: float
    sft_p_code: int
    sft_p_estimator: Literal["reinmax", "gumbel"]
    sft_p_tau: float
    sft_p_norm: Literal["all", "read"]
    sft_p_strength: float
    sft_p_learning_rate: float
    sft_p_masks: Literal["budget", "sign"]
    sft_p_late_clients: int
    sft_p_late_steps: int
    sft_p_validation_samples: int
    slicegpt_width_pruning_ratio: float
    slicegpt_multiple: int
    slicegpt_covariances: Literal["clients", "public"]
