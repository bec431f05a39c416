"""Limits of the API's parameters, each with its reason. Unless a docstring says otherwise, the limit is the maximum
number of what the docstring names.

``--max-body-mib`` limits a whole body, and the model's context limits a prompt. The limits below are far above what
clients send. Without them, a body of a few MiB could keep the server busy for minutes. The OpenAPI schema
(``/openapi.json``) shows the limits as ``maxItems`` and ``maxLength``.
"""

from __future__ import annotations

MAX_CHOICES = 128
"""Maximum ``n``, as in the OpenAI API: each choice is a separate sequence."""

MAX_PROMPTS = 2_048
"""Prompts of one completion request, as in the OpenAI API."""

MAX_PROMPT_TOKENS = 2**21
"""Token ids of a request: no model has a longer context."""

MAX_TOKEN_ID = 2**31 - 1
"""Maximum token id: ids are stored, and sent between processes, in 32 bits."""

MAX_TEXT_CHARS = 2**23
"""Characters of all prompts or messages of a request: two million tokens of English. The limit also bounds how
long the server stalls: it receives the texts of long bodies from another process, and holds the GIL for about 3 ns per
character meanwhile."""

MAX_KEYS = 2**16
"""Keys of one JSON object."""

MAX_MESSAGES = 8_192
"""Messages of a conversation (OpenAI: 2,048). It is also the limit of the content parts of all messages together, and
of all their tool calls."""

MAX_NAME_CHARS = 256
"""Characters of ``model``, of a message's ``name``, and of the names and ids of tools."""

MAX_TOOLS, MAX_TOOLS_CHARS = 1_024, 2**20
"""Tools of one request (OpenAI: 128), and characters of their JSON: all tools become part of the prompt."""

MAX_TEMPLATE_CHARS = 2**16
"""Characters of ``chat_template``, and of ``chat_template_kwargs`` as JSON. The latter usually has only a few
switches."""

MAX_NESTING = 100
"""Nesting levels of tools, of a call's arguments and of ``chat_template_kwargs``: templates traverse them
recursively."""

MAX_VALUES = 2**16
"""JSON values of all tools, of ``chat_template_kwargs``, and of the arguments of all calls together: each value is
searched for special tokens."""

MAX_CONTAINERS, MAX_ITEMS = 2**18, 2**22
"""Arrays and objects of a body, and commas between their items: far more than any valid body has. They are counted
before the body is parsed, since ten million empty arrays take half a minute to parse and refuse."""

MAX_STOP_STRINGS, MAX_STOP_CHARS = 64, 1_024
"""Stop strings, and characters of each (OpenAI: 4 strings): all are searched for after every token."""

MAX_STOP_TOKEN_IDS = 1_024
"""Stop token ids of a request; a model itself has only a handful."""

MAX_ALLOWED_TOKEN_IDS = 2**18
"""Token ids of ``allowed_token_ids``: no vocabulary is larger."""

MAX_BAD_WORDS = 256
"""Texts of ``bad_words``: each is compared with the end of the answer at every step."""

MAX_LOGIT_BIASES = 1_024
"""Entries of ``logit_bias`` (OpenAI: 300): each is added to the logits at every step."""
MAX_BIASED_CHARS = 8_192
"""Characters of all texts in llama.cpp's ``logit_bias``: their tokenization blocks the server."""

MAX_METADATA, MAX_METADATA_KEY_CHARS, MAX_METADATA_CHARS = 16, 64, 512
"""Pairs of ``metadata``, and characters of each key and of each value, as in the OpenAI API. Answers repeat them."""

MAX_SNAPSHOTS = 4_096
"""Snapshots that a request names: a chat has one per turn."""

MAX_UNKNOWN = 256
"""Total number of unknown parameters whose names are logged."""

TOKENIZE_TOKENS = 2**18
"""Approximate maximum number of tokens that ``/tokenize`` returns; the model's context if that is longer."""
