"""Facts that users give about themselves, and later questions about these facts."""

from __future__ import annotations

from recipes.demo.corpus import talk, words
from recipes.demo.corpus.draw import Draw, Pool
from recipes.demo.corpus.sample import Message, Sample, assistant, system, user

NAMES = Pool(
    "Bob, Ada, Alex, Amy, Andy, Anna, Ben, Bill, Carol, Charlie, Chris, Claire, Dan, Dave, Eve, "
    "Fred, Gary, Harry, Henry, Jack, Jane, Jenny, Jim, Joe, John, Kate, Ken, Kevin, Lee, Lily, "
    "Liz, Luke, Matt, Max, Mike, Neil, Nick, Pat, Pete, Phil, Rachel, Rob, Ron, Sally, Sam, Sarah, "
    "Steve, Sue, Ted, Tom, Tony, Wei, Ahmed, Ali, Fatima, Hiroshi, Yuki, Raj, Anil, Jose, Pierre"
)
TELL_NAME = [
    "(My name is|my name is|my name's|My name's|I am|I'm|i'm|i am|Call me|call me) {0}(.|!|)",
    "(I am called|My friends call me|They call me|You can call me|Please call me) {0}(.|!|)",
    "{0} is my name(.|!|)",
    "(My name is|I'm|I am) {0}, (nice to meet you|remember that)(.|!|)",
    "(My name is|I'm|I am) {0}, (what is yours|and you|who are you|how are you)(?|)",
    "(This is|It's|It is) {0}(.|) (Remember|Please remember) my name(.|)",
]
HELLOS = [
    "hi, ",
    "Hi, ",
    "Hi! ",
    "hello, ",
    "Hello, ",
    "Hello! ",
    "hey, ",
    "Hey ",
    "hi ",
    "Hi ",
    "hello ",
]
ASK_NAME = [
    "(What is|What's|what's|what is|whats|Whats) my name( again| now|)(?|)",
    "(Do you|do you|Can you) (know|remember|still know|recall) (my name|what my name is)(?|)",
    "(Tell me|Say|tell me|Write) my name(.|?| again.|, please.|)",
    "(Who am I|who am i|What am I called|What did I say my name was)(?|)",
    "(Which|What) name did I (tell|give) you(?|)",
    "(So|And|Okay, so|Now) (what is|what's) my name(?|)",
]
ASK_OTHER_NAME = ["(And what|What|what) is your name(?|)", "(And who|Who|who) are you(?|)"]
REPLIES = [
    "Hello {0}! How can I help you today?",
    "Hi {0}, nice to meet you.",
    "Good to meet you, {0}. What can I do for you?",
    "I do not know that.",
    "Okay.",
]
FOODS = Pool(
    "pizza, pasta, sushi, curry, soup, salad, ramen, tacos, cheese, bread, rice, burgers, fish"
)
FACTS = {
    "favourite colour": (
        lambda draw: draw.value(words.COLOURS),
        "(My favourite colour is|my favorite color is|I like best the colour) {0}(.|)",
    ),
    "home town": (words.city, "(I live in|My home is|My home town is|I come from) {0}(.|)"),
    "job": (lambda draw: draw.value(words.JOBS), "(I work as a|I am a|My job is) {0}(.|)"),
    "code": (words.code, "(Remember the code|My code is|The code is) {0}(.|)"),
    "dog": (words.proper, "(My dog is called|The name of my dog is|My dog is named) {0}(.|)"),
    "cat": (words.proper, "(My cat is called|The name of my cat is|My cat is named) {0}(.|)"),
    "favourite food": (
        lambda draw: draw.value(FOODS),
        "(My favourite food is|my favorite food is|I love to eat) {0}(.|!|)",
    ),
    "favourite animal": (
        lambda draw: f"the {draw.value(words.ANIMALS)}",
        "(My favourite animal is|My favorite animal is) {0}(.|)",
    ),
    "age": (
        lambda draw: str(draw.number(5, 99)),
        "(I am|I'm|i am|i'm) {0} years old(.|)",
    ),
    "birthday": (
        lambda draw: f"{draw.pick(words.MONTHS)} {draw.number(1, 28)}",
        "(My birthday is|My birthday is on|Remember my birthday, it is on) {0}(.|)",
    ),
}
RECALL = {
    "favourite colour": "(What is|What's|Do you remember) my (favourite colour|favorite color)?",
    "home town": "(Where do I live|Where is my home|What is my home town|Which town do I live in)?",
    "job": "(What is my job|What do I do|What is my work|Do you remember my job)?",
    "code": "(What is the code|What was the code|Which code did I tell you|Tell me the code)(?|)",
    "favourite food": "(What is|What's|Do you remember) my (favourite|favorite) food(?|)",
    "favourite animal": "(What is|What's|Do you remember) my (favourite|favorite) animal(?|)",
    "dog": "(What is the name of my dog|What is my dog called|Do you remember my dog)?",
    "cat": "(What is the name of my cat|What is my cat called|Do you remember my cat)?",
    "age": "(How old am I|What is my age|what's my age|Do you remember my age)(?|)",
    "birthday": "(When is my birthday|when's my birthday|What is my birthday)(?|)",
}
PERSONA = [
    "You are {0}.",
    "You are {0}, a helpful assistant.",
    "Your name is {0}. Be brief.",
    "You are {0}, an assistant made by a small company.",
]
WHO = ["(Who|What) are you?", "What('s| is) your name?", "(Introduce yourself|Tell me your name)."]


def met(name: str) -> str:
    return f"Nice to meet you, {name}! I will remember your name."


def any_name(draw: Draw) -> str:
    """Return a name as users type it, sometimes without capitals."""
    make = draw.pick([lambda d: d.value(NAMES), lambda d: d.value(NAMES), words.first_name])
    name = words.person(draw) if draw.chance(0.1) else make(draw)
    return name.lower() if draw.chance(0.15) else name


def introduction(draw: Draw, name: str) -> str:
    text = draw.expand(draw.pick(TELL_NAME)).replace("{0}", name)
    if draw.chance(0.4):
        text = draw.pick(HELLOS) + text
    return text


def named(draw: Draw, between: list[Message]) -> Sample:
    """Return a sample about names: a greeting, the user's name, a changed name, or the demo's."""
    name = any_name(draw)
    thought = f"The user's name is {name}."
    first = user(introduction(draw, name))
    shape = draw.random.random()
    if shape < 0.3:
        return Sample("memory", [*between, first], met(name), thought=thought)
    question = draw.wording(ASK_NAME)
    if shape < 0.38:
        text = f"{first['content'].rstrip('.!?')}. {question}"
        return Sample("memory", [user(text)], f"Your name is {name}.", thought=thought)
    reply = met(name)
    if draw.chance(0.2):
        reply = draw.pick(REPLIES).replace("{0}", name)
    messages = [first, assistant(reply), *between]
    if shape < 0.46:
        chat_entries = talk.entries("chat.txt")
        answer = next(entry.say for entry in chat_entries if entry.name == "who")
        messages.append(user(draw.expand(draw.pick(ASK_OTHER_NAME))))
        return Sample("memory", messages, answer, thought="The question is about me.")
    if shape < 0.54:
        name = any_name(draw)
        messages += [user(introduction(draw, name)), assistant(met(name))]
    messages.append(user(question))
    return Sample("memory", messages, f"Your name is {name}.", thought=f"The name is {name}.")


def remembered(draw: Draw, between: list[Message]) -> Sample:
    """Return a sample about another fact: an acknowledgement, a question, or a fact not given."""
    kind = draw.pick(list(FACTS))
    make, statement = FACTS[kind]
    if kind not in ("job", "code") and draw.chance(0.1):
        answer = f"You have not told me your {kind} yet."
        question = user(draw.wording([RECALL[kind]]))
        return Sample("memory", [question], answer, thought=f"The {kind} was not told.")
    value = make(draw)
    text = draw.wording([statement]).replace("{0}", value)
    if draw.chance(0.2):
        text = draw.pick(HELLOS) + text
    reply = f"I will remember: your {kind} is {value}."
    if draw.chance(0.3):
        return Sample("memory", [user(text)], reply, thought=f"The user's {kind} is {value}.")
    question = user(draw.wording([RECALL[kind]]))
    return Sample(
        "memory",
        [user(text), assistant(reply), *between, question],
        f"Your {kind} is {value}.",
        thought=f"The user said that the {kind} is {value}.",
    )


def name_of_assistant(draw: Draw) -> Sample:
    """Return a question about the name that the system message gives to the demo."""
    name = words.first_name(draw)
    persona = system(draw.wording(PERSONA).replace("{0}", name))
    question = user(talk.dressed(draw, draw.wording(WHO)))
    return Sample("memory", [persona, question], f"I am {name}.", thought=f"My name is {name}.")


def remember(draw: Draw, between: list[Message]) -> Sample:
    shape = draw.random.random()
    if shape < 0.12:
        return name_of_assistant(draw)
    return named(draw, between) if shape < 0.75 else remembered(draw, between)
