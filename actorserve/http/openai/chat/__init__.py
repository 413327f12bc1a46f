"""``/v1/chat/completions``: its requests, which the chats of other APIs become, and the form of its answers."""
