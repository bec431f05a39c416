"""Extracts the text of a document, plain text or PDF, in a separate process."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shadowkv.serve.bodies.api_error import ApiError
from shadowkv.serve.bodies.limits import MAX_TEXT_CHARS

if TYPE_CHECKING:
    from pypdfium2 import PdfPage

MAX_DOCUMENT_BYTES = 20 * 2**20
"""Maximum size of a file in bytes. A PDF with a thousand pages of text has a few MB; larger ones are mostly
pictures."""

DOCUMENT_SECONDS = 60.0
"""Time limit for reading a document; PDFium reads hundreds of pages per second."""

_DIVIDED = "\ufffe"
"""Character that PDFium writes where a hyphen at the end of a line divides a word."""
_OTHERS = re.compile("(?<=[^\\W\\d_])[\u2010\u00ad]\r\n(?=[^\\W\\d_])")
"""Divisions of words at line ends that PDFium does not mark: by U+2010 (which browsers write) or by a soft hyphen."""


@dataclass(frozen=True)
class Document:
    """A document's text and number of pages. The number is 0 for plain text."""

    text: str
    pages: int


def read_document(raw: bytes) -> Document:
    """Returns the document in a file; raises ApiError if the file has no text or too much."""
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
    """Returns the text of a PDF's pages, in order. This must run in a separate process, because PDFium is C++ code,
    which may crash, and is not thread-safe."""
    try:
        from pypdfium2 import PdfDocument, PdfiumError
        from pypdfium2.raw import FPDF_ERR_PASSWORD, FPDF_ERR_SECURITY
    except ImportError:
        raise _unreadable("PDFs need pypdfium2, which the server lacks; install it there with pip") from None
    try:
        with PdfDocument(raw) as opened:  # fails if a password is needed to read the file
            pages, length = [], 0
            for page in opened:
                pages.append(_page_text(page))
                length += len(pages[-1])
                if length > MAX_TEXT_CHARS:
                    break
            return Document(_whole_words("\n\n".join(pages)), len(opened))
    except PdfiumError as error:
        if error.err_code in (FPDF_ERR_PASSWORD, FPDF_ERR_SECURITY):
            raise _unreadable("this PDF is encrypted; save it without a password") from None
        raise _unreadable("this PDF cannot be read; it is damaged or incomplete") from None


def _page_text(page: PdfPage) -> str:
    found = page.get_textpage()
    text = found.get_text_range()  # get_text_bounded() loses hyphens at the ends of lines
    found.close()
    page.close()
    return _OTHERS.sub(_DIVIDED, text).replace("\r\n", "\n").replace("\0", "").strip()


def _whole_words(text: str) -> str:
    """Joins words that line ends divide; a word keeps its hyphen if it is written with one elsewhere."""
    hyphenated = set(re.findall(r"\b(\w{1,40})(?=-(\w{1,40}))", text.lower()))

    def joined(word: re.Match[str]) -> str:
        first, second = word.groups()
        return f"{first}-{second}" if (first.lower(), second.lower()) in hyphenated else first + second

    return re.sub(rf"(\w{{0,40}}){_DIVIDED}(\w{{0,40}})", joined, text)


def _unreadable(message: str) -> ApiError:
    return ApiError(message, param="document", code="unreadable_document")
