"""Documents for the page: the log of a lighthouse with one thing to be found in it, and PDFs of any text."""

from __future__ import annotations

import random
import textwrap
from hashlib import md5

FACT = "Today the keeper hid the brass key of the cellar under the third stair."
QUESTION = "Where did the keeper hide the brass key of the cellar?"

_WEATHER = ("fog from the west", "a hard frost", "rain until noon", "a clear night", "gales from the north")
_SIGHTS = ("two herring boats", "a brig under full sail", "the mail steamer", "nobody at all", "a lost dinghy")
_WORK = ("trimmed the wick", "polished the lens", "wound the clockwork", "painted the gallery rail", "carried oil up")


def log(days: int, seed: int = 1) -> str:
    """About 50 tokens a day; the fact is two fifths in."""
    rng = random.Random(seed)
    entries = []
    for day in range(1, days + 1):
        first = f"Day {day}. There was {rng.choice(_WEATHER)}, and the keeper saw {rng.choice(_SIGHTS)} pass the rocks."
        rest = f"Before supper he {rng.choice(_WORK)} and wrote {rng.randint(2, 9)} lines to his sister."
        entries.append(f"{first} {rest}" + (f" {FACT}" if day == 1 + 2 * days // 5 else ""))
    return "\n\n".join(entries)


def pdf(text: str, width: int = 90, lines: int = 48, password: str | None = None) -> bytes:
    """A PDF of a text in Helvetica, encrypted where there is a password, which may be empty, to open it."""
    rows = [row for paragraph in text.split("\n") for row in textwrap.wrap(paragraph, width) or [""]]
    pages = [rows[start : start + lines] for start in range(0, len(rows), lines)]
    kids = " ".join(f"{4 + 2 * number} 0 R" for number in range(len(pages)))
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>".encode(),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    key, entries = (b"", "") if password is None else _encryption(password)
    for page in pages:
        shown = "".join(f"({row.replace('(', '').replace(')', '')}) Tj T*\n" for row in page)
        content = f"BT /F1 10 Tf 14 TL 50 780 Td\n{shown}ET".encode("latin-1")
        at = len(objects) + 2
        if key:
            content = _rc4(md5(key + at.to_bytes(3, "little") + bytes(2)).digest()[:10], content)
        font = "/Resources << /Font << /F1 3 0 R >> >>"
        objects.append(f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 595 842] {font} /Contents {at} 0 R >>".encode())
        objects.append(b"<< /Length %d >>\nstream\n%b\nendstream" % (len(content), content))
    out, places = b"%PDF-1.4\n", []
    for number, one in enumerate(objects, 1):
        places.append(len(out))
        out += b"%d 0 obj\n%b\nendobj\n" % (number, one)
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    size = len(objects) + 1
    trailer = f"xref\n0 {size}\n0000000000 65535 f \n{table}trailer\n<< /Size {size} /Root 1 0 R {entries}>>\n"
    return out + f"{trailer}startxref\n{len(out)}\n%%EOF\n".encode()


_PAD = bytes.fromhex("28BF4E5E4E758A4164004E56FFFA01082E2E00B6D0683E802F0CA9FE6453697A")


def _encryption(password: str) -> tuple[bytes, str]:
    """The key and the trailer's entries of PDF's first encryption, RC4 with 40 bits (ISO 32000-1, 7.6.3)."""
    user = (password.encode() + _PAD)[:32]
    owner = _rc4(md5((b"owner" + _PAD)[:32]).digest()[:5], user)
    key = md5(user + owner + (-4 % 2**32).to_bytes(4, "little")).digest()[:5]
    rights = f"/V 1 /R 2 /P -4 /O <{owner.hex()}> /U <{_rc4(key, _PAD).hex()}>"
    return key, f"/Encrypt << /Filter /Standard {rights} >> /ID [<> <>] "


def _rc4(key: bytes, data: bytes) -> bytes:
    state, here = list(range(256)), 0
    for place in range(256):
        here = (here + state[place] + key[place % len(key)]) % 256
        state[place], state[here] = state[here], state[place]
    out, here = bytearray(), 0
    for number, byte in enumerate(data, 1):
        place = number % 256
        here = (here + state[place]) % 256
        state[place], state[here] = state[here], state[place]
        out.append(byte ^ state[(state[place] + state[here]) % 256])
    return bytes(out)
