"""Text with facts that it comes back to: near and far keys matter for its next tokens."""

import random

_NAMES = [
    "Alice",
    "Boris",
    "Clara",
    "Daniel",
    "Elena",
    "Felix",
    "Greta",
    "Hugo",
    "Irene",
    "Jonas",
    "Karin",
    "Leon",
    "Maria",
    "Nils",
    "Olga",
    "Paul",
]
_PLACES = [
    "the harbour",
    "the old library",
    "the market",
    "the northern station",
    "the castle",
    "the bakery",
    "the mill",
    "the river bank",
    "the school",
    "the botanical garden",
]
_THINGS = [
    "a brass key",
    "a red umbrella",
    "a map of the city",
    "two letters",
    "a silver watch",
    "a basket of apples",
    "an empty notebook",
    "a wooden flute",
    "a photograph",
    "a heavy suitcase",
]


def story(num_sentences: int, seed: int = 0) -> str:
    """Sentences of which every third repeats what an earlier one said."""
    rng = random.Random(seed)
    facts: list[tuple[str, str, str]] = []
    sentences = []
    for i in range(num_sentences):
        if facts and i % 3 == 2:
            name, place, thing = rng.choice(facts)
            sentences.append(f"As was said before, {name} carried {thing} to {place}.")
            continue
        fact = (rng.choice(_NAMES), rng.choice(_PLACES), rng.choice(_THINGS))
        facts.append(fact)
        sentences.append(f"On day {i + 1}, {fact[0]} took {fact[2]} and walked to {fact[1]}.")
    return " ".join(sentences)
