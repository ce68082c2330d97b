"""Figures of SFT-P's paper that can be recounted, as printed, and the settings of its table 4."""

MODELS = {
    "LLaMA-7B": "llama-7b",
    "LLaMA2-7B": "llama-7b",
    "Qwen2-7B-Instruct": "qwen2-7b",
    "LLaMA3.1-8B": "llama3-8b",
}
"""Shape in ``models.published_models`` by the paper's name; LLaMA 2 has LLaMA's matrices."""
SHARES = (0.2, 0.5)
WIDTH = 32
RANK = 8
TARGETS = ("attn.q", "attn.v")
BIAS = 3.0

Line = tuple[str, str, str, str, str]
"""Scores of ARC-Easy, HellaSwag, PIQA and WinoGrande, and their mean, in percent."""

AVERAGES: dict[str, dict[str, Line]] = {
    "1, LLaMA-7B, 20%": {
        "FLAP": ("49.41", "64.90", "74.81", "64.56", "63.42"),
        "SliceGPT+Finetune": ("56.90", "62.25", "74.97", "65.82", "64.99"),
        "LLMPruner+Finetune": ("56.86", "67.40", "75.84", "64.64", "68.19"),
        "LLM-Streamline+Finetune": ("66.71", "70.62", "76.50", "69.69", "70.88"),
        "SliceGPT+Finetune (FL)": ("66.67", "66.24", "74.76", "67.25", "68.73"),
        "LLMPruner+Finetune (FL)": ("54.79", "66.31", "75.41", "60.38", "64.22"),
        "LLM-Streamline+Finetune (FL)": ("61.95", "65.69", "73.94", "69.85", "67.86"),
        "SFT-P NOC/NOA": ("71.17", "68.77", "77.91", "66.30", "71.04"),
        "SFT-P NOC/+A": ("71.21", "68.08", "76.82", "63.93", "70.01"),
        "SFT-P +C/NOA": ("73.06", "69.13", "79.05", "66.46", "71.93"),
        "SFT-P +C/+A": ("73.27", "69.50", "78.07", "66.61", "71.86"),
    },
    "1, LLaMA-7B, 50%": {
        "FLAP": ("40.32", "41.89", "62.95", "54.06", "49.81"),
        "SliceGPT+Finetune": ("28.96", "29.61", "56.09", "50.99", "41.41"),
        "LLMPruner+Finetune": ("47.14", "55.26", "69.59", "57.85", "57.46"),
        "LLM-Streamline+Finetune": ("42.85", "49.85", "65.72", "62.98", "55.35"),
        "SliceGPT+Finetune (FL)": ("32.32", "29.01", "57.83", "51.14", "42.58"),
        "LLMPruner+Finetune (FL)": ("39.27", "46.60", "63.54", "53.91", "50.83"),
        "LLM-Streamline+Finetune (FL)": ("30.89", "34.05", "51.25", "55.72", "42.98"),
        "SFT-P NOC/NOA": ("54.42", "49.93", "70.29", "53.67", "57.08"),
        "SFT-P NOC/+A": ("54.59", "49.93", "70.57", "57.06", "58.04"),
        "SFT-P +C/NOA": ("58.12", "49.09", "70.78", "56.59", "58.65"),
        "SFT-P +C/+A": ("60.27", "50.67", "69.75", "56.59", "59.32"),
    },
    "5, LLaMA2-7B, 20%": {
        "FLAP": ("40.24", "41.97", "63.11", "53.91", "49.81"),
        "SliceGPT+Finetune": ("64.27", "62.32", "73.07", "63.61", "65.82"),
        "LLM-Streamline+Finetune": ("68.52", "71.22", "76.38", "67.64", "70.94"),
        "LLM-Streamline+Finetune (FL)": ("57.79", "65.33", "70.78", "66.06", "64.99"),
        "SFT-P +C/NOA": ("71.76", "64.44", "76.93", "63.54", "69.17"),
        "SFT-P +C/+A": ("71.89", "65.34", "76.22", "62.59", "69.01"),
    },
    "5, LLaMA2-7B, 50%": {
        "FLAP": ("34.85", "39.67", "61.64", "51.38", "46.89"),
        "SliceGPT+Finetune": ("41.71", "38.15", "61.04", "54.78", "48.92"),
        "LLM-Streamline+Finetune": ("40.66", "39.69", "65.29", "49.25", "48.72"),
        "LLM-Streamline+Finetune (FL)": ("26.43", "26.42", "51.58", "50.83", "38.82"),
        "SFT-P +C/NOA": ("52.40", "40.82", "68.61", "50.83", "53.17"),
        "SFT-P +C/+A": ("52.02", "41.07", "67.08", "51.78", "52.99"),
    },
    "5, Qwen2-7B-Instruct, 20%": {
        "SFT-P +C/NOA": ("74.24", "73.93", "79.00", "68.27", "73.86"),
        "SFT-P +C/+A": ("77.74", "74.15", "79.38", "69.85", "75.28"),
    },
    "5, Qwen2-7B-Instruct, 50%": {
        "SFT-P +C/NOA": ("65.61", "55.38", "74.05", "59.91", "63.74"),
        "SFT-P +C/+A": ("64.81", "55.88", "73.50", "59.59", "63.45"),
    },
    "5, LLaMA3.1-8B, 20%": {
        "SFT-P +C/NOA": ("78.16", "71.02", "79.16", "70.71", "74.76"),
        "SFT-P +C/+A": ("74.03", "68.00", "76.61", "65.59", "71.06"),
    },
    "5, LLaMA3.1-8B, 50%": {
        "SFT-P +C/NOA": ("60.14", "45.54", "68.66", "55.17", "57.38"),
        "SFT-P +C/+A": ("58.96", "45.93", "70.78", "54.38", "57.51"),
    },
}
TABLE_2 = {
    ("SFT-P +C/NOA", "20%", "ARC-Easy, HellaSwag"): ("73.06", "69.13"),
    ("SFT-P +C/+A", "20%", "ARC-Easy, HellaSwag"): ("73.27", "69.50"),
    ("SFT-P +C/NOA", "50%", "PIQA, WinoGrande"): ("70.78", "56.59"),
    ("SFT-P +C/+A", "50%", "PIQA, WinoGrande"): ("69.75", "56.59"),
}
"""Scores of table 1 that table 2 repeats."""
