"""What other servers of OpenAI's API offer and this one does not. Its clients are told so."""

_BY_PATH = {
    "v1/embeddings": "embeddings",
    "v1/images": "images",
    "v1/videos": "videos",
    "v1/audio": "audio",
    "v1/realtime": "realtime sessions",
    "v1/moderations": "moderation",
    "v1/rerank": "reranking",
    "v2/rerank": "reranking",
    "rerank": "reranking",
    "v1/score": "scoring",
    "score": "scoring",
    "v1/classify": "classification",
    "classify": "classification",
    "v1/pooling": "pooling",
    "pooling": "pooling",
    "v1/edits": "edits",
    "v1/engines": "engines, which models have replaced",
    "v1/fine_tuning": "fine-tuning",
    "v1/evals": "evaluations",
    "v1/files": "files",
    "v1/uploads": "uploads",
    "v1/batches": "batches",
    "v1/messages/batches": "batches",
    "v1/containers": "containers",
    "v1/vector_stores": "vector stores",
    "v1/assistants": "assistants",
    "v1/threads": "threads, because it stores nothing between requests",
    "v1/conversations": "conversations, because it stores nothing between requests",
    "v1/load_lora_adapter": "LoRA adapters",
    "v1/unload_lora_adapter": "LoRA adapters",
}
"""The beginning of a path, in whole segments -> what the path is for."""
_MAX_SEGMENTS = max(path.count("/") for path in _BY_PATH) + 1


def not_offered(path: str) -> str | None:
    """The text for a client that asks for a path of this table; None for other paths."""
    segments = path.strip("/").split("/", _MAX_SEGMENTS)[:_MAX_SEGMENTS]
    for count in range(len(segments), 0, -1):
        what = _BY_PATH.get("/".join(segments[:count]))
        if what is not None:
            return f"this server does not offer {what}; it generates text"
    return None
