"""Tokenizer of a model in a GGUF file.

llama.cpp has tokenizers of its own: ``gpt2`` for byte-level BPE, with a name for each way to split
a text before, and ``llama`` for BPE with bytes as a last resort, as in LLaMA 2. A tokenizer that is
neither is refused, because the model would read other tokens than in training.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from espalier.environment.bounded_json import read_json
from espalier.errors import InputError
from espalier.hf.opening.opened_model import OpenedModel

if TYPE_CHECKING:
    from gguf import GGUFWriter

LIKE_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {LIKE_LLAMA_3: "llama-bpe", LIKE_LLAMA_3.replace("{1,3}", ""): "qwen2"}
"""Name in llama.cpp of the patterns by which texts are split."""
SPACE = "▁"
SPECIAL = ("bos", "eos", "pad", "unk")
OTHER = "convert the tokenizer with convert_hf_to_gguf.py of llama.cpp"


def add_vocabulary(writer: "GGUFWriter", model: OpenedModel) -> None:
    """Add tokens, merges, special tokens and the chat template of a model to a file.

    Raises InputError if llama.cpp has no tokenizer that splits texts as the model's does.
    """
    path = model.directory
    document = _described(model)
    bpe = document.get("model") or {}
    if bpe.get("type") != "BPE":
        raise InputError(
            f"{path}: model.type = {bpe.get('type')!r}: GGUF files need a BPE tokenizer; {OTHER}"
        )
    tokens, kinds = _tokens(model, bpe)
    if bpe.get("byte_fallback"):
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores(_scores(tokens, bpe))
        writer.add_add_space_prefix(_adds_space(document, str(path)))
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_split_of(document, str(path)))
        writer.add_token_merges([" ".join(_pair(merge)) for merge in bpe["merges"]])
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    _add_special(writer, model)


def _described(model: OpenedModel) -> Mapping[str, Any]:
    """Return the tokenizer as transformers uses it, in the form of ``tokenizer.json``.

    The classes of some families replace parts of that file.
    """
    backend = getattr(model.tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise InputError(
            f"{model.directory}: its tokenizer is not one of the library tokenizers, as GGUF files"
            f" need; {OTHER}"
        )
    document: Mapping[str, Any] = read_json(backend.to_str())
    return document


def _tokens(model: OpenedModel, bpe: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    """Return the text and the kind of the token of each row of the embedding."""
    from gguf import TokenType

    rows = model.checkpoint.tensors[model.family.embedding_weight].shape[0]
    tokens = [f"[PAD{row}]" for row in range(rows)]
    kinds = [int(TokenType.UNUSED)] * rows
    tokenizer = model.tokenizer
    added = tokenizer.added_tokens_decoder
    unknown = bpe.get("unk_token")
    for token, row in tokenizer.get_vocab().items():
        if row >= rows:
            raise InputError(
                f"{model.directory}: token {token!r} has number {row}, and the embedding"
                f" has {rows} rows; copy tokenizer and weights from one model"
            )
        tokens[row] = token
        kind = TokenType.NORMAL
        if row in added:
            kind = TokenType.CONTROL if added[row].special else TokenType.USER_DEFINED
        elif bpe.get("byte_fallback") and len(token) == 6 and token.startswith("<0x"):
            kind = TokenType.BYTE
        if bpe.get("byte_fallback") and token == unknown:
            kind = TokenType.UNKNOWN
        kinds[row] = int(kind)
    return tokens, kinds


def _pair(merge: Any) -> tuple[str, str]:
    first, second = merge.split(" ") if isinstance(merge, str) else merge
    return first, second


def _scores(tokens: list[str], bpe: Mapping[str, Any]) -> list[float]:
    """Return a score for each token: llama.cpp first merges what gives the highest.

    SentencePiece gives the tokens these scores in the order of the merges.
    """
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(bpe["merges"]):
        ranks.setdefault("".join(_pair(merge)), rank)
    last = len(bpe["merges"])
    return [-float(ranks.get(token, last)) for token in tokens]


def _adds_space(document: Mapping[str, Any], where: str) -> bool:
    """Return whether a text gets a space before it; spaces must be written as ``▁``."""
    normalizer = document.get("normalizer") or {}
    steps = normalizer.get("normalizers", [normalizer] if normalizer else [])
    pre = document.get("pre_tokenizer") or {}
    if not steps and pre.get("type") == "Metaspace" and pre.get("replacement") == SPACE:
        return pre.get("prepend_scheme") != "never"
    kinds = [step.get("type") for step in steps]
    replaces = any(step.get("type") == "Replace" and step.get("content") == SPACE for step in steps)
    if pre or not replaces or set(kinds) - {"Prepend", "Replace"}:
        raise InputError(
            f"{where}: normalizer = {kinds}, pre_tokenizer = {pre.get('type')!r}: llama.cpp"
            f" splits texts with bytes as a last resort in another way; {OTHER}"
        )
    return "Prepend" in kinds


def _split_of(document: Mapping[str, Any], where: str) -> str:
    """Return llama.cpp's name of the way in which a byte-level tokenizer splits texts."""
    pre = document.get("pre_tokenizer") or {}
    steps = pre.get("pretokenizers", [pre])
    normalizer = document.get("normalizer") or {}
    *before, last = steps
    byte_level = last.get("type") == "ByteLevel" and not last.get("add_prefix_space")
    ignores = bool((document.get("model") or {}).get("ignore_merges"))
    name = ""
    if byte_level and last.get("use_regex", True) and not normalizer and not ignores:
        if not before:
            name = "gpt-2"
        elif [(step.get("type"), step.get("individual_digits")) for step in before] == [
            ("Digits", True)
        ]:
            name = "smollm"
    elif byte_level and len(before) == 1 and before[0].get("type") == "Split":
        name = SPLITS.get((before[0].get("pattern") or {}).get("Regex", ""), "")
        # Qwen's tokenizers compose characters first; llama.cpp expects texts that are composed.
        fits = normalizer.get("type") in (None, "NFC") if name == "qwen2" else not normalizer
        name = name if fits and ignores == (name == "llama-bpe") else ""
    if not name:
        raise InputError(
            f"{where}: splits texts in a way that has no name in llama.cpp, or that Espalier does"
            f" not know (pre_tokenizer = {pre}); {OTHER}"
        )
    return name


def _add_special(writer: "GGUFWriter", model: OpenedModel) -> None:
    tokenizer = model.tokenizer
    for name in SPECIAL:
        token = getattr(tokenizer, f"{name}_token_id", None)
        if isinstance(token, int):
            getattr(writer, f"add_{name}_token_id")(token)
    beginning = tokenizer("a")["input_ids"]
    bos = tokenizer.bos_token_id
    eos = tokenizer.eos_token_id
    writer.add_add_bos_token(bos is not None and beginning[0] == bos)
    writer.add_add_eos_token(eos is not None and beginning[-1] == eos)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)
