"""Adapters: long contexts for a short model by LoRA, on made samples, with the base's own chats distilled in."""
