"""Another tokenizer, chat template or revision than the model's own, its sampling overridden, and a seed for all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_llama import write_config

from shadowkv import LLM, SamplingParams
from shadowkv.engine.config import DEFAULT_MODEL, EngineConfig
from shadowkv.engine.startup.loading import tokenizer_from_config
from shadowkv.wording import SettingsError

CHAT = [{"role": "user", "content": "Hi"}]
FREE = SamplingParams(ignore_eos=True)


def opened(model: Path, **options: Any) -> LLM:
    return LLM(str(model), load_format="dummy", kv="full", max_model_len=64, max_num_seqs=2, **options)


def test_a_template_that_is_given(tiny: Path, tmp_path: Path) -> None:
    source = "{% for message in messages %}<{{ message.content }}>{% endfor %}"
    file = tmp_path / "chat.jinja"
    file.write_text(source)
    for given in (str(file), source):
        llm = opened(tiny, chat_template=given)
        (answer,) = llm.chat(CHAT, SamplingParams(max_tokens=1))
        assert llm.get_tokenizer().decode(answer.prompt_token_ids) == "<Hi>"
        served = tokenizer_from_config(llm.engine.config)
        assert served.chat_template == source and served.encode_chat(CHAT) == answer.prompt_token_ids
    for wrong, words in (
        ("none.jinja", "chat_template='none.jinja': there is no such file, and a template would have braces"),
        (".", "chat_template='.': this is a directory; name the template's file"),
        ("{% if %}", "chat_template='{% if %}': the chat template is not valid"),
    ):
        with pytest.raises(SettingsError, match=words):
            opened(tiny, chat_template=wrong)


def test_a_tokenizer_that_is_given(tmp_path: Path) -> None:
    model = write_config(tmp_path, hidden_size=48, max_position_embeddings=256)
    config = model / "config.json"
    config.write_text(config.read_text().replace('"vocab_size": 300', '"vocab_size": 49152'))
    llm = opened(model, tokenizer=DEFAULT_MODEL)
    own = tokenizer_from_config(EngineConfig())
    assert llm.get_tokenizer().encode("Hello there") == own.encode("Hello there")
    assert tokenizer_from_config(llm.engine.config).encode("Hello there") == own.encode("Hello there")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        opened(model, tokenizer="nowhere")


def test_a_revision_and_a_folder_reach_the_hub(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def snapshot_download(name: str, **options: Any) -> str:
        asked.append((name, options["revision"], options["cache_dir"]))
        return str(tiny)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    llm = opened(Path("org/model"), revision="v1", download_dir="/models")
    tokenizer_from_config(llm.engine.config)
    assert asked and set(asked) == {("org/model", "v1", "/models")}


def test_sampling_that_is_overridden(tiny: Path) -> None:
    llm = opened(tiny, override_generation_config={"temperature": 0.0, "top_k": 3})
    assert llm.engine.sampling_defaults == {"temperature": 0.0, "top_k": 3}
    assert llm.generate("Hi")[0].outputs == llm.generate("Hi", SamplingParams(temperature=0))[0].outputs
    for wrong, words in (
        ({"top_q": 1}, "override_generation_config has 'top_q', and can have temperature, top_p"),
        ({"max_new_tokens": 9}, "default_max_tokens limits answers"),
        ({"top_p": 2.0}, r"override_generation_config: top_p=2.0 must be in \(0, 1\]"),
        ({"top_p": "x"}, 'override_generation_config: top_p="x" must be a number, and is a string'),
        ({"top_k": [1], "seed": 0.5}, r"top_k=\[1\] must be an integer, and is an array; seed=0.5 must be"),
    ):
        with pytest.raises(SettingsError, match=words):
            opened(tiny, override_generation_config=wrong)
    seeded = opened(tiny, override_generation_config={"seed": 5})
    assert "sample  seed 5 for requests" in "\n".join(seeded.engine.notes)
    same = seeded.generate(["Hi", "Hi"])
    assert same[0].outputs == same[1].outputs


def test_a_seed_of_the_engine(tiny: Path) -> None:
    def answers(seed: int | None) -> list[list[int]]:
        llm = opened(tiny, seed=seed)
        return [llm.generate("Hi", FREE)[0].outputs[0].token_ids for _ in range(2)]

    assert answers(1) == answers(1) != answers(2)
    first, second = answers(1)
    assert first != second, "requests have seeds of their own"
    assert answers(None) != answers(None)


def test_ranks_on_a_cpu_are_warned_about(monkeypatch: pytest.MonkeyPatch, caplog: Any, tiny: Path) -> None:
    class Stopped(Exception):
        pass

    class Ranks:
        device = type("Device", (), {"type": "cpu"})

        def __init__(self, config: EngineConfig) -> None:
            pass

        def close(self) -> None:
            pass

    def build(*_: Any) -> None:
        raise Stopped

    monkeypatch.setattr("shadowkv.engine.engine.Ranks", Ranks)
    monkeypatch.setattr("shadowkv.engine.engine.Engine._build", build)
    with pytest.raises(Stopped):
        opened(tiny, tensor_parallel_size=2)
    said = ["tensor_parallel_size=2 has no benefit without GPUs" in record.getMessage() for record in caplog.records]
    assert said == [True]
