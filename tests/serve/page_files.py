"""Documents for the page: the log of a lighthouse with one thing to be found in it, and PDFs of any text."""

from __future__ import annotations

import random
import textwrap

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


def pdf(text: str, width: int = 90, lines: int = 48) -> bytes:
    """A PDF of a text in Helvetica."""
    rows = [row for paragraph in text.split("\n") for row in textwrap.wrap(paragraph, width) or [""]]
    pages = [rows[start : start + lines] for start in range(0, len(rows), lines)]
    kids = " ".join(f"{4 + 2 * number} 0 R" for number in range(len(pages)))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for number, page in enumerate(pages):
        shown = "".join(f"({row.replace('(', '').replace(')', '')}) Tj T*\n" for row in page)
        content = f"BT /F1 10 Tf 14 TL 50 780 Td\n{shown}ET"
        font = "/Resources << /Font << /F1 3 0 R >> >>"
        objects.append(f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 595 842] {font} /Contents {5 + 2 * number} 0 R >>")
        objects.append(f"<< /Length {len(content)} >>\nstream\n{content}\nendstream")
    out, places = b"%PDF-1.4\n", []
    for number, text in enumerate(objects, 1):
        places.append(len(out))
        out += f"{number} 0 obj\n{text}\nendobj\n".encode("latin-1")
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    size = len(objects) + 1
    trailer = f"xref\n0 {size}\n0000000000 65535 f \n{table}trailer\n<< /Size {size} /Root 1 0 R >>\n"
    return out + f"{trailer}startxref\n{len(out)}\n%%EOF\n".encode()
