"""torch dtypes by the names of safetensors, and the other way round."""

import torch

TORCH_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""torch dtype by safetensors' name."""
SAFETENSORS_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
