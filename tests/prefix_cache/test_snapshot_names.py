"""Names of pages never change, and two keys, salts or prompts share none."""

import json
from dataclasses import fields, replace

import numpy as np
import pytest
from stored_snapshots import KEY, prompt, snapshot_name

from shadowkv.prefix_cache.page_hashes import CacheKey, canonical, next_link, origin, page_hashes

OTHERS = {
    "model": "blake2b:0a1c",
    "adapter": "blake2b:77",
    "quantization": None,
    "dtype": "float16",
    "spec": {"keys": "latents", "rank": 128},
    "codecs": {"latent8": 1, "value3": 3},
    "prefill": "dense",
    "tensor_parallel_size": 4,
    "tensor_parallel_rank": 0,
}


def test_digests_and_names_never_change():
    ids = np.arange(130)
    assert KEY.digest == "0846857f82fddf21f6cea774860e40580c150781"
    assert KEY.origin() == "ddb5cd7850e48caceaa1b3ebf5bc0e9f6194dc05"
    assert KEY.origin("tenant") == "0e8b4c034989489f5cf6bb16ddc80b06fa848806"
    assert list(page_hashes(KEY.origin(), ids)) == [
        (64, "fcac7f5abe371770854bdf81c881a70c5f6e9404"),
        (128, "b40f4a358fb0de86b8834f6452dd8641c7400f02"),
        (130, "07f3cfea2f8a50e414499ba564ad0681cf8af225"),
    ]


def test_a_key_is_the_same_whatever_its_parts_are_ordered_by():
    turned = replace(KEY, spec=dict(reversed(KEY.spec.items())), codecs=dict(reversed(KEY.codecs.items())))
    assert turned.digest == KEY.digest
    assert canonical(KEY.facts) == canonical(json.loads(canonical(KEY.facts)))


@pytest.mark.parametrize("name", [field.name for field in fields(CacheKey)])
def test_every_fact_tells_keys_apart(name):
    other = replace(KEY, **{name: OTHERS[name]})
    assert other.digest != KEY.digest
    assert {page for _, page in page_hashes(other.origin(), range(200))}.isdisjoint(
        page for _, page in page_hashes(KEY.origin(), range(200))
    )


def test_what_json_cannot_say_is_refused():
    with pytest.raises(ValueError, match="JSON"):
        _ = replace(KEY, spec={"budget": float("nan")}).digest


@pytest.mark.parametrize("pair", [(None, ""), ("a", "b"), (None, "0" * 40), ("a", "a ")])
def test_no_name_is_shared_by_two_salts(pair):
    first, second = ({page for _, page in page_hashes(KEY.origin(salt), range(300))} for salt in pair)
    assert first.isdisjoint(second)


def test_names_of_prefixes_are_found_on_the_way():
    ids = prompt(0, 300)
    walked = dict(page_hashes(KEY.origin("s"), ids))
    assert list(walked) == [64, 128, 192, 256, 300]
    for length, name in walked.items():
        assert name == snapshot_name(KEY.digest, "s", ids[:length])
    longer = dict(page_hashes(KEY.origin("s"), np.append(ids, 5)))
    assert {name: longer[name] for name in (64, 128, 192, 256)} == {name: walked[name] for name in (64, 128, 192, 256)}
    assert longer[301] not in walked.values()


def test_one_other_token_anywhere_makes_another_name():
    ids = prompt(1, 130)
    name = snapshot_name(KEY.digest, None, ids)
    for place in range(len(ids)):
        other = ids.copy()
        other[place] += 1
        assert snapshot_name(KEY.digest, None, other) != name


def test_ids_may_be_of_any_integer_type():
    ids = [1, 2, 3]
    assert len({snapshot_name(KEY.digest, None, one) for one in (ids, tuple(ids), np.array(ids, np.int16))}) == 1
    assert next_link(origin(KEY.digest), np.array(ids, "<u4").tobytes()) == snapshot_name(KEY.digest, None, ids)


@pytest.mark.parametrize("ids", [[-1], [2**32], [1.5], [[1, 2]], ["1"]])
def test_what_is_no_token_ids_is_refused(ids):
    with pytest.raises(ValueError):
        snapshot_name(KEY.digest, None, ids)
