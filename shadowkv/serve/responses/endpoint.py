"""The OpenAI API's responses: a chat whose answer is a list of items."""

from __future__ import annotations

from shadowkv.serve.chats import EventChat
from shadowkv.serve.jobs import Job
from shadowkv.serve.responses.output import ResponseOutput
from shadowkv.serve.responses.protocol import NAMES, ResponsesRequest


class Responses(EventChat):
    """``/v1/responses``."""

    url = "/v1/responses"
    request_type = ResponsesRequest
    id_prefix = "resp"
    names = NAMES

    def output(self, job: Job) -> ResponseOutput:
        return ResponseOutput(job)
