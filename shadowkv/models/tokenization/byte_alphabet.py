"""The alphabet of byte-level BPE: a printable character for every byte (GPT-2's convention)."""

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
"""Character of each byte; non-printing bytes, including the space, get characters from U+0100 on."""
