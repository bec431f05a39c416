"""Documents in messages. They are PDF files or plain text, and their text becomes part of the prompt."""

from __future__ import annotations

import base64
import binascii
import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from shadowkv.serve.bodies.api_error import ApiError
from shadowkv.serve.bodies.body import Body, Name, attachments, refusal
from shadowkv.serve.page.documents import read_document
from shadowkv.serve.storage.store import content_in

DATA_URL = re.compile(r"data:[^,]{0,200};base64,")

FileData = Annotated[str, Field(min_length=1)]
"""A file in base64, alone or as a ``data:`` URL. Its length is limited only by the limit on the whole body."""


class FileSource(Body):
    """A file: in the request itself, or uploaded to ``/v1/files``."""

    filename: Name | None = None
    file_data: FileData | None = None
    file_id: Name | None = None

    @model_validator(mode="after")
    def _check_source(self) -> FileSource:
        if (self.file_data is None) == (self.file_id is None):
            raise refusal("file_data", "pass either file_data, in base64, or file_id; URLs are not fetched")
        return self

    @property
    def text(self) -> str:
        """The file's text for a prompt. Reading it raises what ``file_text`` raises."""
        return as_prompt(file_text(self.file_data, self.file_id), title=self.filename)


class FilePart(Body):
    """A document as a part of a chat message's content."""

    type: Literal["file"]
    file: FileSource

    @property
    def text(self) -> str:
        """The file's text for the prompt."""
        return self.file.text


def file_text(data: str | None, id: str | None) -> str:
    """Returns the text of a file that is given as base64 (``data``), or that was uploaded to ``/v1/files`` (``id``).
    Raises ApiError if there is no such file or if it cannot be read. Also raises whatever ``attachments`` raises."""
    here = attachments()
    if id is not None:
        if here.folder is None:
            raise ApiError("this server stores no files; send file_data", param="file_id", code="not_kept")
        try:
            return read_document(content_in(here.folder, id).read_bytes()).text
        except FileNotFoundError:
            raise ApiError(f"there is no file {id[:80]!r} of this API key", status=404, code="file_not_found") from None
    begin = DATA_URL.match(data or "")
    try:
        raw = base64.b64decode((data or "")[0 if begin is None else begin.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise ApiError(f"the file is not in base64: {error}", param="file_data") from error
    return read_document(raw).text


def as_prompt(text: str, title: str | None = None, context: str | None = None) -> str:
    """Returns a document's text in the tags that prompting guides recommend, such as Anthropic's."""
    about = "".join(f"<{name}>{value}</{name}>\n" for name, value in (("source", title), ("context", context)) if value)
    return f"<document>\n{about}<document_content>\n{text}\n</document_content>\n</document>"
