"""Word lists of the demo: names, places, verbs, instructions and fillers.

tasks.py combines the words of these lists to inputs, so a held-out input is a new combination of
words that occur in training. The letters of RARE_LETTERS are intentionally missing in the
vocabulary. Each of them is encoded as several byte tokens, so a completion can end within a
character.
"""

from typing import NamedTuple


class Verb(NamedTuple):
    present: str
    past: str


class Pair(NamedTuple):
    japanese: str
    english: str


class Action(NamedTuple):
    """A Japanese object and verb (plain and polite form), and the English in the third person."""

    object: str
    plain: str
    polite: str
    english: str


NAMES = (
    "Maria", "Peter", "Anna", "Omar", "Lucy", "David", "Sofia", "Henry", "Nina", "Carlos",
    "Emma", "Victor", "Julia", "Simon", "Clara", "Felix", "Rosa", "Oscar", "Zoë", "Łukasz",
)  # fmt: skip
CITIES = (
    "Paris", "Oslo", "Rome", "Cairo", "Lima", "Delhi", "Tokyo", "Berlin", "Quito", "Dublin",
    "Athens", "Boston", "Havana", "Nairobi", "Lisbon", "Vienna", "Madrid", "Seoul", "Zürich",
)  # fmt: skip
VERBS = (
    Verb("buys", "bought"), Verb("sells", "sold"), Verb("finds", "found"),
    Verb("paints", "painted"), Verb("loses", "lost"), Verb("breaks", "broke"),
    Verb("brings", "brought"), Verb("keeps", "kept"), Verb("takes", "took"),
    Verb("sees", "saw"),
)  # fmt: skip
ADJECTIVES = ("red", "blue", "dark", "new", "small", "heavy", "cheap", "green", "round", "white")
OBJECTS = (
    "lamp", "chair", "book", "bicycle", "clock", "coat", "guitar", "mirror", "table", "camera",
    "kettle", "carpet", "piano", "boat", "ring", "hat", "pen", "bag",
)  # fmt: skip


class Feeling(NamedTuple):
    present: str
    past: str
    mood: str


FEELINGS = (
    Feeling("loves it", "loved it", "positive"),
    Feeling("smiles", "smiled", "positive"),
    Feeling("is happy", "was happy", "positive"),
    Feeling("feels great", "felt great", "positive"),
    Feeling("laughs", "laughed", "positive"),
    Feeling("is proud", "was proud", "positive"),
    Feeling("hates it", "hated it", "negative"),
    Feeling("cries", "cried", "negative"),
    Feeling("is sad", "was sad", "negative"),
    Feeling("feels awful", "felt awful", "negative"),
    Feeling("complains", "complained", "negative"),
    Feeling("is angry", "was angry", "negative"),
)

SUBJECTS_JA = (
    Pair("猫", "the cat"), Pair("犬", "the dog"), Pair("先生", "the teacher"),
    Pair("学生", "the student"), Pair("母", "my mother"), Pair("父", "my father"),
    Pair("子供", "the child"), Pair("友達", "my friend"), Pair("医者", "the doctor"),
    Pair("猿", "the monkey"), Pair("熊", "the bear"), Pair("魔女", "the witch"),
)  # fmt: skip
PLACES_JA = (
    Pair("公園", "in the park"), Pair("駅", "at the station"), Pair("学校", "at school"),
    Pair("家", "at home"), Pair("海", "by the sea"), Pair("店", "in the shop"),
    Pair("山", "on the mountain"), Pair("庭", "in the garden"), Pair("町", "in the town"),
    Pair("台所", "in the kitchen"),
)  # fmt: skip
ADVERBS_JA = (
    Pair("", ""), Pair("今日", "today"), Pair("毎日", "every day"), Pair("朝", "in the morning"),
    Pair("夜", "at night"), Pair("時々", "sometimes"),
)  # fmt: skip
ACTIONS_JA = (
    Action("魚", "食べる", "食べます", "eats fish"),
    Action("パン", "食べる", "食べます", "eats bread"),
    Action("林檎", "食べる", "食べます", "eats an apple"),
    Action("水", "飲む", "飲みます", "drinks water"),
    Action("お茶", "飲む", "飲みます", "drinks tea"),
    Action("本", "読む", "読みます", "reads a book"),
    Action("手紙", "読む", "読みます", "reads a letter"),
    Action("手紙", "書く", "書きます", "writes a letter"),
    Action("映画", "見る", "見ます", "watches a film"),
    Action("鳥", "見る", "見ます", "watches a bird"),
    Action("花", "買う", "買います", "buys a flower"),
    Action("傘", "買う", "買います", "buys an umbrella"),
    Action("音楽", "聞く", "聞きます", "listens to music"),
    Action("友人", "待つ", "待ちます", "waits for a friend"),
)

# Letters that the tokenizer's training data lacks, so that they are encoded as bytes.
RARE_LETTERS = "ëËŁłüÜ猿熊魔檎傘"

# Words without meaning for the tasks. A random number of them is placed at the start of a prompt.
# The empty word produces a double space, as in typed text.
FILLERS = (
    "please", "note", "well", "okay", "hello", "so", "now", "then", "dear", "thanks", "right",
    "listen", "also", "again", "maybe", "sure", ".", ",", "!", "-", "",
)  # fmt: skip

INSTRUCTIONS: dict[str, tuple[str, ...]] = {
    "mood": (
        "Is the mood of this sentence positive or negative?",
        "Say whether the person feels good or bad:",
        "Classify the sentiment:",
        "Tell me how this ends, well or badly:",
        "What feeling does the sentence express?",
    ),
    "name": (
        "Who is the sentence about?",
        "Give the name of the person:",
        "Extract the person from the text:",
        "Which person is mentioned here?",
        "Find the first name:",
    ),
    "city": (
        "Where does it happen?",
        "Give the name of the city:",
        "Extract the place from the text:",
        "Which city is mentioned here?",
        "Find the town on the map:",
    ),
    "backwards": (
        "Reverse the order of the words:",
        "Write the sentence backwards:",
        "Start with the last word and end with the first:",
        "Turn the words around:",
        "Repeat it from the end to the beginning:",
    ),
    "capitals": (
        "Write it in capital letters:",
        "Change every letter to upper case:",
        "Shout the sentence:",
        "Make all of the letters big:",
        "Put the whole text in capitals:",
    ),
    "past": (
        "Rewrite the sentence in the past tense:",
        "Say that it happened yesterday:",
        "Change the verbs to the past:",
        "Tell it as a story of long ago:",
        "Put what happens into the simple past:",
    ),
    "sorted": (
        "Sort the words by the alphabet:",
        "Write the words in alphabetical order:",
        "Order the words from A to Z:",
        "Arrange the words as in a dictionary:",
    ),
    "sum": (
        "Add the two numbers:",
        "What is the sum?",
        "How much is it together?",
        "Compute the total of both:",
        "Count one and the other:",
    ),
    "difference": (
        "How far apart are the numbers?",
        "What is the difference?",
        "Subtract the smaller from the larger:",
        "Compute the distance between both:",
        "By how much do they differ?",
    ),
    "larger": (
        "Which number is larger?",
        "Give the maximum:",
        "Pick the bigger one:",
        "Choose the greater of both:",
        "What is the highest value?",
    ),
    "smaller": (
        "Which number is smaller?",
        "Give the minimum:",
        "Pick the lesser one:",
        "Choose the lower of both:",
        "What is the least value?",
    ),
    "product": (
        "Multiply the two numbers:",
        "What is the product?",
        "How much is one times the other?",
        "Compute the product of both:",
    ),
    "english": (
        "Translate to English:",
        "What does this mean in English?",
        "英語に訳してください:",
        "Give the English for this sentence:",
        "英語で何と言いますか?",
    ),
    "subject": (
        "Who does it, in Japanese?",
        "誰がしますか?",
        "Give the subject of the Japanese sentence:",
        "主語を書いてください:",
        "Extract the one who acts:",
    ),
    "place": (
        "Where is it, in Japanese?",
        "どこでしますか?",
        "Give the place in the Japanese sentence:",
        "場所を書いてください:",
        "Extract the scene of the action:",
    ),
    "polite": (
        "Make the Japanese polite:",
        "丁寧に言ってください:",
        "Rewrite it in the polite form:",
        "丁寧な形に直してください:",
        "Say it as one would to a guest:",
    ),
}
