"""Chats without a protocol's clothes: templates, reasoning and tools."""
