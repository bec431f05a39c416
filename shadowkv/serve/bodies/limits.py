"""How much one request may ask for: every limit of the API's parameters, with its reason.

A body as a whole is limited by ``--max-body-mib``, a prompt by the model's context. The limits below are far above
what clients send; without them a body of a few MiB keeps the server busy for minutes. The OpenAPI schema
(``/openapi.json``) shows them as ``maxItems`` and ``maxLength``.
"""

from __future__ import annotations

MAX_CHOICES = 128
"""``n``, as in the OpenAI API: each choice is a separate sequence."""

MAX_PROMPTS = 2_048
"""Prompts of one completions request, as in the OpenAI API."""

MAX_PROMPT_TOKENS = 2**21
"""Token ids of a request: no model's context is longer."""

MAX_TOKEN_ID = 2**31 - 1
"""Token ids are kept and sent between processes in 32 bits."""

MAX_TEXT_CHARS = 2**23
"""Characters of all prompts or messages of a request, two million tokens of English: receiving a text from the
process that read it holds the interpreter's lock for some 3 ns per character."""

MAX_KEYS = 2**16
"""Keys of one JSON object."""

MAX_MESSAGES = 8_192
"""Messages of a conversation (OpenAI: 2,048), and content parts and tool calls of all of them together."""

MAX_NAME_CHARS = 256
"""Characters of ``model``, of a message's ``name`` and of names and ids of tools."""

MAX_TOOLS, MAX_TOOLS_CHARS = 1_024, 2**20
"""Tools of one request (OpenAI: 128), and their length as JSON: all are in the prompt."""

MAX_TEMPLATE_CHARS = 2**16
"""Characters of ``chat_template_kwargs`` as JSON, which are a few switches, and of ``chat_template``."""

MAX_NESTING = 100
"""Levels of tools, of a call's arguments and of ``chat_template_kwargs``, which templates traverse recursively."""

MAX_VALUES = 2**16
"""JSON values of all tools, of ``chat_template_kwargs``, and of the arguments of all calls together: each is searched
for special tokens."""

MAX_CONTAINERS, MAX_ITEMS = 2**18, 2**22
"""Arrays and objects of a body, and commas between what they hold: far more than any valid body has. They are counted
before anything is made of them: ten million empty arrays take half a minute to be read and refused."""

MAX_STOP_STRINGS, MAX_STOP_CHARS = 64, 1_024
"""Stop strings and the characters of each (OpenAI: 4 strings): all are searched for after every token."""

MAX_STOP_TOKEN_IDS = 1_024
"""Stop token ids of a request; the server's model has a handful of its own."""

MAX_ALLOWED_TOKEN_IDS = 2**18
"""Token ids of ``allowed_token_ids``: no vocabulary has more."""

MAX_BAD_WORDS = 256
"""Texts of ``bad_words``: each is compared with the end of the answer at every step."""

MAX_LOGIT_BIASES = 1_024
"""Entries of ``logit_bias`` (OpenAI: 300): each is added to the logits at every step."""
MAX_BIASED_CHARS = 8_192
"""Of all texts whose tokens llama.cpp's ``logit_bias`` means: they are tokenised while all else waits."""

MAX_METADATA, MAX_METADATA_KEY_CHARS, MAX_METADATA_CHARS = 16, 64, 512
"""Pairs of ``metadata`` that an answer repeats, and the characters of each, as in the OpenAI API."""

MAX_SNAPSHOTS = 4_096
"""Snapshots that a request names: those of a chat, one per turn."""

MAX_UNKNOWN = 256
"""Names of unknown parameters that are logged, in total."""

TOKENIZE_TOKENS = 2**18
"""Approximate limit on the tokens that ``/tokenize`` returns; the model's context if that is longer."""
