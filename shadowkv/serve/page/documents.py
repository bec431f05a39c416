"""Text of a document to ask about: plain text or PDF, read in a separate process."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from io import BytesIO

from shadowkv.serve.bodies.api_error import ApiError
from shadowkv.serve.bodies.limits import MAX_TEXT_CHARS

MAX_DOCUMENT_BYTES = 20 * 2**20
"""Size limit of a file: a PDF of a thousand pages of text has a few MB, anything larger is pictures."""

DOCUMENT_SECONDS = 60.0
"""Time limit for reading one; pypdf reads some 20 pages a second."""


@dataclass(frozen=True)
class Document:
    """What was read: the text, and its number of pages, 0 where it had none."""

    text: str
    pages: int


def read_document(raw: bytes) -> Document:
    """The text of a file; raises ApiError where none can be read."""
    document = _pdf(raw) if b"%PDF-" in raw[:1024] else Document(_plain(raw), 0)
    if not document.text.strip():
        scanned = "this PDF has no text, only pictures of it; pass it through OCR first"
        raise _unreadable(scanned if document.pages else "this file has no text")
    if len(document.text) > MAX_TEXT_CHARS:
        raise _unreadable(f"this document has more than {MAX_TEXT_CHARS} characters; send a part of it")
    return document


def _plain(raw: bytes) -> str:
    encoding = "utf-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        text = raw.decode(encoding)
    except UnicodeDecodeError:
        text = raw.decode("latin-1")
    if "\0" in text:
        raise _unreadable("this file is neither a PDF nor text")
    return text.replace("\r\n", "\n")


def _pdf(raw: bytes) -> Document:
    try:
        from pypdf import PdfReader
        from pypdf.errors import DependencyError
    except ImportError:
        raise _unreadable("PDFs need pypdf, which the server lacks: there, pip install pypdf") from None
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # it quotes the faulty parts of files
    try:
        reader = PdfReader(BytesIO(raw))
        if reader.is_encrypted and not reader.decrypt(""):  # most have a password only for changes
            raise _unreadable("this PDF is encrypted; save it without a password")
        pages, length = [], 0
        for page in reader.pages:
            pages.append(page.extract_text().strip())
            length += len(pages[-1])
            if length > MAX_TEXT_CHARS:
                break
    except (ApiError, MemoryError):
        raise
    except DependencyError:
        raise _unreadable("this PDF is encrypted; save it without a password") from None
    except Exception as error:  # of any kind: files may be truncated, or made to break readers
        raise _unreadable(f"this PDF cannot be read ({type(error).__name__})") from None
    text = "\n\n".join(pages)
    return Document(text.encode("utf-8", "ignore").decode(), len(reader.pages))  # without lone surrogates


def _unreadable(message: str) -> ApiError:
    return ApiError(message, param="document", code="unreadable_document")
