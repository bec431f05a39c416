"""Opens the draft head of a loaded model, if the config drafts with it. ``Engine`` and the tensor-parallel ranks call
it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shadowkv.engine.config import EngineConfig
from shadowkv.engine.execution.head_runner import HeadRunner
from shadowkv.engine.execution.runner import Runner
from shadowkv.engine.startup.loading import ops_for
from shadowkv.engine.startup.sizing import head_blocks, head_layout, kept_states
from shadowkv.kvcache.kv_cache import KVCache
from shadowkv.models.loader import LoadedModel
from shadowkv.wording import SettingsError


def open_head(
    config: EngineConfig,
    loaded: LoadedModel,
    runner: Runner,
    *,
    make_cache: Callable[..., KVCache] = KVCache,
    make: Callable[..., HeadRunner] = HeadRunner,
    backends: Mapping[str, str] | None = None,
) -> HeadRunner | None:
    """Returns the runner of a model's draft head, with its cache; None if the config does not draft with it.

    Args:
        runner: runs the model.
        make_cache: makes the head's cache, from the arguments of ``KVCache``.
        make: makes the runner, from the arguments of ``HeadRunner``.
        backends: as for ``load_engine_parts``.

    Raises SettingsError if the model was loaded without a draft head.
    """
    if not config.drafts_with_head:
        return None
    model, cache, sequences = loaded.model, runner.cache, config.most_running
    if model.draft_head is None:
        reason = "the model was loaded without its layer that drafts tokens; load it with draft_head=True"
        raise SettingsError(f"method='mtp': {reason}", ["speculative_config"])
    layout = head_layout(model.config, model.dtype, cache.max_model_len)
    ops = ops_for(model, layout, loaded.config.rope, cache.device, backends, config.attention_backend)
    blocks = head_blocks(layout, sequences)
    of_head = make_cache(layout, loaded.config.rope, slots=sequences, memory=blocks, ops=ops, device=cache.device)
    return make(runner, of_head, config.max_rows, sequences * kept_states(config.drafted_tokens))
