"""Anthropic's messages: a chat whose answer is a list of blocks."""

from __future__ import annotations

import json

from shadowkv.serve.anthropic.output import PING, MessageOutput
from shadowkv.serve.anthropic.protocol import NAMES, MessagesRequest
from shadowkv.serve.api_error import MESSAGES_URL
from shadowkv.serve.chats import EventChat
from shadowkv.serve.jobs import Job


class Messages(EventChat):
    """``/v1/messages``."""

    url = MESSAGES_URL
    request_type = MessagesRequest
    id_prefix = "msg"
    names = NAMES
    sign_of_life = f"event: ping\ndata: {json.dumps(PING)}\n\n"

    def output(self, job: Job) -> MessageOutput:
        return MessageOutput(job)
