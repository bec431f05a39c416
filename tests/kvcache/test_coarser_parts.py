"""Parts that only measure what fewer bits cost: latents in 4 bits, a sketch of signs alone."""

import torch
from driver import DEVICE, SHAPE, Stream, compressed_batch, decode, decode_part, make_cache, prefill

from shadowkv.kvcache.codecs import LATENT_CODECS, latents
from shadowkv.kvcache.policy.shape import ModelShape
from shadowkv.kvcache.presets import preset
from shadowkv.ops.attend_selected.reference import gather_selected


def keys_error(kind: str) -> tuple[float, int]:
    """Relative error of all compressed keys of a prompt against those of unquantized latents, and the largest code."""
    rebuilt, largest = [], 0
    for name in ("low-rank", kind):
        cache = make_cache(preset(f"full:keys={name},rank=16"))
        stream = Stream(1, cache.allocate(700, 800))
        prefill(cache, [(stream, 700)])
        row = compressed_batch(cache, [stream])
        everything = torch.arange(int(row.num_chunks), device=DEVICE).expand(1, SHAPE.num_kv_heads, -1)
        rebuilt.append(gather_selected(cache.parts.keys.source(cache.groups[0].store, 0, row), everything))
        stored = cache.groups[0].store.page["latents"][0][row.pages[0]]
        largest = int(LATENT_CODECS[name].decode(stored, 16).abs().max())
    return float((rebuilt[1] - rebuilt[0]).norm() / rebuilt[0].norm()), largest


def test_four_bits_have_fourteen_times_the_step_of_eight(monkeypatch) -> None:
    monkeypatch.setattr(latents, "STRONG", 0)
    (fine, _), (coarse, largest) = keys_error("low-rank-int8"), keys_error("low-rank-int4")
    assert largest == 7
    # Centred keys differ from plain ones in what the subspace leaves out, too.
    assert 3 * fine < coarse < 0.5


def test_signs_alone_choose_the_runs_with_the_best_scores() -> None:
    spec = preset("turbo-host:index=sketch-1bit,place=device,budget=80,outliers=3")
    cache = make_cache(spec)
    streams = [Stream(seed, cache.allocate(n, 1000)) for seed, n in enumerate((900, 70, 500))]
    prefill(cache, list(zip(streams, (900, 70, 500))))
    decode(cache, streams)
    whole = decode_part(cache, streams)
    batch, store = whole.compressed, cache.groups[0].store
    assert batch is not None
    q = whole.of_compressed(torch.randn(3, SHAPE.num_query_heads, SHAPE.head_dim, device=DEVICE))
    selected = cache.parts.index.select(store, 1, q, batch).chunks
    compressed = batch.num_chunks.nonzero().flatten().tolist()
    assert [int(batch.slots[row]) for row in compressed] == [streams[n].sequence.path[0].slot for n in (0, 2)]
    fields = store.page["sketch_signs"][1], store.page["sketch_scale"][1]
    queries = store.ops.sketch_queries(q, store.state["sketch_query_map"][1], batch.states)
    scores = store.ops.sign_scores(queries, *fields, batch.pages, batch.num_pages).float()
    for row in compressed:
        barred = store.excluded(1, batch.pages[row : row + 1], batch.first[row : row + 1])[0]
        for head in range(SHAPE.num_kv_heads):
            chosen = selected[row, head]
            assert len(set(chosen.tolist())) == 10
            assert not barred[head][chosen].any()
            allowed = scores[row, head].masked_fill(barred[head], -torch.inf)
            assert allowed[chosen].sort().values.tolist() == allowed.topk(10).values.sort().values.tolist()


def test_signs_alone_find_runs_of_eight_and_read_less() -> None:
    model = ModelShape(2, 6, 2, 64)
    parts = [make_cache(preset(f"turbo-host:index={index}")).parts.index for index in ("sketch", "sketch-1bit")]
    whole, signs = parts[0].bytes_per_token(), parts[1].scored_bytes(1, 0)
    assert parts[1].scored_bytes(64_000, 100) == 64_000 * signs
    assert parts[0].scored_bytes(64_000, 10) == 64_000 * signs + 8 * 728 * whole  # one in 11 runs of 8
    assert parts[0].scored_bytes(64_000, 2000) == 64_000 * (signs + whole)  # six times what is selected are more
    assert parts[0].scored_bytes(6400, 100) == 6400 * signs + 8 * 720 * whole  # over six times 800 tokens
    assert parts[0].scored_bytes(2048, 10) == 2048 * (signs + whole)  # all of them
    assert parts[1].unsupported(preset("turbo", sampled=0.0), model) == [
        "signs alone select runs of 8 tokens: they need chunk=8, not 1"
    ]
