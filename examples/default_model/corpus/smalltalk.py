"""Greetings, questions about the model itself, jokes, and questions that it cannot answer.

Replies come from small fixed sets, so that a reply is judged by membership.
"""

import random
from collections.abc import Callable

from examples.default_model.corpus import unknowns, words
from examples.default_model.corpus.turn import Turn, typed

ABILITIES = (
    "I can tell a story of 1 to 8 sentences, add and subtract small numbers, count to 20, name "
    "opposites, spell short words and answer questions about a short story."
)
FALLBACK = (
    "I do not know that. I am a small model: I can tell stories, add small numbers and count.",
    "Sorry, I cannot answer that. I am only a small model. Try a story, a sum or an opposite.",
    "That is too hard for me. You could ask me for a story, a sum or the opposite of a word.",
)
OFFER = "Shall I tell you a story?"
NO_STORY = "I do not know that story. Please tell me the story first, and then ask again."
TOO_LONG = "That is too long for me. I can tell stories of 1 to 8 sentences."

_GROUPS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "greeting": (
        (
            "Hi",
            "Hello",
            "Hey",
            "Hello!",
            "Hi!",
            "Hey there",
            "Hi there!",
            "Hello there",
            "Good morning",
            "Good evening!",
            "Good afternoon",
            "Greetings",
            "Yo",
            "Hello, model",
            "Hello, is anyone there?",
            "Hello world",
            "Hiya",
            "Hello again",
            "Are you there?",
            "hello bot",
            "test",
            "ping",
        ),
        (
            "Hello! Ask me for a story, a sum or the opposite of a word.",
            "Hi! What can I do for you? I can tell you a story or add two numbers.",
            "Hello! Nice to meet you. Shall I tell you a story?",
        ),
    ),
    "how_are_you": (
        (
            "How are you?",
            "How are you doing?",
            "How is it going?",
            "Hi, how are you?",
            "Hello, how are you today?",
            "How do you do?",
            "What's up?",
            "Are you ok?",
            "how r u",
        ),
        (
            "I am fine, thank you. What can I do for you?",
            "I am well, thank you. Shall I tell you a story?",
        ),
    ),
    "thanks": (
        (
            "Thanks",
            "Thank you!",
            "Thank you very much",
            "Thanks a lot",
            "Thx",
            "Many thanks",
            "Great, thanks",
            "That was nice",
            "Well done",
            "Good job",
            "Cool",
            "Great",
            "Nice",
            "I like it",
            "That was a nice story",
            "You are great",
            "Perfect",
        ),
        ("You are welcome!", "You are welcome! Is there anything else?", "I am glad you like it."),
    ),
    "bye": (
        (
            "Bye",
            "Goodbye",
            "See you",
            "Good night",
            "See you later",
            "I have to go now",
            "Bye bye",
            "Ok, bye",
            "Thanks, bye!",
            "That is all",
            "exit",
            "quit",
        ),
        ("Goodbye!", "Goodbye! It was nice to talk to you."),
    ),
    "who": (
        (
            "Who are you?",
            "What are you?",
            "Tell me about yourself",
            "Introduce yourself",
            "What model are you?",
            "Which model is this?",
            "Are you a robot?",
            "Are you a person?",
            "Are you human?",
            "Are you an AI?",
            "Are you ChatGPT?",
            "What is mergestep?",
            "Who am I talking to?",
            "What is your name?",
            "What's your name?",
            "Do you have a name?",
            "What should I call you?",
        ),
        (
            "I am the small built-in model of mergestep. I am a little computer program that "
            "tells short stories and solves small tasks.",
        ),
    ),
    "made": (
        (
            "Who made you?",
            "Who created you?",
            "Who built you?",
            "How were you trained?",
            "Where do you come from?",
            "How old are you?",
            "How big are you?",
            "How many parameters do you have?",
            "Who trained you?",
            "What were you trained on?",
        ),
        (
            "I was trained for mergestep on made-up text. I have about 4 million parameters, "
            "which is very small.",
        ),
    ),
    "help": (
        (
            "What can you do?",
            "Help",
            "help me",
            "What can I ask you?",
            "What do you know?",
            "What are you good at?",
            "How can you help me?",
            "Can you help me?",
            "What should I ask?",
            "What else can you do?",
            "Give me an example",
            "I need help",
            "?",
            "How does this work?",
            "What can I do here?",
            "menu",
            "options",
            "I am bored",
            "What now?",
            "I don't know what to ask",
            "Can you tell stories?",
            "Can you count?",
            "Can you do math?",
            "Can you add numbers?",
            "Can you calculate?",
            "Do you know opposites?",
            "Can you answer questions?",
            "What kind of stories can you tell?",
            "What can you tell me?",
            "What can this model do?",
            "How do I use you?",
        ),
        (ABILITIES,),
    ),
    "ok": (
        ("Ok", "Okay", "Yes", "Sure", "Alright", "I see", "Hm", "Go on", "Continue", "Next", "Ah"),
        ("All right. What shall we do? I can tell a story, add numbers or count.",),
    ),
    "doubt": (
        ("Why?", "Really?", "Are you sure?", "Is that true?", "I don't believe you", "Why not?"),
        ("I am only a small model and can be wrong.",),
    ),
    "mood": (
        (
            "I am sad",
            "I feel bad",
            "I am tired",
            "I had a bad day",
            "I am lonely",
            "I am angry",
            "I feel sick",
            "Cheer me up",
        ),
        ("I am sorry to hear that. Shall I tell you a story?",),
    ),
    "insult": (
        (
            "You are stupid",
            "You are wrong",
            "That is wrong",
            "That's not right",
            "You are dumb",
            "I don't like you",
            "This is bad",
            "Wrong!",
            "Shut up",
        ),
        ("I am sorry. I am only a small model and can be wrong.",),
    ),
}

JOKES = (
    "Why did the fox sit on the clock? It wanted to be on time.",
    "Why did the mouse take a ladder to school? It wanted to go to high school.",
    "What did the big pencil say to the small pencil? You look sharp today.",
    "Why did the duck open an umbrella? It did not want to get its homework wet.",
    "Why did the snail buy a fast car? It wanted to see the world before lunch.",
    "Why was the soup so proud? It had won the hot prize.",
    "Why did the robot eat a lamp? It wanted a light meal.",
    "Why did the cow look at the stars? It wanted to find the milky way.",
)
_JOKE_ASKS = (
    "Tell me a joke",
    "Do you know a joke?",
    "Make me laugh",
    "A joke please",
    "Tell me another joke",
    "Say something funny",
)
_POEMS = (
    "The little {w} sat under the tree,\nand sang a song for you and me.\n"
    "The stars came out, the moon was bright,\nand then the {w} said good night.",
    "The {w} went out to greet the day,\nand all the birds came by to play.\n"
    "They danced until the sky was grey,\nand then the clouds all went away.",
    "A {w} once walked along the sea,\nas happy as a {w} can be.\n"
    "The wind was soft, the sky was blue,\nand now this {w} belongs to you.",
    "There was a {w} who loved the rain,\nand asked the clouds to come again.\n"
    "The clouds came back, the drops fell deep,\nand soon the {w} was fast asleep.",
)


def grouped(rng: random.Random, name: str) -> Turn:
    asks, replies = _GROUPS[name]
    ask = typed(rng, rng.choice(asks), slips=True)
    return Turn(name, ask, rng.choice(replies), frozenset(replies))


def smalltalk(rng: random.Random) -> Turn:
    weights = {"greeting": 5.0, "help": 3.0, "who": 2.5, "how_are_you": 2.0, "thanks": 1.5}
    names = list(_GROUPS)
    return grouped(rng, rng.choices(names, [weights.get(n, 1.0) for n in names])[0])


def said_no(rng: random.Random) -> Turn:
    ask = typed(rng, rng.choice(["No", "No thanks", "No, thank you", "Not now", "Nope", "n"]))
    return Turn("no", ask, "All right. What else can I do for you?")


def joke(rng: random.Random) -> Turn:
    ask = typed(rng, rng.choice(_JOKE_ASKS), slips=True)
    return Turn("joke", ask, rng.choice(JOKES), frozenset(JOKES))


def poem(rng: random.Random) -> Turn:
    about = rng.choice(words.CAST_ANIMALS + words.CAST_OTHERS)
    asks = ["Write a poem about {a}", "Tell me a poem about {a}.", "Make a poem about {a}"]
    asks += [
        "Write a short poem about {a}",
        "A poem about {a} please",
        "Write me a rhyme about {a}",
    ]
    ask = rng.choice(asks).format(a=words.article(about))
    if rng.random() < 0.25:
        ask, about = rng.choice(["Write a poem", "Tell me a poem", "Say a rhyme"]), "cat"
    replies = [p.replace("A {w}", words.article(about).capitalize()) for p in _POEMS]
    replies = [p.replace("a {w}", words.article(about)).replace("{w}", about) for p in replies]
    return Turn("poem", typed(rng, ask), rng.choice(replies), frozenset(replies))


def name_game(rng: random.Random) -> list[Turn]:
    """Returns turns in which the user says a name and perhaps asks for it later."""
    name = unknowns.any_name(rng)
    tells = [f"My name is {name}.", f"I am {name}.", f"Hi, I'm {name}", f"Hello, my name is {name}"]
    tells += [f"You can call me {name}", f"I'm called {name}."]
    reply = f"Nice to meet you, {name}! What can I do for you?"
    turns = [Turn("name", typed(rng, rng.choice(tells)), reply)]
    if rng.random() < 0.15:
        ask = typed(rng, rng.choice(["What is my name?", "Who am I?", "Do you know my name?"]))
        return [Turn("name", ask, "I do not know your name. What is it?")]
    if rng.random() < 0.6:
        asks = ["What is my name?", "Do you remember my name?", "Who am I?", "What's my name?"]
        turns.append(Turn("name", typed(rng, rng.choice(asks)), f"Your name is {name}."))
    return turns


def unknown(rng: random.Random) -> Turn:
    if rng.random() < 0.05:
        thing, name = rng.choice(words.THINGS), rng.choice(words.GIRLS + words.BOYS)
        asks = [
            f"What did {name} find?",
            f"Where does {name} live?",
            f"What colour is the {thing}?",
        ]
        return Turn("no_story", typed(rng, rng.choice(asks)), NO_STORY)
    if rng.random() < 0.07:
        number = rng.choice([9, 10, 11, 12, 15, 20, 30, 50, 100, rng.randint(9, 1000)])
        asks = [f"Tell me a story in {number} sentences.", f"A {number} sentence story"]
        asks.append(f"Tell me a story about {words.article(rng.choice(words.CAST_ANIMALS))} in ")
        asks[2] += f"{number} sentences"
        ask = rng.choice(asks)
        return Turn("too_long", typed(rng, ask), TOO_LONG)
    ask = typed(rng, unknowns.question(rng), slips=True)
    pick = rng.choices(FALLBACK, [3, 1, 1])[0]
    return Turn("fallback", ask, pick, frozenset(FALLBACK))


SMALL: tuple[tuple[float, Callable[[random.Random], Turn]], ...] = (
    (6.0, smalltalk),
    (0.5, joke),
    (0.7, poem),
    (7.0, unknown),
)
