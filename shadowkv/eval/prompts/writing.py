"""Short pieces of writing, made up from a seed. A piece is of a kind, such as a poem, and about a topic. The suite
``mrcr`` uses pieces as the assistant's answers.

A piece has ``SENTENCES`` sentences. Their forms and words are drawn at random. All pieces are made of the same forms,
so that a piece cannot be recognised by its style.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterator

SENTENCES = 8
"""Sentences of a piece, about 20 tokens each."""

KINDS: dict[str, str] = {
    "poem": "\n",
    "song": "\n",
    "riddle": "\n",
    "memo": " ",
    "letter": " ",
    "speech": " ",
    "blog post": " ",
    "short story": " ",
    "diary entry": " ",
    "news article": " ",
}
"""Kinds of writing, each with the text between two of its sentences."""
TOPICS = (
    *("tapirs", "rocks", "lighthouses", "bicycles", "falcons", "harbours", "clocks", "loaves"),
    *("glaciers", "trains", "orchards", "maps", "whales", "bridges", "candles", "deserts"),
)

FORMS = (
    "The {adjective} {noun} {verb} the {noun2} of {place} when {topic} came up, and {person} kept the {noun3}.",
    "In {place} {person} {verb} a {adjective} {noun} for {number} {unit}, because of {topic}.",
    "{person} says that {topic} are like a {adjective} {noun} beside the {noun2} at {time}.",
    "Nobody in {place} {verb} {topic} without a {noun} and {number} {adjective} {noun2}s.",
    "At {time} the {noun} near {place} was {adjective}, and {topic} were all that {person} {verb}.",
    "Whoever {verb} {topic} needs {number} {unit}, a {adjective} {noun} and a {noun2}.",
    "{person} and {person2} {verb} the {noun} of {topic} from {place} to {place2}.",
    "There is a {adjective} {noun} in {place} where {topic} are worth {number} {noun2}s.",
    "For {number} {unit} {person} {verb} {topic}, until the {adjective} {noun} fell on the {noun2}.",
    "The {noun} that {person} {verb} in {place} has nothing to do with {topic}, but the {noun2} has.",
    "Once {topic} were {adjective}, said {person}, and every {noun} in {place} {verb} a {noun2}.",
    "A {noun} of {number} {noun2}s, {adjective} as the {noun3} at {time}: that is what {topic} mean to {person}.",
    "By {time} {person} {verb} {number} of the {noun}s, and {place} was full of {topic}.",
    "Some in {place} call {topic} {adjective}; {person} {verb} the {noun} and calls them a {noun2}.",
    "Beside the {noun} {person} {verb} the {adjective} {noun2}, thinking of {topic} and of {place}.",
    "It took {number} {unit} to bring the {noun} from {place}, where {topic} {verb} the {adjective} {noun2}.",
)
WORDS = {
    "adjective": "brittle calm crooked dim faded gentle hollow jagged kind loud mellow narrow pale quiet rough silver "
    "tender vivid weary young blunt cold dusty famous",
    "noun": "barrel cradle drum fiddle gate hammer jar kettle ladder mirror needle pillow quilt rope saddle table "
    "valve wagon yard basket chimney door feather garden hinge",
    "verb": "found lost painted carried measured sold forgot repaired counted buried praised followed borrowed traded "
    "washed guarded drew opened mended answered weighed hid crossed watched",
    "place": "Arles Bergen Cadiz Delft Evora Faro Ghent Hobart Ithaca Jena Kotor Lugano Malmo Nara Odense Porto Quebec "
    "Ravenna Siena Tartu Utrecht Vigo Wells York Zadar",
    "person": "Agnes Boris Clara Dmitri Elena Felix Greta Hugo Irene Jonas Katya Lucas Martha Nils Olga Pavel Rosa "
    "Stefan Thea Ulrich Vera Walter Xenia Yusuf Zoe",
    "time": "dawn noon dusk midnight daybreak sunset breakfast supper",
    "unit": "hours days weeks winters evenings mornings miles journeys",
}
"""Words for each slot of the forms. A slot with a digit, such as ``noun2``, uses the words of ``noun``."""


def piece(kind: str, topic: str, rng: random.Random) -> str:
    """A piece of a kind in ``KINDS`` about a topic."""
    return KINDS[kind].join(_sentences(topic, rng))


def _sentences(topic: str, rng: random.Random) -> Iterator[str]:
    for form in rng.sample(FORMS, SENTENCES):
        slots = {"topic": topic, "number": str(rng.randrange(2, 1000))}
        for _, slot, _, _ in string.Formatter().parse(form):
            if slot and slot not in slots:
                slots[slot] = rng.choice(_LISTS[slot.rstrip(string.digits)])
        sentence = form.format(**slots)
        yield sentence[0].upper() + sentence[1:]


_LISTS = {slot: words.split() for slot, words in WORDS.items()}
