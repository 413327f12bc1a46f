"""The types of request fields that our own code checks, because their annotations only name what they become.

All other fields are described by their annotations.
"""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, create_model
from pydantic.fields import FieldInfo

from actorserve.http.openai.completion_request import CompletionRequest
from actorserve.http.openai.messages import ChatMessage
from actorserve.http.openai.requests import ChatRequest
from actorserve.http.openai.tokenizing import Detokenize
from actorserve.http.requests.fields import SamplingFields

_TokenId = Annotated[int, Field(ge=0)]
_TextPart = create_model(
    "TextPart", __config__=ConfigDict(extra="forbid"), type=(str, Field(pattern="^text$")), text=(str, ...)
)
_Content = str | Annotated[list[_TextPart], Field(min_length=1)]


def described(model: type[BaseModel]) -> type[BaseModel]:
    """``model`` with the types that clients write in place of those that validation makes of them."""
    types = {name: known for base in reversed(model.__mro__) for name, known in _TYPES.get(base, {}).items()}
    fields: dict[str, Any] = {
        name: (types[name], ... if info.is_required() else None)
        for name, info in model.model_fields.items()
        if name in types
    }
    return create_model(model.__name__, __base__=model, __doc__=model.__doc__, **fields)


def is_described(model: type[BaseModel], name: str, info: FieldInfo) -> bool:
    """Whether the document can tell which values a field takes."""
    return any(name in _TYPES.get(base, {}) for base in model.__mro__) or not any(
        type(item).__name__ == "PlainValidator" for item in info.metadata
    )


_TYPES: dict[type, dict[str, Any]] = {
    SamplingFields: {
        "stop": str | list[str],
        "stop_token_ids": list[_TokenId],
        "logit_bias": dict[str, Annotated[float, Field(ge=-100, le=100)]],
    },
    Detokenize: {"tokens": list[_TokenId]},
    ChatMessage: {"content": _Content},
    CompletionRequest: {"prompt": str | list[str] | list[_TokenId] | list[list[_TokenId]], "suffix": None},
}
_TYPES[ChatRequest] = {"messages": Annotated[list[described(ChatMessage)], Field(min_length=1)]}  # type: ignore[misc]
