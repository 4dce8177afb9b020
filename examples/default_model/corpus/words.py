"""Word lists of the corpus: names, animals, places, things, opposites, facts.

The other modules of the corpus choose from these lists.
"""


def split_words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


GIRLS = split_words(
    "Anna Mia Lena Rosa Lucy Nora Ella Ivy Ruby Clara Mila Zoe Emma Lily Nina Tess Olga "
    "Vera Maya Sara Ada Jane Kate Molly Hana Alice Sofia Dora Gina Poppy"
)
BOYS = split_words(
    "Tom Ben Max Leo Sam Finn Otto Paul Hugo Jack Oscar Theo Adam Noah Emil Ravi Ivan "
    "Milo Peter Felix Bob Carl Dan Hans Luke Pip Rex Toby Omar Jim"
)
CAST_ANIMALS = split_words(
    "fox bear cat dog mouse rabbit owl frog duck hen pig cow goat sheep horse lion "
    "tiger wolf deer hedgehog squirrel badger otter turtle penguin elephant monkey "
    "parrot crow swan bee ant snail whale dolphin seal crab beaver donkey camel zebra "
    "giraffe kitten puppy lamb bird fish goose mole bat"
)
CAST_OTHERS = split_words(
    "dragon robot giant fairy witch wizard king queen prince princess knight pirate "
    "farmer baker sailor painter teacher ghost snowman unicorn clown gardener doctor "
    "astronaut boy girl"
)
CAST_THINGS = split_words(
    "toaster computer rocket car train tree apple potato moon star cloud flower banana "
    "shoe chair table teapot candle spoon book clock piano cookie cactus mountain river "
    "pumpkin carrot button snowflake stone leaf hat monster alien vampire mermaid "
    "zombie ninja cowboy detective teddy grandmother grandfather soldier dinosaur "
    "spider snake lizard shark octopus panda koala kangaroo hamster butterfly worm "
    "kraken troll elf dwarf princess superhero policeman nurse lemon cup lamp pencil "
    "house bus boat sock umbrella tractor bicycle violin guitar"
)
TRAITS = split_words(
    "little young brave kind clever shy funny curious happy old small gentle quiet lazy "
    "busy friendly tiny proud"
)
CHILD_TRAITS = tuple(t for t in TRAITS if t != "old")
COLOURS = split_words("red blue green yellow white black brown orange pink purple grey golden")
THINGS = split_words(
    "ball key box hat bell book kite lamp cup ring boat drum scarf coin shell stone bag "
    "basket flute map doll feather ribbon spoon bottle balloon umbrella button letter "
    "candle"
)
# name -> preposition of rest; the preposition of motion is always "to"
PLACES = {
    "forest": "in",
    "garden": "in",
    "park": "in",
    "village": "in",
    "valley": "in",
    "cave": "in",
    "meadow": "in",
    "town": "in",
    "castle": "in",
    "desert": "in",
    "jungle": "in",
    "river": "by",
    "lake": "by",
    "sea": "by",
    "pond": "by",
    "bridge": "by",
    "old mill": "by",
    "hill": "on",
    "beach": "on",
    "island": "on",
    "mountain": "on",
    "farm": "on",
    "market": "at",
    "school": "at",
    "harbour": "at",
    "station": "at",
}
FOODS = split_words("cake soup bread pie jam salad pizza porridge pudding stew")
SKILLS = split_words(
    "swim sing dance paint read write cook skate fish draw whistle juggle knit climb"
)
PLANTS = split_words(
    "flower tree rose sunflower pumpkin carrot tomato bean tulip cherry apple melon"
)

FRUITS = split_words("apple pear plum grape cherry banana lemon melon peach mango kiwi fig")
VEGETABLES = split_words("carrot potato onion pea cabbage tomato leek pumpkin radish bean")
TOOLS = split_words("hammer saw knife drill spade rake ladder brush needle axe")
CLOTHES = split_words("hat coat shirt sock shoe scarf glove dress skirt jacket")
VEHICLES = split_words("car bus train boat bike plane truck ship tram van")
FURNITURE = split_words("table chair bed desk sofa shelf bench stool cupboard lamp")
CATEGORIES = {
    "animal": tuple(w for w in CAST_ANIMALS if w not in ("lamb", "kitten", "puppy")),
    "fruit": FRUITS,
    "vegetable": VEGETABLES,
    "tool": TOOLS,
    "piece of clothing": CLOTHES,
    "vehicle": VEHICLES,
    "piece of furniture": FURNITURE[:-1],
    "colour": COLOURS[:-1],
}
LISTABLE = {  # the plural in the question -> its words
    "animals": CAST_ANIMALS[:30],
    "fruits": FRUITS,
    "vegetables": VEGETABLES,
    "tools": TOOLS,
    "clothes": CLOTHES,
    "vehicles": VEHICLES,
    "colours": COLOURS[:-1],
    "colors": COLOURS[:-1],
    "names": GIRLS[:15] + BOYS[:15],
}

OPPOSITE_PAIRS = tuple(
    tuple(pair.split("/"))
    for pair in split_words(
        "hot/cold big/little high/low up/down left/right day/night black/white good/bad "
        "happy/sad fast/slow old/young open/closed full/empty hard/soft wet/dry rich/poor "
        "strong/weak long/short early/late near/far light/dark clean/dirty loud/quiet "
        "true/false first/last in/out on/off yes/no begin/end push/pull give/take win/lose "
        "buy/sell love/hate laugh/cry always/never all/none before/after above/below "
        "inside/outside front/back thick/thin wide/narrow deep/shallow smooth/rough "
        "sharp/blunt sweet/sour brave/cowardly kind/cruel safe/dangerous easy/difficult "
        "cheap/expensive beautiful/ugly asleep/awake alive/dead hello/goodbye north/south "
        "east/west summer/winter morning/evening friend/enemy question/answer start/stop "
        "arrive/leave come/go rise/fall remember/forget more/less many/few same/different "
        "top/bottom hero/villain polite/rude tight/loose calm/nervous grow/shrink "
        "appear/disappear accept/refuse"
    )
)


def _both_ways(pairs: tuple[tuple[str, ...], ...]) -> dict[str, str]:
    table: dict[str, str] = {}
    for left, right in pairs:
        table[left], table[right] = right, left
    return table


_ONE_WAY = {
    "heavy": "light",
    "tall": "short",
    "small": "big",
    "large": "small",
    "wrong": "right",
    "quick": "slow",
    "noisy": "quiet",
    "evil": "good",
    "ill": "healthy",
    "warm": "cool",
}
OPPOSITES = _both_ways(OPPOSITE_PAIRS) | _ONE_WAY

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = split_words(
    "January February March April May June July August September October November December"
)
SEASONS = ("spring", "summer", "autumn", "winter")

THING_COLOURS = {
    "the sky": "blue",
    "grass": "green",
    "snow": "white",
    "a banana": "yellow",
    "a lemon": "yellow",
    "a tomato": "red",
    "a strawberry": "red",
    "blood": "red",
    "coal": "black",
    "milk": "white",
    "the sun": "yellow",
    "a carrot": "orange",
    "an orange": "orange",
    "chocolate": "brown",
    "a frog": "green",
    "an elephant": "grey",
    "a crow": "black",
    "a swan": "white",
    "a leaf": "green",
    "the sea": "blue",
    "a cucumber": "green",
    "a cherry": "red",
    "a flamingo": "pink",
    "a bear": "brown",
    "a pumpkin": "orange",
    "a fox": "red",
    "a pea": "green",
    "salt": "white",
    "the night": "black",
    "a fire truck": "red",
}
SOUNDS = {
    "dog": "woof",
    "cat": "meow",
    "cow": "moo",
    "duck": "quack",
    "sheep": "baa",
    "pig": "oink",
    "horse": "neigh",
    "frog": "ribbit",
    "owl": "hoot",
    "bee": "buzz",
    "lion": "roar",
    "mouse": "squeak",
    "snake": "hiss",
    "crow": "caw",
    "hen": "cluck",
    "wolf": "howl",
    "goose": "honk",
    "bird": "tweet",
    "donkey": "hee-haw",
    "goat": "maa",
    "rooster": "cock-a-doodle-doo",
    "bear": "growl",
}
CAPITALS = {
    "France": "Paris",
    "Germany": "Berlin",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Portugal": "Lisbon",
    "England": "London",
    "the United Kingdom": "London",
    "Ireland": "Dublin",
    "Austria": "Vienna",
    "Poland": "Warsaw",
    "Greece": "Athens",
    "Norway": "Oslo",
    "Sweden": "Stockholm",
    "Denmark": "Copenhagen",
    "Finland": "Helsinki",
    "Russia": "Moscow",
    "Japan": "Tokyo",
    "China": "Beijing",
    "India": "New Delhi",
    "Egypt": "Cairo",
    "Canada": "Ottawa",
    "Mexico": "Mexico City",
    "Brazil": "Brasilia",
    "Australia": "Canberra",
    "the United States": "Washington",
    "the USA": "Washington",
    "Turkey": "Ankara",
    "Hungary": "Budapest",
    "Belgium": "Brussels",
    "the Netherlands": "Amsterdam",
    "Switzerland": "Bern",
    "South Korea": "Seoul",
    "Argentina": "Buenos Aires",
    "Ukraine": "Kyiv",
}
FACTS = {
    "How many days are in a week": "There are 7 days in a week.",
    "How many days does a week have": "There are 7 days in a week.",
    "How many months are in a year": "There are 12 months in a year.",
    "How many days are in a year": "There are 365 days in a year, and 366 in a leap year.",
    "How many hours are in a day": "There are 24 hours in a day.",
    "How many minutes are in an hour": "There are 60 minutes in an hour.",
    "How many seconds are in a minute": "There are 60 seconds in a minute.",
    "How many legs does a spider have": "A spider has 8 legs.",
    "How many legs does an ant have": "An ant has 6 legs.",
    "How many legs does a bee have": "A bee has 6 legs.",
    "How many legs does a dog have": "A dog has 4 legs.",
    "How many legs does a cat have": "A cat has 4 legs.",
    "How many legs does a horse have": "A horse has 4 legs.",
    "How many legs does a bird have": "A bird has 2 legs.",
    "How many legs does a hen have": "A hen has 2 legs.",
    "How many legs does a fish have": "A fish has no legs.",
    "How many legs does a snake have": "A snake has no legs.",
    "How many fingers are on one hand": "There are 5 fingers on one hand.",
    "How many wheels does a car have": "A car has 4 wheels.",
    "How many wheels does a bike have": "A bike has 2 wheels.",
    "How many sides does a triangle have": "A triangle has 3 sides.",
    "How many sides does a square have": "A square has 4 sides.",
    "How many letters are in the alphabet": "There are 26 letters in the English alphabet.",
    "How many seasons are there": "There are 4 seasons: spring, summer, autumn and winter.",
    "What are the seasons": "There are 4 seasons: spring, summer, autumn and winter.",
    "What is the first day of the week": "The first day of the week is Monday.",
    "What is the first month of the year": "The first month of the year is January.",
    "What is the last month of the year": "The last month of the year is December.",
    "What are the days of the week": f"The days of the week are {', '.join(DAYS)}.",
    "Name the days of the week": f"The days of the week are {', '.join(DAYS)}.",
    "List the days of the week": f"The days of the week are {', '.join(DAYS)}.",
    "What are the months of the year": f"The months of the year are {', '.join(MONTHS)}.",
    "Name the months": f"The months of the year are {', '.join(MONTHS)}.",
    "Say the alphabet": "A B C D E F G H I J K L M N O P Q R S T U V W X Y Z.",
    "Recite the alphabet": "A B C D E F G H I J K L M N O P Q R S T U V W X Y Z.",
    "Where do fish live": "Fish live in water.",
    "Where do birds live": "Birds live in nests.",
    "What do bees make": "Bees make honey.",
    "What do cows give": "Cows give milk.",
    "What do hens lay": "Hens lay eggs.",
    "What is ice made of": "Ice is frozen water.",
    "What is a baby cat called": "A baby cat is called a kitten.",
    "What is a baby dog called": "A baby dog is called a puppy.",
    "What is a baby sheep called": "A baby sheep is called a lamb.",
    "Is the sun hot": "Yes, the sun is very hot.",
    "Is ice cold": "Yes, ice is cold.",
    "Can fish swim": "Yes, fish can swim.",
    "Can birds fly": "Yes, most birds can fly.",
    "Can pigs fly": "No, pigs cannot fly.",
    "Is fire cold": "No, fire is hot.",
}
SPELL = tuple(
    sorted(
        {
            *CAST_ANIMALS,
            *(w for w in THINGS if len(w) <= 6),
            *COLOURS,
            *FRUITS,
            *VEHICLES,
            *CLOTHES,
            *FOODS,
            *(w for w in TOOLS if len(w) <= 6),
            *split_words(
                "sun moon star house tree water fire stone apple hello world sky rain snow wind "
                "friend school night day love time king queen bread milk egg door window hand nose"
            ),
        }
    )
)
NUMBER_WORDS = split_words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen "
    "fourteen fifteen sixteen seventeen eighteen nineteen twenty"
)


def article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" and noun != "unicorn" else f"a {noun}"


def plural(noun: str) -> str:
    special = {"mouse": "mice", "sheep": "sheep", "fish": "fish", "knife": "knives"}
    if noun in special:
        return special[noun]
    if noun.endswith(("s", "x", "ch", "sh")):
        return noun + "es"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + "s"
