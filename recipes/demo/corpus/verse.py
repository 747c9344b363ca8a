"""A haiku or a four-line poem about a given subject, and the one joke."""

from __future__ import annotations

from recipes.demo.corpus import talk, words
from recipes.demo.corpus.draw import Draw, Pool
from recipes.demo.corpus.sample import Sample, user

ONE = Pool(
    "love, rain, snow, spring, fall, time, peace, hope, life, wind, fire, cats, dogs, sleep, "
    "birds, tea, code, bugs, books, trees, stars, night, dawn, work, home, bread, frogs, cheese"
)
TWO = Pool(
    "the sea, the moon, the sun, the sky, winter, summer, autumn, coffee, music, Python, robots, "
    "mountains, rivers, flowers, friendship, pizza, the wind, the stars, a cat, a dog, my cat, "
    "my dog, London, Paris, morning, evening, Christmas, Monday, silence, the rain, a frog, "
    "a tree, a bird, a ship, cooking, football, the night, the snow, the spring, the world"
)
THREE = Pool(
    "computers, the ocean, the mountains, the forest, the city, the winter, programming, a server, "
    "the morning, the autumn, butterflies, loneliness, the desert, a river, holidays, the future, "
    "happiness, tomorrow, memory, the summer, my mother"
)
HEADS = [  # rest of the first line after one, two or three syllables
    ("quiet and near", "close and clear", "at last"),
    ("early and late", "soft and slow", "once more"),
    ("there in the light", "in the light", "in light"),
    ("older than names", "without end", "so old"),
]
TAILS = [
    "a small breath between two thoughts,\nthen the light moves on.",
    "no one counts the quiet hours,\nall of them are kind.",
    "I look once and look again,\nnothing is the same.",
    "words are small beside such things,\nso I bow and wait.",
]
POEMS = [
    "I thought of {0} when the day was new,\nand the sky was wide and the clouds were few.\n"
    "I thought of {0} when the day was done,\nand wrote one small line for everyone.",
    "A word for {0}, a word, no more,\nleft like a letter at the door.\n"
    "Read it softly, read it slow,\nthen keep {0} wherever you go.",
    "Some sing of kings, and some of gold;\nI sing of {0}, as I was told.\n"
    "My song is short, my words are few,\nbut all of them are meant for you.",
]
ASK = [
    "(Write|write|Give me|Compose|Make|write me|Write me) a (nice |short |little |){kind} "
    "(about|on) {0}(.|!|, please|)",
    "(Can you|Could you|can you|Please|please) write (me |)a (short |){kind} about {0}(?|.|)",
    "(A|a|Another) {kind} about {0}(, please|.|!|)",
    "(I want|I would like|I'd like|I need) a (short |){kind} about {0}(.|)",
]
ASK_JOKE = [
    "(Tell|tell|Give) me a( good| funny|) joke about {0}(.|!|, please|)",
    "(Do you know|Can you tell me) a( good|) joke about {0}(?|)",
]
ASK_STORY = [
    "(Tell|tell|Write|Give) (me |)a( short| little| nice|) story about {0}(.|!|, please|)",
]
JOKE = (
    'I know only one joke. A token walks into a cache. "Have we met?" asks the cache. "Yes," says '
    'the token, "my prefix comes here all the time."'
)


def subject(draw: Draw) -> tuple[str, int]:
    """Return a subject and its syllables minus one. Unlisted subjects count as two syllables."""
    shape = draw.number(0, 9)
    if shape < 5:
        at = draw.pick([0, 1, 1, 2])
        return draw.value([ONE, TWO, THREE][at]), at
    others = [
        lambda: f"the {draw.value(words.THINGS)}",
        lambda: f"{draw.value(words.ANIMALS)}s",
        lambda: draw.value(words.TOPICS),
        lambda: words.city(draw),
        lambda: f"a {words.invented(draw)}",
        lambda: f"{draw.value(words.ADJECTIVES)} {draw.value(words.THINGS)}s",
        lambda: words.first_name(draw),
    ]
    return draw.pick(others)(), 1


def haikus(about: str, syllables: int) -> list[str]:
    first = about[0].upper() + about[1:]
    pairs = zip(HEADS, TAILS, strict=True)
    return [f"{first}, {head[syllables]},\n{tail}" for head, tail in pairs]


def poems(about: str) -> list[str]:
    return [poem.replace("{0}", about) for poem in POEMS]


def verse(draw: Draw) -> Sample:
    about, syllables = subject(draw)
    mine = f"your{about[2:]}" if about.startswith("my ") else about
    if draw.chance(0.08):
        text = draw.expand(draw.pick(ASK_JOKE)).replace("{0}", about)
        return Sample("verse", [user(text)], JOKE, thought="I know one joke.")
    if draw.chance(0.06):
        text = draw.expand(draw.pick(ASK_STORY)).replace("{0}", about)
        story = next(entry.say for entry in talk.entries("chat.txt") if entry.name == "story")
        return Sample("verse", [user(text)], story, thought="I know one story.")
    kind = draw.pick(["haiku", "haiku", "poem", "poem", "verse", "rhyme"])
    text = draw.expand(draw.pick(ASK)).replace("{kind}", kind).replace("{0}", about)
    if kind == "haiku":
        answer = draw.pick(haikus(mine, syllables))
        others = [text for count in range(3) for text in haikus(mine, count)]
    else:
        answer, others = draw.pick(poems(mine)), poems(mine)
    thought = f"I write a {kind} about {mine}."
    return Sample("verse", [user(text)], answer, thought=thought, others=frozenset(others))
