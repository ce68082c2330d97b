"""Settings of a run that stand outside its tables."""

from typing import Literal

from pydantic import Field

from espalier.settings.table import Table

DEFAULT_METHOD = "fedprllm"


class TopSettings(Table):
    """Keys of a run without a table."""

    method: str = Field(
        DEFAULT_METHOD,
        description="Method of the run; its own settings are in the table with its name.",
    )
    model: str = Field(
        "demo",
        min_length=1,
        description=(
            "`demo`, the directory of a model in safetensors format, or `owner/name[@revision]` of"
            " the Hugging Face hub, which is downloaded (a directory of that name wins): LLaMA,"
            " Mistral, Qwen2, Qwen3, Gemma 2 or 3, Granite, OLMo 2, Phi-3 or 4, SmolLM3 or OPT, and"
            " for tuning also Mixtral, Qwen3-MoE, BERT or RoBERTa."
        ),
    )
    seed: int = Field(0, ge=0, description="Seed from which every random choice is derived.")
    num_clients: int = Field(
        8,
        ge=1,
        description=(
            "Number of clients: the first of the connected sites in the order of their names."
        ),
    )
    quorum: float = Field(
        0.0,
        ge=0,
        le=1,
        description=(
            "Fraction of the clients that must finish a round. 0: half of them in a simulation,"
            " all of them in a deployment."
        ),
    )
    threads: int = Field(
        2,
        ge=1,
        le=1024,
        description=(
            "CPU threads of every process. Another number can change the last bits of results."
        ),
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description=("Device for tensor computations; `auto`: CUDA if there is a device.")
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32",
        description=(
            "Number format of the forward pass; the result is written in the format of the model's"
            " files."
        ),
    )
    attention: Literal["sdpa", "flash_attention_2", "eager"] = Field(
        "sdpa",
        description=(
            "Implementation of attention in transformers. `flash_attention_2` needs a CUDA device,"
            " the package flash-attn, and `bfloat16` or `float16`. Gemma 2 computes as with"
            " `eager` where this is `sdpa`, which transformers does not have for it."
        ),
    )
    activations: Literal["memory", "disk"] = Field(
        "memory",
        description=(
            "Storage of the samples' hidden states between two blocks; `disk`: in an unnamed file,"
            " for calibration sets that do not fit in memory."
        ),
    )
    out_dir: str = Field(
        "runs", min_length=1, description="Directory in which run directories are created."
    )
    resume_from: str = Field("", description="Directory of an interrupted run to resume.")
    tracking: Literal["none", "tensorboard", "trackio", "wandb", "mlflow"] = Field(
        "none",
        description=(
            "Tool for which the server records settings and figures of the run; each needs the"
            " extra of its name. `tensorboard` and `wandb` write into the run directory, `trackio`"
            " and `mlflow` into `out-dir`. Sites never write for it."
        ),
    )
    part_bytes: int = Field(
        256 * 1024 * 1024,
        ge=1024,
        le=1024**3,
        description="Maximum payload of one message in bytes.",
    )
    site_keys: str = Field(
        "",
        description=(
            "Directory on the server with the public key of each site, `NAME.key.pub`, as written"
            " by `espalier keys`. A node that claims a site's name must have its private key"
            " (`site-key` in its own configuration), and sites without a public key there are"
            " refused. Empty: names are not verified. Not in a simulation."
        ),
    )
    enrol_seconds: float = Field(
        120.0,
        gt=0,
        description=(
            "Seconds to wait for the next client to connect. The first answer of a connected client"
            " is waited for up to `deadline-seconds`."
        ),
    )
    deadline_seconds: float = Field(
        900.0, gt=0, description="Seconds until a message without a reply is sent again."
    )
    attempts: int = Field(2, ge=1, description="Maximum number of times that a message is sent.")
    round_seconds: float = Field(
        0.0,
        ge=0,
        description=(
            "Maximum duration in seconds of a round with all its messages. Then the round ends"
            " with the clients that have answered, if they are a quorum, and the others are"
            " dropped. 0: a day, or ten times `deadline-seconds` times `attempts` if that is"
            " longer; in a simulation no limit."
        ),
    )
