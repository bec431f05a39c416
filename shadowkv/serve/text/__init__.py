"""From text to token ids, and from generated text to thoughts and tool calls."""
