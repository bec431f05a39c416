"""Builds an engine's prefix cache, with its tiers on the host and on the disk. ``Engine`` calls it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path

import torch

from shadowkv.engine.config import EngineConfig
from shadowkv.engine.startup.sizing import offload_bytes
from shadowkv.kvcache.kv_cache import KVCache
from shadowkv.kvcache.sequences.layout import Layout
from shadowkv.models.decoder import Decoder
from shadowkv.models.loader import LoadedModel
from shadowkv.prefix_cache.disk.filesystem import FileSystem
from shadowkv.prefix_cache.disk.header import FileHeader
from shadowkv.prefix_cache.disk.tier import DiskTier
from shadowkv.prefix_cache.eviction import Eviction
from shadowkv.prefix_cache.host import HostTier, Mover
from shadowkv.prefix_cache.lower_tiers import STEP_BYTES
from shadowkv.prefix_cache.page_hashes import CacheKey, origin
from shadowkv.prefix_cache.prefix_cache import PrefixCache
from shadowkv.wording import GIB, SettingsError

Origin = Callable[[str | None], str]

UNLIMITED = 2**62
"""Bytes of copies that a prefill server may launch in a step: without a limit in practice. The copies should be
launched at once, because decode servers wait for them. A step that is delayed by copies does little harm, because
hardly any client waits for a prefill server's tokens."""


@dataclass(frozen=True)
class RankCache:
    """What rank 0 must know about the cache of a rank.

    Attributes:
        layout: the cache's layout.
        form: digest of the format, sizes, RoPE, fields and policy of the cache's snapshots (``form_of``).
        weights: digest of the rank's weights; empty without a disk tier.
    """

    layout: Layout
    form: str
    weights: str

    @classmethod
    def of(cls, config: EngineConfig, loaded: LoadedModel, cache: KVCache) -> RankCache:
        """Describes this rank's cache."""
        weights = "" if config.kv_disk_dir is None else fingerprint(loaded.model)
        return cls(cache.layout, cache.snapshots.form, weights)


def open_mover(cache: KVCache, nbytes: int, own: RankCache) -> tuple[Mover, list[RankCache]]:
    """Makes the mover, which copies cached sequences between the device and ``nbytes`` bytes of host memory. Returns
    the mover, and the descriptions of all ranks' caches. Here there is one rank, so the list is [``own``]."""
    return Mover(cache, HostTier(nbytes, cache.device)), [own]


def open_prefix_cache(
    config: EngineConfig,
    loaded: LoadedModel,
    cache: KVCache,
    make: Callable[[KVCache, int, RankCache], tuple[Mover, list[RankCache]]] = open_mover,
) -> tuple[PrefixCache, Origin]:
    """Makes the prefix cache. Returns it with the function that maps a cache salt to the first link of the chain of
    page hashes.

    Raises MemoryError if host memory is too small, ValueError if the disk directory cannot be used.

    Args:
        make: makes the mover; arguments and result are as for ``open_mover``.
    """
    nbytes = offload_bytes(config, cache.layout)
    if not nbytes:
        return PrefixCache(cache), partial(origin, 40 * "0")
    mover, of_ranks = make(cache, nbytes, RankCache.of(config, loaded, cache))
    eviction = Eviction(config.eviction)
    if config.kv_disk_dir is None:
        return PrefixCache(cache, mover, eviction=eviction), partial(origin, 40 * "0")
    key, limit = cache_key(config, loaded, cache, of_ranks), int(config.disk_gib * GIB)
    directory = Path(config.kv_disk_dir)

    def disk(report: Callable[[str, FileHeader], None]) -> DiskTier:
        with _named(directory):
            return DiskTier(directory, limit, key, report)

    step_bytes = UNLIMITED if config.role == "prefill" else STEP_BYTES
    return PrefixCache(cache, mover, disk, eviction, step_bytes), key.origin


def check_disk_dir(config: EngineConfig) -> None:
    """Makes the disk tier's directory, before the model is loaded. Raises ValueError if that fails."""
    if config.kv_disk_dir is not None:
        with _named(Path(config.kv_disk_dir)):
            FileSystem().make_directory(Path(config.kv_disk_dir))


@contextmanager
def _named(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = f"kv_disk_dir={str(directory)!r} cannot be used: {error.strerror or error}"
        raise SettingsError(reason, ["kv_disk_dir"]) from error


def cache_key(config: EngineConfig, loaded: LoadedModel, cache: KVCache, of_ranks: Sequence[RankCache]) -> CacheKey:
    """Returns the key of this engine's snapshots: everything that they depend on besides their tokens. ``of_ranks``
    describes the caches of all ranks."""
    return CacheKey(
        model=_joined([one.weights for one in of_ranks]) + overridden(config),
        adapter=None,  # the adapter is merged into the weights, so the fingerprint covers it
        quantization=loaded.config.quantization and str(loaded.config.quantization),
        dtype=str(cache.dtype).removeprefix("torch."),
        spec={"form": _joined([one.form for one in of_ranks])},
        codecs={},  # the form covers the codecs
        prefill=cache.spec.prefill or "dense",
        tensor_parallel_size=len(of_ranks),
    )


def _joined(digests: Sequence[str]) -> str:
    """Returns the digest itself if there is only one, else a digest of all of them."""
    return digests[0] if len(digests) == 1 else blake2b(" ".join(digests).encode(), digest_size=16).hexdigest()


def overridden(config: EngineConfig) -> str:
    """Returns a dash and a digest of ``hf_overrides``, or an empty text without overrides. Overrides can change keys
    and values without a change of the weights or of the cache's form."""
    if not config.hf_overrides:
        return ""
    return "-" + blake2b(json.dumps(dict(config.hf_overrides), sort_keys=True).encode(), digest_size=8).hexdigest()


def fingerprint(model: Decoder) -> str:
    """Returns a digest of a model's weights in memory. It does not depend on the files that the weights came from.

    The bits of each tensor are read as int32 numbers. The digest covers three sums: of all numbers, of every
    second number, and of every third one. Integer sums do not depend on the order of additions.
    """
    digest = blake2b(digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        bits = tensor.contiguous().view(-1).view(torch.uint8)
        whole = bits[: len(bits) // 4 * 4].view(torch.int32)
        sums = [int(part.sum(dtype=torch.int64)) for part in (whole, whole[::2], whole[::3])] if len(whole) else []
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {sums} ".encode())
    return digest.hexdigest()
