"""Short runs of all methods, for simulation and for real processes.

A name is that of the method, and further words tell its runs apart.
"""

RUNS = {
    "fedpetuning": (
        (
            "federation.rounds=2",
            "training.steps=2",
            "lora.targets=all",
            "lora.merge=true",
            "evaluation.local-baseline=false",
        ),
        ["enrol", "train", "fetch", "push", "train", "fetch"],
    ),
    "fedpetuning ffa": (
        (
            "federation.rounds=2",
            "fedpetuning.aggregation=ffa",
            "training.steps=2",
            "lora.merge=true",
            "evaluation.local-baseline=false",
        ),
        ["enrol", "train", "fetch", "push", "train", "fetch"],
    ),
    "fedpetuning rolora": (
        (
            "federation.rounds=2",
            "fedpetuning.aggregation=rolora",
            "training.steps=2",
            "lora.merge=true",
            "evaluation.local-baseline=false",
        ),
        ["enrol", "train", "fetch", "push", "train", "fetch"],
    ),
    "fedpetuning fedex": (
        (
            "federation.rounds=2",
            "fedpetuning.aggregation=fedex",
            "training.steps=2",
            "lora.merge=true",
            "evaluation.local-baseline=false",
        ),
        ["enrol", "train", "fetch", "push", "train", "fetch"],
    ),
    "fedpetuning svd": (
        (
            "federation.rounds=2",
            "fedpetuning.aggregation=svd",
            "training.steps=2",
            "lora.merge=true",
            "evaluation.local-baseline=false",
        ),
        ["enrol", "train", "fetch", "push", "train", "fetch"],
    ),
    "fedprllm": (("data.num-samples=20", "num-clients=3"), ["enrol", "train", "evaluate"]),
    "fedspallm": (
        (
            "fedspallm.capabilities=1,2",
            "data.num-samples=20",
            "evaluation.local-baseline=false",
            "part-bytes=1000000",
        ),
        ["enrol", "train"],
    ),
    "fedsoda": (
        (
            "model={folder}/deeper",
            "federation.rounds=2",
            "training.steps=2",
            "evaluation.local-baseline=false",
            "lora.merge=true",
            "part-bytes=1000000",
            "fedsoda.adapter-layers=1",
            "fedsoda.group-layers=1",
            "fedsoda.groups=1",
            "public.text={folder}/align.txt",
            "public.samples=4",
            "fedsoda.pre-align-steps=2",
            "fedsoda.realign-steps=2",
            "fedsoda.realign-every=2",
        ),
        ["enrol", "push", "push", "push", "train", "push", "train"],
    ),
    "fedspine": (
        (
            "federation.rounds=2",
            "training.steps=2",
            "lora.targets=all",
            "evaluation.local-baseline=false",
            "part-bytes=1000000",
            "federation.fleet=full",
        ),
        ["enrol", "train", "push", "train", "push", "local_baseline"],
    ),
    "sft-p": (
        (
            "federation.rounds=1",
            "training.steps=2",
            "evaluation.local-baseline=false",
            "part-bytes=1000000",
        ),
        ["enrol", "train", "push", "local_baseline"],
    ),
    "flap": (
        ("data.num-samples=20", "evaluation.local-baseline=false"),
        ["enrol", "train", "fetch"],
    ),
    "pooled-pruning": (
        ("data.num-samples=20", "evaluation.local-baseline=false", "part-bytes=1000000"),
        ["enrol", "train"],
    ),
    "slicegpt": (
        ("data.num-samples=20", "evaluation.local-baseline=false", "part-bytes=1000000"),
        ["enrol", "train"],
    ),
    "llm-pruner": (
        (
            "data.num-samples=20",
            "evaluation.local-baseline=false",
            "llm-pruner.spare-first=0",
            "llm-pruner.spare-last=0",
        ),
        ["enrol", "train"],
    ),
    "llm-streamline": (
        (
            "data.num-samples=20",
            "evaluation.local-baseline=false",
            "pruning.ratio=0.5",
            "llm-streamline.steps=2",
            "federation.rounds=1",
            "part-bytes=1000000",
        ),
        ["enrol", "train", "train"],
    ),
    "hetlora": (
        (
            "federation.rounds=1",
            "lora.ranks=2,8",
            "training.steps=2",
            "lora.merge=true",
            "evaluation.local-baseline=false",
            "part-bytes=1000000",
        ),
        ["enrol", "train"],
    ),
    **{
        f"hetlora {name}": (
            (
                "federation.rounds=2",
                "lora.ranks=2,8",
                *words,
                "training.steps=2",
                "lora.merge=true",
                "evaluation.local-baseline=false",
                "part-bytes=1000000",
            ),
            ["enrol", "train", "train"],
        )
        for name, words in {
            "holders": ("hetlora.rank-weights=holders",),
            "svd": ("hetlora.aggregation=svd",),
            "holders svd": ("hetlora.rank-weights=holders", "hetlora.aggregation=svd"),
        }.items()
    },
    "flora": (
        (
            "federation.rounds=2",
            "lora.ranks=2,8",
            "training.steps=2",
            "lora.merge=true",
            "evaluation.local-baseline=false",
        ),
        ["enrol", "train", "push", "train", "fetch"],
    ),
    "fed-sb": (
        (
            "federation.rounds=2",
            "training.steps=2",
            "lora.merge=true",
            "evaluation.local-baseline=false",
        ),
        ["enrol", "train", "train"],
    ),
}
"""Settings, and the kinds of messages that leave the first site in order, by name of the run."""
SMALLER = ("flap", "llm-pruner", "llm-streamline", "slicegpt")
"""Methods whose only result is a smaller model."""
