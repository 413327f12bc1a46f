"""A server under random chats for a long time: errors, answers that differ, and memory that grows."""
