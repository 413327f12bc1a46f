"""A copy of a tokenizer whose control tokens have secret names, so that no text of a client can spell them."""

import json
import secrets
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer as Backend

from actorserve.errors import ModelError

_SECRET_CHARS = 12
_FIRST_PRIVATE, _NUM_PRIVATE = 0xF0000, 0xFFFE  # Unicode's plane 15, for private use


def with_aliases(backend: Backend) -> tuple[Backend, dict[str, str]]:
    """The copy, and the secret names by the texts of the control tokens. Ids are the same.

    All else that a text could become stays equal: words, added tokens that are not control tokens, spaces.

    Raises: ModelError if the library gives a renamed token another id.
    """
    special = {
        token.content: token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
    }
    secret = "".join(chr(_FIRST_PRIVATE + secrets.randbelow(_NUM_PRIVATE)) for _ in range(_SECRET_CHARS))
    aliases = {text: f"{secret}{chr(_FIRST_PRIVATE + index)}" for index, text in enumerate(special)}
    data: dict[str, Any] = json.loads(backend.to_str())
    for token in data["added_tokens"]:
        token["content"] = aliases.get(token["content"], token["content"])
    data["post_processor"] = None  # it would look for the old names, and only adds tokens that a chat does not need
    data["model"] = _renamed(data["model"], aliases)
    aliased = Backend.from_str(json.dumps(data))
    for text, token_id in special.items():
        if aliased.token_to_id(aliases[text]) != token_id:
            raise ModelError(f"the tokenizer's control token {text[:40]!r} has no certain id")
    return aliased, aliases


def _renamed(model: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    """A model's vocabulary with these names. Merges that would make a control token of plain text are left out."""
    renamed = dict(model)
    if isinstance(model["vocab"], list):
        renamed["vocab"] = [[aliases.get(piece, piece), score] for piece, score in model["vocab"]]
    else:
        renamed["vocab"] = {aliases.get(piece, piece): token_id for piece, token_id in model["vocab"].items()}
    if isinstance(model.get("unk_token"), str):
        renamed["unk_token"] = aliases.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        renamed["merges"] = [
            merge for merge in map(_pair, model["merges"]) if aliases.keys().isdisjoint(_pieces(merge))
        ]
    return renamed


def _pair(merge: str | list[str]) -> list[str]:
    return merge.split(" ") if isinstance(merge, str) else merge


def _pieces(merge: list[str]) -> tuple[str, ...]:
    return (*merge, "".join(merge))
