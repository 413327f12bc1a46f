"""Builds a ``tokenizers`` tokenizer from a GGUF file's metadata, which has no tokenizer.json.

There are two kinds. ``gpt2`` is byte-level BPE (Radford et al. 2019); ``tokenizer.ggml.pre`` names its pre-tokenizer.
``llama`` is SentencePiece's BPE with byte fallback, whose merges follow from the scores of its pieces.
"""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from actorserve.errors import ModelError
from actorserve.model_files.description import ModelDescription
from actorserve.model_files.values import Values

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_MAX_TOKEN_CHARS = 4096
_MAX_MERGED_CHARS = 512
_SPACE = "\u2581"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_SPLIT = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2_SPLIT = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
# A word ends before an upper-case letter that follows lower-case letters.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{{end}}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{{end}}"
_CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN_SPLIT = rf"{_CASED.replace('{end}', '')}|\p{{N}}|{_CASED_REST}"
_GPT4O_SPLIT = rf"{_CASED.replace('{end}', _CONTRACTIONS + '?')}|\p{{N}}{{1,3}}|{_CASED_REST}"
_SPLITS = {
    "qwen2": _QWEN2_SPLIT,  # Qwen 2 and 3
    "tekken": _TEKKEN_SPLIT,  # Mistral since Nemo
    "gpt-4o": _GPT4O_SPLIT,  # Phi-4-mini
    "dbrx": _LLAMA3_SPLIT,  # Phi-4
    **dict.fromkeys(_LLAMA3_NAMES, _LLAMA3_SPLIT),
}
_WHOLE_TOKENS_FIRST = ("tekken", *_LLAMA3_NAMES)  # their prompts also begin with bos
_PRE_NAMES = ("default", "gpt-2", "smollm", *_SPLITS)


def build_tokenizer(description: ModelDescription) -> Tokenizer:
    """Raises: ModelError if the metadata is damaged or of an unsupported kind."""
    values = Values(description.tokenizer_metadata, description.path, "tokenizer.ggml.")
    tokens = _tokens(values, description.path)
    types = values.integers("token_type") if values.has("token_type") else [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ModelError(f"{description.path}: {len(tokens)} tokens have {len(types)} types")
    model = values.text("model")
    if model == "gpt2":
        tokenizer = _byte_level(values, tokens, description.path)
        adds_bos = values.text("pre", "default") in _WHOLE_TOKENS_FIRST
    elif model == "llama":
        tokenizer = _sentencepiece(values, tokens, types, description.path)
        adds_bos = True
    else:
        raise _unsupported(description.path, "tokenizer", model, ("gpt2", "llama"))
    # SentencePiece matches user-defined pieces, such as Gemma's runs of spaces, after spaces have become U+2581. If a
    # space is added before each text, the library cannot do that: it would add one before each piece, too.
    matches_normalized = model == "llama" and not values.flag("add_space_prefix", True)
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [token for token, token_type in zip(tokens, types, strict=True) if token_type == kind]
        if added:
            normalized = matches_normalized and not special
            tokenizer.add_tokens([AddedToken(token, normalized=normalized, special=special) for token in added])
    if description.bos_token_id is not None and values.flag("add_bos_token", adds_bos):
        # The token is named "bos" here, because its own text may contain syntax of the template language.
        bos = {"id": "bos", "ids": [description.bos_token_id], "tokens": [tokens[description.bos_token_id]]}
        tokenizer.post_processor = processors.TemplateProcessing(
            single=["bos", "$A"], pair=["bos", "$A", "bos", "$B"], special_tokens=[bos]
        )
    return tokenizer


def _unsupported(path: Path, what: str, name: str, supported: Sequence[str]) -> ModelError:
    shown = ", ".join(supported)
    return ModelError(f"{path}: {what} {name[:40]!r} is not supported; supported: {shown}, or a Hugging Face folder")


def _tokens(values: Values, path: Path) -> list[str]:
    # An empty token occurs in no text, but its id must stay taken.
    tokens = [token or f"[EMPTY_{token_id}]" for token_id, token in enumerate(values.texts("tokens"))]
    if not tokens or max(map(len, tokens)) > _MAX_TOKEN_CHARS:
        raise ModelError(f"{path}: the vocabulary is empty, or has a token of more than {_MAX_TOKEN_CHARS} characters")
    if len(set(tokens)) != len(tokens):
        raise ModelError(f"{path}: two tokens of the vocabulary are the same")
    return tokens


def _byte_level(values: Values, tokens: Sequence[str], path: Path) -> Tokenizer:
    pre = values.text("pre", "default")
    if pre not in _PRE_NAMES:
        raise _unsupported(path, "pre-tokenizer", pre, _PRE_NAMES)
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    merges: list[tuple[str, str]] = []
    for merge in values.texts("merges"):
        left, _, right = merge.partition(" ")
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise ModelError(f"{path}: a merge of the tokenizer is not made of tokens: {merge[:40]!r}")
        merges.append((left, right))
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in _WHOLE_TOKENS_FIRST))
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    if pre in _SPLITS:
        split = pre_tokenizers.Split(Regex(_SPLITS[pre]), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, whole])
    elif pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(values: Values, tokens: Sequence[str], types: Sequence[int], path: Path) -> Tokenizer:
    scores = values.numbers("scores")
    if len(scores) != len(tokens):
        raise ModelError(f"{path}: {len(tokens)} tokens have {len(scores)} scores")
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    model = BPE(
        vocab=vocabulary,
        merges=_merges_from_scores(tokens, types, scores),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    to_pieces: list[normalizers.Normalizer] = [normalizers.Replace(" ", _SPACE)]
    to_text: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if values.flag("add_space_prefix", True):
        to_pieces.insert(0, normalizers.Prepend(_SPACE))
        to_text.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(to_pieces)
    tokenizer.decoder = decoders.Sequence(to_text)
    return tokenizer


def _merges_from_scores(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """SentencePiece merges the pair whose result scores best. So the merges are all splits of all pieces, best first.

    Control, unknown and byte pieces are never the result of a merge.
    """
    ids = {token: i for i, token in enumerate(tokens) if types[i] == _NORMAL and len(token) <= _MAX_MERGED_CHARS}
    ranked: list[tuple[float, int, int, int]] = []
    for token, token_id in ids.items():
        for cut in range(1, len(token)):
            left, right = ids.get(token[:cut]), ids.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[token_id], token_id, left, right))
    ranked.sort()
    return [(tokens[left], tokens[right]) for _, _, left, right in ranked]
