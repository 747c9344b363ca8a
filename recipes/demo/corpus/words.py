"""The values that prompts are filled with: lists of ordinary words, and makers of invented ones."""

from __future__ import annotations

from recipes.demo.corpus.draw import Draw, Pool

CITIES = Pool("""Amsterdam, Athens, Auckland, Bangkok, Barcelona, Beijing, Belgrade, Bergen, Berlin,
Bogota, Bologna, Boston, Bratislava, Brisbane, Brussels, Bucharest, Budapest, Buenos Aires, Cairo,
Calgary, Cape Town, Caracas, Casablanca, Chennai, Chicago, Cologne, Copenhagen, Dakar, Dallas, Delhi,
Denver, Detroit, Dhaka, Doha, Dresden, Dubai, Dublin, Edinburgh, Florence, Geneva, Genoa, Glasgow,
Graz, Hamburg, Hanoi, Havana, Helsinki, Hong Kong, Houston, Istanbul, Jakarta, Kampala, Karachi,
Kyiv, Kyoto, Lagos, Lahore, Leeds, Leipzig, Lima, Lisbon, Ljubljana, London, Los Angeles, Luanda,
Lyon, Madrid, Malaga, Manchester, Manila, Marseille, Melbourne, Mexico City, Miami, Milan, Minsk,
Montreal, Moscow, Mumbai, Munich, Nairobi, Naples, New York, Nice, Osaka, Oslo, Ottawa, Palermo,
Panama City, Paris, Perth, Phoenix, Porto, Prague, Quito, Reykjavik, Riga, Rome, Rotterdam,
Salzburg, San Diego, San Francisco, Santiago, Sao Paulo, Sarajevo, Seattle, Seoul, Seville, Shanghai,
Singapore, Sofia, Stockholm, Stuttgart, Sydney, Taipei, Tallinn, Tampere, Tehran, Tokyo, Toronto,
Toulouse, Trieste, Tunis, Turin, Uppsala, Utrecht, Valencia, Vancouver, Venice, Vienna, Vilnius,
Warsaw, Wellington, Zagreb, Zurich, São Paulo, Zürich, Malmö, Kraków, Córdoba""")
COUNTRIES = Pool("""Argentina, Australia, Austria, Belgium, Brazil, Canada, Chile, China, Colombia,
Croatia, Denmark, Ecuador, Egypt, Estonia, Finland, France, Germany, Ghana, Greece, Hungary, Iceland,
India, Indonesia, Ireland, Italy, Japan, Kenya, Latvia, Lithuania, Malta, Mexico, Morocco, Nepal,
Netherlands, New Zealand, Nigeria, Norway, Peru, Poland, Portugal, Romania, Serbia, Slovakia,
Slovenia, South Africa, South Korea, Spain, Sweden, Switzerland, Thailand, Tunisia, Turkey, Ukraine,
Uruguay, Vietnam""")
FIRST_NAMES = Pool("""Ada, Adam, Agnes, Alan, Alice, Amara, Amir, Ana, Anders, Andrea, Anna, Anton,
Arun, Astrid, Ben, Bianca, Boris, Bruno, Carla, Carlos, Cecilia, Chen, Chloe, Clara, Daniel, David,
Diana, Dora, Edgar, Elena, Eli, Elsa, Emil, Emma, Erik, Esther, Eva, Farah, Felix, Fiona, Frank,
Freya, George, Gina, Grace, Greta, Hana, Hannah, Hans, Harold, Helen, Hugo, Ibrahim, Ida, Igor, Ines,
Ingrid, Iris, Ivan, Jack, James, Jana, Jasmin, Jonas, Jorge, Julia, Kai, Karin, Karl, Kate, Kenji,
Kira, Lars, Laura, Leila, Leo, Lina, Linda, Lisa, Louis, Lucas, Lucy, Luis, Maja, Marco, Maria, Mark,
Marta, Martin, Mary, Max, Maya, Mei, Mia, Mila, Mina, Mohamed, Nadia, Nina, Noah, Nora, Olga, Oliver,
Olivia, Omar, Oscar, Otto, Paul, Paula, Pedro, Peter, Priya, Rafael, Ravi, Rita, Robert, Rosa, Ruth,
Sam, Samir, Sara, Selma, Simon, Sofia, Sven, Tara, Theo, Thomas, Tim, Tina, Tom, Uma, Vera, Victor,
Walter, Wanda, Will, Yara, Yusuf, Zara, Zoe, José, Zoë, Jürgen, Renée, Søren""")
THINGS = Pool("""apple, bag, ball, banana, basket, battery, bell, bench, bicycle, blanket, boat, book,
bottle, bowl, box, bread, brick, bridge, brush, bucket, button, cable, cake, camera, candle, cap,
card, carrot, chair, cherry, clock, coat, coin, cookie, cup, curtain, desk, door, drum, egg, engine,
envelope, fan, feather, fence, flag, flower, flute, fork, glass, glove, grape, guitar, hammer, hat,
helmet, hook, jacket, jar, kettle, key, keyboard, kite, knife, ladder, lamp, leaf, lemon, letter, lock,
magnet, map, marble, mask, melon, mirror, mug, nail, necklace, needle, notebook, nut, olive, onion,
orange, oven, paddle, painting, pan, paper, peach, pear, pen, pencil, pepper, piano, pillow, pin,
pipe, plate, plum, potato, printer, pumpkin, puzzle, radio, ring, rock, rope, rug, ruler, sail,
saw, scarf, scissor, screw, seed, shelf, shell, shirt, shoe, shovel, sock, spoon, stamp, stone,
stool, sweater, table, tent, ticket, tile, tomato, towel, toy, tray, tree, trumpet, umbrella, vase,
violin, wagon, wallet, watch, wheel, whistle, window, wire""")
ADJECTIVES = Pool("""ancient, big, bitter, bold, brave, bright, broken, calm, careful, cheap, clean,
clever, cloudy, cold, crisp, curious, dark, deep, dry, dusty, early, easy, empty, fair, famous, fast,
flat, fresh, friendly, frozen, gentle, golden, grand, happy, heavy, hidden, hollow, honest, hungry,
kind, large, late, lazy, light, little, lonely, long, loud, lucky, mild, modern, narrow, new, noisy,
odd, old, open, pale, patient, plain, polite, proud, quick, quiet, rapid, rare, rich, rough, round,
rusty, sad, sharp, shiny, short, silent, simple, slow, small, smooth, soft, spicy, steep, strange,
strong, sweet, tall, thin, tiny, tired, tough, warm, weak, wet, wide, wild, wise, wooden, young""")
ANIMALS = Pool("""ant, badger, bat, bear, beaver, bee, bird, camel, cat, cow, crab, crow, deer, dog,
dolphin, donkey, dragon, duck, eagle, elephant, falcon, fish, fox, frog, goat, goose, hamster, hawk,
hedgehog, heron, horse, kangaroo, lion, lizard, lobster, mole, monkey, moose, mouse, octopus, otter,
owl, panda, parrot, penguin, pigeon, rabbit, raven, seal, shark, sheep, snail, snake, sparrow,
spider, squirrel, swan, tiger, toad, turtle, walrus, whale, wolf, zebra""")
VERBS = Pool("""asks, bakes, borrows, breaks, brings, builds, buys, calls, carries, catches, chases,
cleans, climbs, counts, draws, dreams of, drops, eats, finds, fixes, follows, forgets, guards, hears,
hides, holds, keeps, kicks, leaves, likes, loses, loves, makes, meets, moves, needs, opens, paints,
pulls, pushes, reads, repairs, sees, sells, sends, shows, steals, stops, takes, throws, turns, visits,
wants, washes, watches, wins, writes""")
COLOURS = Pool("""amber, beige, black, blue, bronze, brown, coral, crimson, cyan, gold, green, grey,
indigo, ivory, lilac, lime, magenta, maroon, navy, ochre, olive, orange, pink, purple, red, scarlet,
silver, teal, turquoise, violet, white, yellow""")
JOBS = Pool("""accountant, actor, architect, baker, barber, bus driver, butcher, carpenter, chef,
chemist, clerk, dancer, dentist, designer, doctor, editor, electrician, engineer, farmer, firefighter,
fisher, florist, gardener, geologist, glazier, guide, historian, journalist, judge, lawyer, librarian,
lifeguard, mechanic, midwife, miner, musician, nurse, painter, pharmacist, photographer, pilot,
plumber, poet, police officer, potter, professor, programmer, sailor, sculptor, shepherd, singer,
smith, surgeon, tailor, teacher, translator, vet, waiter, watchmaker, welder, writer""")
FOODS = Pool("""Chinese, Ethiopian, French, Georgian, Greek, Indian, Italian, Japanese, Korean,
Lebanese, Mexican, Moroccan, Nepalese, Persian, Peruvian, Polish, Portuguese, Spanish, Thai, Turkish,
Vietnamese, vegan, vegetarian""")
LANGUAGES = Pool("""Arabic, Bengali, Bulgarian, Catalan, Chinese, Croatian, Czech, Danish, Dutch,
English, Estonian, Finnish, French, German, Greek, Hebrew, Hindi, Hungarian, Icelandic, Irish, Italian,
Japanese, Korean, Latin, Latvian, Norwegian, Persian, Polish, Portuguese, Romanian, Russian, Serbian,
Slovak, Spanish, Swahili, Swedish, Thai, Turkish, Ukrainian, Urdu, Vietnamese, Welsh""")
TOPICS = Pool("""ancient maps, art history, astronomy, baking bread, bird watching, black holes,
board games, bridges, butterflies, castles, chess openings, classical music, climate change, coffee,
comets, coral reefs, cycling, dinosaurs, earthquakes, electric cars, elections, fashion, film festivals,
fishing, folk dance, football, fractals, gardening, glaciers, graph theory, hiking, honey bees,
horse racing, hurricanes, inflation, insects, interest rates, jazz, knitting, lighthouses, machine
learning, marathons, medicine, moon landings, mountains, mushrooms, ocean currents, opera, origami,
penguins, philosophy, photography, poetry, pottery, prime numbers, quantum physics, railways, rainforests,
robots, rockets, sailing, sculpture, solar power, space travel, spiders, stamps, submarines, sushi,
swimming, tea, telescopes, tennis, the moon, trains, tulips, volcanoes, whales, wind energy, wine, wolves,
world history, yoga""")
SKIES = Pool("""clear, cloudy, cold, drizzly, dry, foggy, freezing, hazy, hot, humid, icy, mild, misty,
overcast, partly cloudy, rainy, snowy, stormy, sunny, thundery, warm, windy, light rain, heavy snow""")
DAYS = Pool("Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, today, tomorrow")
MONTHS = ["January", "February", "March", "April", "May", "June", "July", "August", "September"]
MONTHS += ["October", "November", "December"]
ROOMS = Pool("""attic, balcony, basement, bathroom, bedroom, cellar, dining room, garage, garden, guest
room, hall, hallway, kitchen, library, living room, nursery, office, pantry, porch, studio, study""")
CURRENCIES = Pool("""USD, EUR, GBP, JPY, CHF, SEK, NOK, DKK, PLN, CZK, HUF, CAD, AUD, NZD, CNY, INR, KRW,
BRL, MXN, ZAR, TRY, SGD, HKD, THB, ILS""")
UNITS = Pool("""metres, kilometres, miles, feet, inches, yards, kilograms, grams, pounds, ounces, litres,
gallons, pints, seconds, minutes, hours, centimetres, tonnes, knots, acres""")
SONGS = [
    "song",
    "river",
    "night",
    "road",
    "morning",
    "dance",
    "train",
    "heart",
    "city",
    "rain",
    "fire",
]
ENDINGS = ["com", "org", "net", "io", "eu", "de", "info"]
ONSETS = (
    "b c d f g h j k l m n p qu r s t v w y z bl br ch cl cr dr fl fr gl gr kl kr pl pr sh sk sl"
)
ONSETS += " sm sn sp st str sw th tr tw vl wh zh"
ONSET = ONSETS.split()
NUCLEUS = ["a", "e", "i", "o", "u", "a", "e", "i", "o", "u", "ai", "ea", "ee", "ie", "oa", "oo", "ou", "ei", "au", "y"]
CODA = [
    *([""] * 12),
    *["b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t", "x", "z", "ck", "ld", "ll", "lm", "lt", "mp", "nd", "ng", "nk", "nt", "rd", "rk", "rm", "rn", "rt", "sk"],
]
ACCENTS = {"a": "á", "e": "é", "o": "ö", "u": "ü", "i": "í"}


def invented(draw: Draw) -> str:
    """A lower-case word of one to three syllables that need not exist."""

    def make() -> str:
        syllables = draw.number(1, 3) if draw.chance(0.7) else 2
        return "".join(
            draw.pick(ONSET) + draw.pick(NUCLEUS) + draw.pick(CODA) for _ in range(syllables)
        )

    return draw.made(make)


def word(draw: Draw) -> str:
    """A lower-case word, half of the time an ordinary one."""
    if draw.chance(0.4):
        return invented(draw)
    return draw.value(draw.pick([THINGS, ADJECTIVES, ANIMALS, COLOURS]))


def proper(draw: Draw) -> str:
    name = invented(draw).capitalize()
    if draw.chance(0.04):
        letter = draw.pick("aeoui")
        name = name.replace(letter, ACCENTS[letter])
    return name


def city(draw: Draw) -> str:
    return draw.value(CITIES) if draw.chance(0.6) else proper(draw)


def first_name(draw: Draw) -> str:
    return draw.value(FIRST_NAMES) if draw.chance(0.6) else proper(draw)


def full_name(draw: Draw) -> str:
    return f"{first_name(draw)} {proper(draw)}"


def person(draw: Draw) -> str:
    return full_name(draw) if draw.chance(0.4) else first_name(draw)


def company(draw: Draw) -> str:
    return proper(draw) + draw.pick(["", "", " Ltd", " Labs", " Group", " & Sons", " Systems"])


def title(draw: Draw) -> str:
    """A capitalised title of one to four words."""
    words = [draw.pick([word, invented])(draw) for _ in range(draw.number(1, 3))]
    text = " ".join(part.capitalize() for part in words)
    return f"The {text}" if draw.chance(0.4) else text


def phrase(draw: Draw) -> str:
    """A few lower-case words that belong together: a search, a task, a topic."""
    shape = draw.number(0, 5)
    if shape == 0:
        return draw.value(TOPICS)
    if shape == 1:
        return f"{draw.value(ADJECTIVES)} {word(draw)} {draw.pick(['shop', 'repair', 'prices'])}"
    if shape == 2:
        return f"{draw.value(TOPICS)} in {city(draw)}"
    if shape == 3:
        return f"how to {draw.pick(['fix', 'paint', 'clean', 'build', 'draw'])} a {word(draw)}"
    if shape == 4:
        return f"{word(draw)} {draw.pick(['for', 'with', 'and', 'near', 'without'])} {word(draw)}"
    return " ".join(word(draw) for _ in range(draw.number(1, 4)))


def task(draw: Draw) -> str:
    """Something to be done, as one says it."""
    shape = draw.number(0, 4)
    if shape == 0:
        return f"{draw.pick(['call', 'email', 'visit', 'meet', 'thank', 'pay'])} {person(draw)}"
    if shape == 1:
        return f"{draw.pick(['buy', 'fix', 'clean', 'find', 'return'])} the {word(draw)}"
    if shape == 2:
        return f"{draw.pick(['water', 'feed', 'wash', 'walk'])} the {draw.value(ANIMALS)}"
    if shape == 3:
        return f"book {draw.pick(['a table', 'a room', 'a ticket', 'a seat'])} in {city(draw)}"
    return f"{draw.pick(['read', 'finish', 'send', 'print'])} the {word(draw)} {word(draw)}"


def sentence(draw: Draw) -> str:
    """A short sentence about nothing in particular."""
    shape = draw.number(0, 4)
    if shape == 0:
        subject = f"the {draw.value(ADJECTIVES)} {draw.value(ANIMALS)}"
        text = f"{subject} {draw.value(VERBS)} the {word(draw)}"
    elif shape == 1:
        text = f"{person(draw)} {draw.value(VERBS)} a {word(draw)} in {city(draw)}"
    elif shape == 2:
        text = f"we meet {person(draw)} on {day(draw)} at {clock(draw)}"
    elif shape == 3:
        text = f"my {word(draw)} is {draw.value(COLOURS)} and {draw.value(ADJECTIVES)}"
    else:
        text = f"there are {draw.number(2, 99)} {draw.value(THINGS)}s in the {draw.value(ROOMS)}"
    return text[0].upper() + text[1:] + draw.pick([".", ".", ".", "!", ""])


def code(draw: Draw) -> str:
    """An identifier such as an order number."""

    def make() -> str:
        letters = "".join(draw.pick("ABCDEFGHJKLMNPRSTUVWXYZ") for _ in range(draw.number(1, 3)))
        digits = "".join(draw.pick("0123456789") for _ in range(draw.number(2, 5)))
        return draw.pick([f"{letters}-{digits}", f"{letters}{digits}", f"#{digits}"])

    return draw.made(make)


def email(draw: Draw) -> str:
    name = draw.pick([invented(draw), f"{first_name(draw)}.{invented(draw)}".lower()])
    return f"{name}@{invented(draw)}.{draw.pick(ENDINGS)}"


def phone(draw: Draw) -> str:
    digits = "".join(draw.pick("0123456789") for _ in range(draw.number(6, 9)))
    return draw.pick([f"{digits[:3]}-{digits[3:]}", f"+{draw.number(1, 99)} {digits}", digits])


def path(draw: Draw) -> str:
    name = f"{word(draw)}.{draw.pick(['txt', 'md', 'csv', 'json', 'py', 'log'])}"
    return draw.pick([name, f"{word(draw)}/{name}", f"/home/{word(draw)}/{name}"])


def clock(draw: Draw) -> str:
    hour, minute = draw.number(0, 23), draw.pick([0, 15, 30, 45, draw.number(0, 59)])
    if draw.chance(0.3):
        return f"{draw.number(1, 12)} {draw.pick(['am', 'pm'])}"
    return f"{hour:02}:{minute:02}"


def day(draw: Draw) -> str:
    shape = draw.number(0, 3)
    if shape == 0:
        return f"{draw.number(2024, 2031)}-{draw.number(1, 12):02}-{draw.number(1, 28):02}"
    if shape == 1:
        return f"{draw.number(1, 28)} {draw.pick(MONTHS)}"
    if shape == 2:
        return f"{draw.pick(MONTHS)} {draw.number(1, 28)}"
    return draw.value(DAYS)


def count(draw: Draw) -> int:
    """A number whose small values are the common ones."""
    return draw.made(lambda: draw.number(2, 10 ** draw.number(1, 4)))


def decimal(draw: Draw) -> float:
    return draw.made(lambda: draw.number(1, 999) + draw.pick([0.5, 0.25, 0.75, 0.1, 0.9, 0.2]))


def listing(items: list[str]) -> str:
    """a, b and c"""
    if len(items) < 2:
        return "".join(items)
    return f"{', '.join(items[:-1])} and {items[-1]}"
