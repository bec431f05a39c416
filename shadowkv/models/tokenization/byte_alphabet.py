"""The characters that represent bytes in byte-level vocabularies."""

from __future__ import annotations


def _alphabet() -> tuple[str, ...]:
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    characters, shifted = [], 0
    for byte in range(256):
        if byte in printable:
            characters.append(chr(byte))
        else:
            characters.append(chr(256 + shifted))
            shifted += 1
    return tuple(characters)


BYTE_ALPHABET = _alphabet()
"""The alphabet of byte-level BPE (GPT-2's convention): a printable character for each byte. Non-printing bytes,
including the space, get characters from U+0100 on."""
