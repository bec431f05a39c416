"""The lossy policies against plain, one-sequence formulas of their papers, written here independently."""

import math

import pytest
import torch
from driver import DEVICE, SHAPE, Stream, compressed_batch, decode, make_cache, plain_attention, prefill, rotate_plainly

from shadowkv.baselines.infinigen import Skewed
from shadowkv.baselines.loki import PCA
from shadowkv.kvcache.inspection import diagnostics
from shadowkv.kvcache.kv_cache import KVCache
from shadowkv.kvcache.policy import spec
from shadowkv.kvcache.policy.spec import SINK, KVSpec
from shadowkv.kvcache.presets import preset
from shadowkv.ops.attend_selected.reference import gather_selected

SHADOWKV = preset("shadowkv", rank=16, budget=64, outliers=5)
"""The rank at which singular values of the driver's keys fall, from 12 to 3: beyond it all are alike, and a GPU's
subspace iteration finds other directions that keep as much."""
QUEST = preset("quest", budget=64)
S, STEPS = 700, 140


def run(spec: KVSpec) -> tuple[KVCache, Stream]:
    cache = make_cache(spec)
    stream = Stream(11, cache.allocate(S, S + STEPS))
    prefill(cache, [(stream, S)])
    return cache, stream


def plain_basis(stream: Stream, layer: int, rank: int) -> torch.Tensor:
    """[H * d, r], the top right singular vectors of the prompt's keys before RoPE."""
    return torch.linalg.svd(stream.k[layer, :S].flatten(1).double(), full_matrices=False).Vh[:rank].T


def plain_outliers(rotated: torch.Tensor, compressed: int, spec: KVSpec) -> list[set[int]]:
    """Per kv head the chunks with the lowest smallest cosine similarity to their mean; never the sink."""
    result = []
    for head in range(SHAPE.num_kv_heads):
        worst = {}
        for chunk in range(1, compressed // spec.chunk):
            members = rotated[chunk * spec.chunk : (chunk + 1) * spec.chunk, head]
            worst[chunk] = torch.cosine_similarity(members, members.mean(0, keepdim=True), dim=-1).min().item()
        result.append(set(sorted(worst, key=worst.__getitem__)[: spec.outliers]))
    return result


def plain_decode(stream: Stream, position: int, compressed: int, spec: KVSpec) -> torch.Tensor:
    """Output [layers, H_q, d] of the token at ``position`` with the first ``compressed`` tokens compressed."""
    n, c = position + 1, spec.chunk
    first_compressed = (S - spec.local) // 64 * 64
    result = []
    for layer in range(SHAPE.num_layers):
        q = rotate_plainly(stream.q[layer, position:n], torch.tensor([position], device=DEVICE))[0]
        exact = rotate_plainly(stream.k[layer, :n], torch.arange(n, device=DEVICE))
        rebuilt = exact
        if spec.keys == "low-rank":
            v = plain_basis(stream, layer, dict(spec.settings)["rank"])
            low = (stream.k[layer, :n].flatten(1).double() @ v @ v.T).float().view(n, SHAPE.num_kv_heads, -1)
            rebuilt = rotate_plainly(low, torch.arange(n, device=DEVICE))
        outliers = plain_outliers(exact, first_compressed, spec)
        for head in range(SHAPE.num_kv_heads):
            group = q[head * SHAPE.group : (head + 1) * SHAPE.group]
            kept_exact = {0} | outliers[head]
            candidates = [chunk for chunk in range(compressed // c) if chunk not in kept_exact]
            members = torch.stack([exact[chunk * c : (chunk + 1) * c, head] for chunk in candidates])
            if spec.index == "chunk-mean":
                logits = group @ members.mean(1).T
            else:
                low, high = members.amin(1), members.amax(1)
                logits = torch.maximum(group[:, None] * low, group[:, None] * high).sum(-1)
            shares = (logits / math.sqrt(SHAPE.head_dim)).softmax(-1).amax(0)
            best = shares.topk(min(len(candidates), math.ceil(spec.budget / c))).indices
            chosen = {candidates[i] for i in best}
            keys, values = [], []
            for token in range(n):
                chunk = token // c
                if token >= compressed or chunk in kept_exact:
                    keys.append(exact[token, head])
                elif chunk in chosen:
                    keys.append(rebuilt[token, head])
                else:
                    continue
                values.append(stream.v[layer, token, head])
            weights = (group @ torch.stack(keys).T / math.sqrt(SHAPE.head_dim)).softmax(-1)
            result.append(weights @ torch.stack(values))
    return torch.cat(result).view(SHAPE.num_layers, SHAPE.num_query_heads, -1)


@pytest.mark.parametrize("spec", [SHADOWKV, QUEST], ids=["shadowkv", "quest"])
def test_decode_follows_the_paper_while_pages_are_compressed(spec: KVSpec) -> None:
    cache, stream = run(spec)
    for step in range(STEPS - 1):
        decode(cache, [stream])
        if step in (0, 40, 41, 137):
            compressed = stream.sequence.compressed
            wanted = plain_decode(stream, stream.length - 1, compressed, spec)
            torch.testing.assert_close(stream.outputs[-1][0], wanted, atol=2e-4, rtol=1e-3)
    assert compressed == 768  # 640 after the prompt, two pages on the way
    assert stream.length - compressed < spec.local + 64


def test_latents_are_the_projection_on_the_top_singular_vectors() -> None:
    cache, stream = run(SHADOWKV)
    row = compressed_batch(cache, [stream])
    compressed = int(row.num_chunks) * SHADOWKV.chunk
    for layer in range(SHAPE.num_layers):
        everything = torch.arange(int(row.num_chunks), device=DEVICE).expand(1, SHAPE.num_kv_heads, -1)
        rebuilt = gather_selected(cache.parts.keys.source(cache.groups[0].store, layer, row), everything)[0]
        v = plain_basis(stream, layer, dict(SHADOWKV.settings)["rank"])
        low = (
            (stream.k[layer, :compressed].flatten(1).double() @ v @ v.T)
            .float()
            .view(compressed, SHAPE.num_kv_heads, -1)
        )
        wanted = rotate_plainly(low, torch.arange(compressed, device=DEVICE)).transpose(0, 1)
        torch.testing.assert_close(rebuilt, wanted, atol=3e-4, rtol=1e-3)
        kept = diagnostics(cache, stream.sequence)["kept_energy"][layer].item()
        keys = stream.k[layer, :S].flatten(1).double()
        assert kept == pytest.approx(((keys @ v).norm() ** 2 / keys.norm() ** 2).item(), abs=1e-5)


def test_landmarks_are_chunk_means_and_outliers_are_marked() -> None:
    cache, stream = run(SHADOWKV)
    row = compressed_batch(cache, [stream])
    compressed = int(row.num_chunks) * 8
    for layer in range(SHAPE.num_layers):
        rotated = rotate_plainly(stream.k[layer, :compressed], torch.arange(compressed, device=DEVICE))
        stored = cache.groups[0].store.page["landmarks"][layer][row.pages[0]].transpose(0, 1).flatten(1, 2)
        torch.testing.assert_close(stored, rotated.unflatten(0, (-1, 8)).mean(1).transpose(0, 1))
        marked = cache.groups[0].store.excluded(layer, row.pages, row.first)[0]
        wanted = plain_outliers(rotated, compressed, SHADOWKV)
        for head in range(SHAPE.num_kv_heads):
            assert set(marked[head].nonzero().flatten().tolist()) == wanted[head] | {0}


def test_values_of_selected_chunks_come_from_the_host_tier_unchanged() -> None:
    cache, stream = run(SHADOWKV)
    assert cache.free["host"] < cache.total["host"]
    row = compressed_batch(cache, [stream])
    selected = torch.tensor([[[3, 70, 0], [55, 2, 9]]], device=DEVICE)
    for layer in range(SHAPE.num_layers):
        got = gather_selected(cache.parts.values.source(cache.groups[0].store, layer, row), selected)[0]
        for head in range(SHAPE.num_kv_heads):
            wanted = torch.cat([stream.v[layer, 8 * c : 8 * c + 8, head] for c in selected[0, head].tolist()])
            assert torch.equal(got[head], wanted)


def test_bounds_are_smallest_and_largest_keys() -> None:
    cache, stream = run(QUEST)
    row = compressed_batch(cache, [stream])
    compressed = int(row.num_chunks) * 16
    rotated = rotate_plainly(stream.k[0, :compressed], torch.arange(compressed, device=DEVICE)).unflatten(0, (-1, 16))
    stored = cache.groups[0].store.page["bounds"][0][row.pages[0]].transpose(0, 1)  # [H, pages, 2, C, d]
    torch.testing.assert_close(stored[:, :, 0].flatten(1, 2), rotated.amin(1).transpose(0, 1))
    torch.testing.assert_close(stored[:, :, 1].flatten(1, 2), rotated.amax(1).transpose(0, 1))


@pytest.mark.parametrize("kv", ["turbo", "turbo-host"])
def test_turbo_with_everything_selected_loses_only_to_quantization(kv: str) -> None:
    cache, stream = run(preset(kv, budget=1.0, rank=32))
    for _ in range(STEPS - 1):
        decode(cache, [stream])
    assert stream.sequence.compressed == 768
    ours, exact = stream.output()[S:], plain_attention(stream)[S:]
    error = (ours - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)
    assert 0.01 < error.mean() < 0.1  # values in 4 bits are off by a tenth of their deviation
    dense = preset(kv, budget=1.0, rank=32, values="dense")
    cache, stream = run(dense)
    for _ in range(STEPS - 1):
        decode(cache, [stream])
    ours = stream.output()[S:]
    error = (ours - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)
    assert error.mean() < 0.04  # int8 latents of all dimensions


def selected(cache: KVCache, stream: Stream, layer: int) -> list[set[int]]:
    """Chunks that the next token of a stream attends to, by kv head, of all its segments."""
    batch = compressed_batch(cache, [stream])
    position = torch.tensor([stream.length], device=DEVICE)
    q = rotate_plainly(stream.q[layer, stream.length :][:1], position).expand(len(batch.slots), -1, -1)
    found: list[set[int]] = [set() for _ in range(SHAPE.num_kv_heads)]
    for first, heads in zip(
        batch.first.tolist(), cache.parts.index.select(cache.groups[0].store, layer, q, batch).chunks.tolist()
    ):
        for chosen, row in zip(found, heads):
            assert row == [c for c in row if c >= 0] + [-1] * row.count(-1)
            chosen |= {first // cache.spec.chunk + c for c in row if c >= 0}
    return found


def exact_shares(cache: KVCache, stream: Stream, layer: int, head: int) -> torch.Tensor:
    """Softmax [G, tokens] of the next token over the compressed tokens but the sink; 0 elsewhere."""
    compressed = stream.sequence.compressed
    keys = rotate_plainly(stream.k[layer, :compressed], torch.arange(compressed, device=DEVICE))[:, head]
    q = rotate_plainly(stream.q[layer, stream.length :][:1], torch.tensor([stream.length], device=DEVICE))[0]
    scores = q[head * SHAPE.group : (head + 1) * SHAPE.group] @ keys.T / SHAPE.head_dim**0.5
    scores[:, :SINK] = -math.inf
    return scores.double().softmax(-1)


@pytest.mark.parametrize("chunk", [1, 8])
def test_exact_scores_find_the_chunks_with_the_most_mass(chunk: int) -> None:
    cache, stream = run(preset("exact-top-k", chunk=chunk, budget=64))
    for layer in range(SHAPE.num_layers):
        for head, chosen in enumerate(selected(cache, stream, layer)):
            mass = exact_shares(cache, stream, layer, head).unflatten(1, (-1, chunk)).sum(-1).amax(0)
            assert chosen == set(mass.topk(64 // chunk).indices.tolist())


@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize(("kv", "part"), [("loki", PCA), ("infinigen", Skewed)])
def test_all_columns_find_what_exact_scores_find(
    kv: str, part: type[PCA | Skewed], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part, "kept", 1)
    caches = [run(preset(name, chunk=chunk, budget=32)) for name in (kv, "exact-top-k")]
    for _ in range(STEPS - 1):
        for cache, stream in caches:
            decode(cache, [stream])
    ours, exact = (stream.output() for _, stream in caches)
    assert int(caches[0][0].groups[0].pool.tables.compressed.max()) == 768
    torch.testing.assert_close(ours, exact, atol=1e-4, rtol=1e-3)


def test_tokens_are_found_by_the_first_quarter_of_their_principal_components() -> None:
    cache, stream = run(preset("loki", budget=64))
    assert cache.parts.index.width == 4
    for layer in range(SHAPE.num_layers):
        rotated = rotate_plainly(stream.k[layer, :S], torch.arange(S, device=DEVICE))
        for head, chosen in enumerate(selected(cache, stream, layer)):
            centred = (rotated[:, head] - rotated[:, head].mean(0)).double()
            basis = torch.linalg.svd(centred, full_matrices=False).Vh[:4].T
            q = rotate_plainly(stream.q[layer, S : S + 1], torch.tensor([S], device=DEVICE))[0].double()
            compressed = stream.sequence.compressed
            scores = q[head * SHAPE.group : (head + 1) * SHAPE.group] @ basis @ (centred[SINK:compressed] @ basis).T
            shares = (scores / math.sqrt(SHAPE.head_dim)).softmax(-1).amax(0)
            assert chosen == {SINK + token for token in shares.topk(64).indices.tolist()}


def test_tokens_are_found_by_the_largest_of_their_skewed_columns() -> None:
    cache, stream = run(preset("infinigen", budget=64))
    compressed, width = stream.sequence.compressed, cache.parts.index.width
    assert width == 5  # 0.3 of 16
    for layer in range(SHAPE.num_layers):
        positions = torch.arange(S + 1, device=DEVICE)
        k, q = (rotate_plainly(x[layer, : S + 1], positions).double() for x in (stream.k, stream.q))
        for head, chosen in enumerate(selected(cache, stream, layer)):
            group = slice(head * SHAPE.group, (head + 1) * SHAPE.group)
            last, keys = q[S - 64 : S, group].flatten(0, 1), k[:S, head]
            skew = torch.linalg.svd(last, full_matrices=False).Vh.T
            columns = ((last @ skew).abs().mean(0) + (keys @ skew).abs().mean(0)).topk(width).indices
            scores = q[S, group] @ skew[:, columns] @ (keys[SINK:compressed] @ skew[:, columns]).T
            shares = (scores / math.sqrt(SHAPE.head_dim)).softmax(-1).amax(0)
            assert chosen == {SINK + token for token in shares.topk(64).indices.tolist()}


def test_generated_tokens_have_no_queries_and_are_found_by_the_largest_columns_of_their_keys() -> None:
    cache = make_cache(preset("infinigen", budget=16))
    stream = Stream(3, cache.allocate(20, 400))
    prefill(cache, [(stream, 20)])
    for _ in range(300):
        decode(cache, [stream])
    states = [segment.state for segment in stream.sequence.path]
    assert len(states) > 1
    first, *later = (cache.groups[0].store.state["skew"][:, state] for state in states)
    assert not ((first == 0) | (first.abs() == 1)).all()  # of the prompt, whose queries are known
    for skew in later:
        assert ((skew == 0) | (skew.abs() == 1)).all()  # columns as they are
        assert (skew.abs().sum(2) == 1).all()
    assert all(len(chosen) == 16 for chosen in selected(cache, stream, 0))


@pytest.mark.parametrize("chunk", [1, 8])
def test_recent_chunks_are_the_newest_compressed_ones(chunk: int) -> None:
    cache, stream = run(preset("streaming-llm", chunk=chunk, budget=64))
    for _ in range(STEPS - 1):
        newest = stream.sequence.compressed // chunk
        if stream.length - newest * chunk < 32 + 64:  # nothing is compressed before the next token
            wanted = set(range(newest - 64 // chunk, newest))
            assert all(chosen == wanted for chosen in selected(cache, stream, 1))
        decode(cache, [stream])


def snapkv_with_a_planted_key(token: int, **fields: int) -> tuple[KVCache, Stream]:
    """The last 64 queries of the prompt attend to ``token``, in all heads."""
    cache = make_cache(preset("snapkv", **fields))
    stream = Stream(11, cache.allocate(S, S + STEPS))
    wanted = torch.randn(SHAPE.head_dim, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    for x, rows in ((stream.k, [token]), (stream.q, range(S - 64, S))):
        position = torch.tensor(rows, device=DEVICE)
        aligned = (8 * wanted / wanted.norm()).expand(len(position), x.shape[2], -1)
        x[:, position] = cache.ops.apply_rope(aligned, position, cache.groups[0].store.rotary, inverse=True)
    prefill(cache, [(stream, S)], block=30)  # the voters come in several blocks
    return cache, stream


def test_votes_of_the_last_queries_choose_once_for_all_steps() -> None:
    cache, stream = snapkv_with_a_planted_key(321, budget=16)
    before = [selected(cache, stream, layer) for layer in range(SHAPE.num_layers)]
    for heads in before:
        assert all(set(range(318, 325)) <= chosen for chosen in heads)  # with its neighbours
    for _ in range(20):
        decode(cache, [stream])
    assert [selected(cache, stream, layer) for layer in range(SHAPE.num_layers)] == before
    for _ in range(STEPS - 21):
        decode(cache, [stream])
    compressed = stream.sequence.compressed
    assert compressed == 768
    assert all(
        chosen == set(range(compressed - 16, compressed)) for chosen in selected(cache, stream, 0)
    )  # never dropped


def test_votes_are_shares_of_attention() -> None:
    cache, stream = snapkv_with_a_planted_key(100, budget=16, chunk=4)
    layer, head = 1, 0
    position = torch.arange(S, device=DEVICE)
    k, q = (rotate_plainly(x[layer, :S], position) for x in (stream.k, stream.q))
    votes = torch.zeros(S, device=DEVICE)
    for token in range(S - 64, S):
        for query in q[token, head * SHAPE.group : (head + 1) * SHAPE.group]:
            votes[: token + 1] += (k[: token + 1, head] @ query / math.sqrt(SHAPE.head_dim)).softmax(0)
    pooled = torch.stack([votes[max(0, t - 3) : t + 4].max() for t in range(S - 64)])
    mass = torch.stack([pooled[4 * c : 4 * c + 4].max() for c in range((S - 64) // 4)])
    mass[: SINK // 4] = 0
    compressed = stream.sequence.compressed
    assert compressed > S - 64  # voters are compressed: they rank first
    voters = set(range((S - 64) // 4, compressed // 4))
    chosen = selected(cache, stream, layer)[head]
    assert len(chosen) == 4
    assert voters <= chosen
    by_vote = sorted(chosen - voters)  # neighbouring chunks tie
    torch.testing.assert_close(mass[by_vote].sort(descending=True).values, mass.topk(len(by_vote)).values)


@pytest.mark.parametrize("prompt", [20, 90])
def test_a_prompt_that_was_kept_dense_has_its_votes_and_newer_tokens_come_first(
    prompt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spec, "LATE", 0)
    cache = make_cache(preset("snapkv:dense_below=100", budget=16))
    stream = Stream(3, cache.allocate(prompt, 400))
    prefill(cache, [(stream, prompt)])
    assert not stream.sequence.path
    for _ in range(320 - prompt):
        decode(cache, [stream])
    path, newest = stream.sequence.path, set()
    assert (len(path), path[-1].compressed) == (2, 256)
    for segment in path:  # each with its share
        newest |= set(range(segment.compressed - 16 * 64 * len(segment.pages) // 256, segment.compressed))
    assert all(chosen == newest for chosen in selected(cache, stream, 0))
    state = [
        cache.groups[0].store.state[name][:, path[0].state].flatten().unique().tolist() for name in ("voters", "voted")
    ]
    assert state == [[min(prompt, 64)], [max(0, prompt - 64)]]
    later = [
        cache.groups[0].store.state[name][:, path[1].state].flatten().unique().tolist() for name in ("voters", "voted")
    ]
    assert later == [[0], [0]]


@pytest.mark.parametrize("mass", [0.3, 0.9])
@pytest.mark.parametrize("chunk", [1, 8])
def test_mass_is_the_fewest_best_chunks_with_that_share_in_every_query_head(chunk: int, mass: float) -> None:
    cache, stream = run(preset(f"exact-top-k:budget=1.0,mass={mass}", chunk=chunk))
    for layer in range(SHAPE.num_layers):
        for head, chosen in enumerate(selected(cache, stream, layer)):
            shares = exact_shares(cache, stream, layer, head).unflatten(1, (-1, chunk)).sum(-1)
            order = shares.amax(0).argsort(descending=True).tolist()
            count = next(n for n in range(len(order)) if (shares[:, order[:n]].sum(1) >= mass).all())
            assert chosen == set(order[:count])
    capped, stream = run(preset(f"exact-top-k:budget=16,mass={mass}", chunk=chunk))
    assert all(len(chosen) <= 16 // chunk for chosen in selected(capped, stream, 0))


@pytest.mark.parametrize(
    "spec",
    [
        SHADOWKV,
        QUEST,
        *(preset(name) for name in ("full", "turbo:budget=80", "streaming-llm:budget=64", "loki:budget=64")),
        *(preset(name) for name in ("infinigen:budget=64", "triattention:budget=64")),
        *(preset(name) for name in ("snapkv:budget=64", "exact-top-k:budget=64", "exact-top-k:budget=0.5,mass=0.8")),
    ],
    ids=[
        "shadowkv", "quest", "full", "turbo", "streaming-llm", "loki", "infinigen", "triattention", "snapkv",
        "exact-top-k", "mass",
    ],
)  # fmt: skip
def test_ragged_batch_equals_each_sequence_alone(spec: KVSpec) -> None:
    lengths = [1, 7, 63, 64, 65, 1000, 3000]
    cache = make_cache(spec)
    together = [Stream(seed, cache.allocate(n, n + 40)) for seed, n in enumerate(lengths)]
    prefill(cache, list(zip(together, lengths)), block=777)
    for _ in range(40):
        decode(cache, together)
    for seed, n in enumerate(lengths):
        cache = make_cache(spec)
        alone = Stream(seed, cache.allocate(n, n + 40))
        prefill(cache, [(alone, n)], block=4096)
        for _ in range(40):
            decode(cache, [alone])
        equal = torch.isclose(together[seed].output(), alone.output(), atol=1e-5, rtol=1e-4).flatten(1).all(1)
        # Coarse scores of 16 bits tie, and ties are broken by what else is in the batch.
        allowed = 0.005 if spec.index == "sketch" else 0
        assert (~equal).float().mean() <= allowed
