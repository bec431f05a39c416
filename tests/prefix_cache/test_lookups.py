"""Matches of waiting prompts."""

from __future__ import annotations

from shadowkv.prefix_cache.matches import Lookups, Match, Prompt
from shadowkv.prefix_cache.page_hashes import PageHashes


def test_prompts_that_wait_for_the_disk_are_counted() -> None:
    lookups = Lookups()
    prompts = [Prompt([number], PageHashes("origin")) for number in range(3)]
    matches = (None, Match(None, 64), Match(None, 64, until=1.0))
    for prompt, match in zip(prompts, matches, strict=True):
        lookups.note(prompt, match, changes=0)
    assert lookups.deferred == 1
    lookups.forget(prompts[2], None)
    assert lookups.deferred == 0
