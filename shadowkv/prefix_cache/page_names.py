"""What a snapshot may be used for, and its name, which is chained over the pages of a prompt.

::

    origin  = H("shadowkv origin", key digest, H("shadowkv salt", salt))      the last is zeros without a salt
    link 0  = origin
    link i  = H("shadowkv page", link i - 1, ids of tokens of page i)         64 tokens, little-endian uint32
    name    = the last link in hex; the last page may be incomplete

``H`` is BLAKE2b of 20 bytes whose *personalisation* is the first argument. One pass over a prompt names every prefix
that ends at a page boundary, and nothing with another key or salt shares a link with it. So the pages that two prompts
share are those whose names agree, from the first on.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.prefix_cache.protocol import LINK_BYTES

TokenIds: TypeAlias = Sequence[int] | npt.NDArray[Any]


@dataclass(frozen=True)
class CacheKey:
    """Everything that the bytes of a snapshot depend on besides its tokens; values can be represented in JSON.

    Attributes:
        model: what distinguishes its weights from others; a path does not.
        adapter: the same for the adapter, None without one.
        quantization: of the weights, None where they are as they were stored.
        dtype: type of activations.
        spec: the cache policy.
        codecs: versions of the codecs that it uses, by name.
        prefill: how prompts are attended to.
        tensor_parallel_size: GPUs that share a layer's heads; files are for one, but it is part of every digest.
        tensor_parallel_rank: rank of this one; likewise always 0.
    """

    model: str
    adapter: str | None
    quantization: str | None
    dtype: str
    spec: Mapping[str, Any]
    codecs: Mapping[str, int]
    prefill: str
    tensor_parallel_size: int = 1
    tensor_parallel_rank: int = 0

    @cached_property
    def facts(self) -> dict[str, Any]:
        """The attributes as a JSON object; raises ValueError or TypeError where one cannot be represented in JSON."""
        facts: dict[str, Any] = json.loads(canonical(asdict(self)))
        return facts

    @cached_property
    def digest(self) -> str:
        """Hex digest of the canonical JSON of ``facts``."""
        return _hash(b"shadowkv key", canonical(self.facts).encode()).hex()

    def origin(self, salt: str | None = None) -> str:
        """The link that names of this key and salt start from."""
        return origin(self.digest, salt)


def canonical(value: Any) -> str:
    """JSON with sorted keys, without spaces and in ASCII; raises ValueError for NaN and infinities."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def origin(key_digest: str, salt: str | None = None) -> str:
    """The link before the first page; it includes only a hash of the salt, which cannot be recovered from it."""
    hashed = bytes(LINK_BYTES) if salt is None else _hash(b"shadowkv salt", salt.encode("utf-8", "surrogatepass"))
    return _hash(b"shadowkv origin", bytes.fromhex(key_digest), hashed).hex()


def next_link(link: str, page: bytes | memoryview) -> str:
    """The link after ``link`` for one page's ids, as little-endian uint32."""
    return _hash(b"shadowkv page", bytes.fromhex(link), page).hex()


def page_names(origin: str, token_ids: TokenIds) -> Iterator[tuple[int, str]]:
    """Length and name of each prefix that ends at a page boundary, and of all tokens if those do not; shortest
    first. With a page's name in place of the origin, the prefixes of what follows that page."""
    ids = memoryview(id_bytes(token_ids))
    link, width = origin, 4 * PAGE
    for begin in range(0, len(ids), width):
        page = ids[begin : begin + width]
        link = next_link(link, page)
        yield (begin + len(page)) // 4, link


def new_uid() -> str:
    """A name for the bytes of one snapshot: two with the same tokens may differ in rounding."""
    return secrets.token_hex(16)


class PageNames(list[str]):
    """Names of a growing sequence's full pages.

    Args:
        origin: what the first page's name builds on; a unique one for what must never be shared.
    """

    def __init__(self, origin: str) -> None:
        super().__init__()
        self.origin = origin

    def extend_to(self, token_ids: Sequence[int]) -> PageNames:
        """Adds the pages that ``token_ids``, the whole sequence's, have beyond those already named."""
        new = token_ids[len(self) * PAGE : len(token_ids) // PAGE * PAGE]
        self += [name for _, name in page_names(self[-1] if self else self.origin, new)]
        return self


def common_pages(names: Sequence[str], prompt: Sequence[str], first: int = 0) -> int:
    """Number of pages, by name, that pages with these ``names``, which begin at page ``first``, share with a prompt."""
    low, high = 0, min(len(names), len(prompt) - first)
    while low < high:  # a name covers all pages before it
        middle = (low + high + 1) // 2
        if names[middle - 1] == prompt[first + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def id_bytes(token_ids: TokenIds) -> bytes:
    """Ids as little-endian uint32; raises ValueError where one is not in that range."""
    ids = np.asarray(token_ids)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(f"token ids must be a flat list of integers, not {ids.dtype} of shape {ids.shape}")
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < 2**32:
        raise ValueError(f"token ids from {ids.min()} to {ids.max()} do not fit into 32 bits")
    return ids.astype("<u4").tobytes()


def _hash(purpose: bytes, *parts: bytes | memoryview) -> bytes:
    digest = hashlib.blake2b(digest_size=LINK_BYTES, person=purpose)
    for part in parts:
        digest.update(part)
    return digest.digest()
