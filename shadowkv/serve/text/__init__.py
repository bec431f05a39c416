"""Conversion of text to token ids, and parsers of reasoning and tool calls in generated text."""
