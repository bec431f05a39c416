"""A tokeniser for models without one (dummy weights): every byte is a token, the other ids are printed as <id>."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from shadowkv.models.tokenization.byte_alphabet import BYTE_ALPHABET
from shadowkv.models.tokenization.tokenizer import Tokenizer

_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def byte_tokenizer(vocab_size: int, eos_token_ids: Sequence[int]) -> Tokenizer:
    """Tokeniser of ``vocab_size`` tokens, at least 256 for text to survive; eos tokens are printed as nothing."""
    vocab = {BYTE_ALPHABET[byte]: byte for byte in range(min(256, vocab_size))}
    vocab |= {f"<{token}>": token for token in range(256, vocab_size)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    stops = [token for token in eos_token_ids if 256 <= token < vocab_size]
    backend.add_special_tokens([AddedToken(f"<{token}>", normalized=False) for token in stops])
    return Tokenizer(backend, special_tokens={}, eos_token_ids=eos_token_ids, chat_template=_TEMPLATE)
