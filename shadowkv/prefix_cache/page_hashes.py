"""Hashes of pages: a chain over the pages of a prompt, like vLLM's block hashes. The chain starts with a ``CacheKey``.

::

    origin = H("shadowkv origin", key digest, H("shadowkv salt", salt))
    link 0 = origin
    link i = H("shadowkv page", link i - 1, token ids of page i)

``H`` is BLAKE2b of 20 bytes whose *personalisation* is the first argument. Without a salt, zeros replace its hash. A
page has 64 token ids as little-endian uint32; a prompt's last page may have fewer. The hash of a page is its link in
hex. It is also the name of a snapshot that ends with the page.

One pass over a prompt hashes every prefix that ends at a page boundary. Prompts with different keys or salts share no
link. So two prompts share exactly those first pages whose hashes are equal.
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
    """Everything that the bytes of a snapshot depend on besides its tokens. Values can be represented in JSON.

    Attributes:
        model: identifies the model's weights, so it must not be a path.
        adapter: identifies the adapter's weights; None without one.
        quantization: how weights are quantized at load; None if they are not.
        dtype: dtype of activations.
        spec: the cache policy.
        codecs: versions of the policy's codecs, by name.
        prefill: how attention is computed in prompts.
        tensor_parallel_size: ranks that share a layer's heads. A snapshot has the parts of all of them.
        tensor_parallel_rank: always 0, but part of the digest.
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
        """The attributes as a JSON object. Raises ValueError or TypeError if one cannot be represented in JSON."""
        facts: dict[str, Any] = json.loads(canonical(asdict(self)))
        return facts

    @cached_property
    def digest(self) -> str:
        """Hex digest of the canonical JSON of ``facts``."""
        return _hash(b"shadowkv key", canonical(self.facts).encode()).hex()

    def origin(self, salt: str | None = None) -> str:
        """Returns the first link of all hashes with this key and salt."""
        return origin(self.digest, salt)


def canonical(value: Any) -> str:
    """JSON in ASCII with sorted keys and without spaces. Raises ValueError for NaN and infinities."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def origin(key_digest: str, salt: str | None = None) -> str:
    """Returns the link before the first page. It includes only a hash of the salt, which does not reveal the salt."""
    hashed = bytes(LINK_BYTES) if salt is None else _hash(b"shadowkv salt", salt.encode("utf-8", "surrogatepass"))
    return _hash(b"shadowkv origin", bytes.fromhex(key_digest), hashed).hex()


def next_link(link: str, page: bytes | memoryview) -> str:
    """Returns the link after ``link``. ``page`` has the next page's token ids as little-endian uint32."""
    return _hash(b"shadowkv page", bytes.fromhex(link), page).hex()


def page_hashes(origin: str, token_ids: TokenIds) -> Iterator[tuple[int, str]]:
    """Yields the number of tokens and the hash of each prefix that ends at a page boundary, shortest first. The last
    prefix has all tokens, even if they end within a page. To continue a prompt, pass the hash of its last full page as
    ``origin``."""
    ids = memoryview(id_bytes(token_ids))
    link, width = origin, 4 * PAGE
    for begin in range(0, len(ids), width):
        page = ids[begin : begin + width]
        link = next_link(link, page)
        yield (begin + len(page)) // 4, link


def new_uid() -> str:
    """Returns a new random id for the bytes of a snapshot. Two snapshots of the same tokens may differ by rounding."""
    return secrets.token_hex(16)


class PageHashes(list[str]):
    """Hashes of a growing sequence's full pages.

    Args:
        origin: the link before the first page. It is unique for sequences that must not be shared.
    """

    def __init__(self, origin: str) -> None:
        super().__init__()
        self.origin = origin

    def extend_to(self, token_ids: Sequence[int]) -> PageHashes:
        """Adds hashes for further full pages. ``token_ids`` are the ids of the whole sequence. Returns itself."""
        new = token_ids[len(self) * PAGE : len(token_ids) // PAGE * PAGE]
        self += [page for _, page in page_hashes(self[-1] if self else self.origin, new)]
        return self


def common_pages(hashes: Sequence[str], prompt: Sequence[str], first: int = 0) -> int:
    """Returns how many of a node's pages a prompt has. ``hashes`` are the hashes of the node's pages, the first of
    which is page ``first`` of the prompt. ``prompt`` has the hashes of all pages of the prompt."""
    low, high = 0, min(len(hashes), len(prompt) - first)
    while low < high:  # binary search, because a hash depends on all pages before it
        middle = (low + high + 1) // 2
        if hashes[middle - 1] == prompt[first + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def id_bytes(token_ids: TokenIds) -> bytes:
    """Returns ids as little-endian uint32. Raises ValueError for anything but a flat list of integers of 32 bits."""
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
