"""What the chats of all protocols share: templates, reasoning and tool calls."""
