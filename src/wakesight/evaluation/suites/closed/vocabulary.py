"""The 512 words of the closed language that the bundled hybrid model reads and writes. The lists are ours.

There is no unknown word: text with any other word in it cannot be encoded, and is refused. A word's class says where
it may stand (a digit in a number, a noun as the name of a thing). Words are letters or digits only, so that white space
and punctuation alone split a text into them.
"""

from __future__ import annotations

from types import MappingProxyType


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


PAD, BOS, EOS, USER, ASSISTANT, SYSTEM = SPECIAL = ("<pad>", "<bos>", "<eos>", "<user>", "<assistant>", "<system>")
DIGITS = tuple("0123456789")
PUNCTUATION = tuple(".,:;?|=-/")
LABELS = _words("north south east west spring summer autumn winter")

ANIMALS = _words(
    "otter badger heron lynx falcon beetle moth trout salmon toad newt hare mole stork raven finch robin swan "
    "pony donkey camel llama hyena panther gecko lizard squid lobster snail wasp hornet cricket"
)
FOODS = _words(
    "bagel muffin noodle porridge stew curry waffle pancake biscuit pudding yoghurt almond walnut raisin cherry "
    "mango papaya radish turnip cabbage lentil ginger pepper mustard syrup toffee cocoa sorbet omelette dumpling "
    "pickle tofu"
)
TOOLS = _words(
    "chisel pliers anvil bucket kettle ladle sieve tongs lever pulley spade rake hoe scythe lantern candle mirror "
    "basket barrel crate trunk compass ruler magnet battery antenna piston gear spindle hinge bolt clamp"
)
PLACES = _words(
    "harbour lagoon marsh meadow canyon glacier summit orchard vineyard cellar attic chapel abbey fortress bakery "
    "brewery foundry theatre stadium arena clinic hostel tavern bazaar plaza alley tunnel canal quarry depot "
    "airport lighthouse"
)
CATEGORIES = (ANIMALS, FOODS, TOOLS, PLACES)
NOUNS = tuple(noun for category in CATEGORIES for noun in category)
ADJECTIVES = _words(
    "amber crimson violet indigo scarlet ivory ebony copper wooden marble velvet cotton frozen molten dusty rusty "
    "shiny glossy faded broken hollow solid fragile sturdy bulky slender tiny giant crooked twisted polished "
    "painted striped spotted fuzzy fluffy silky coarse crisp tender spicy salty bland juicy ancient modern "
    "famous humble noble royal gentle fierce lively sleepy curious clever stubborn patient nimble clumsy silent "
    "noisy secret foreign"
)
VERBS = _words(
    "watches follows carries repairs borrows paints measures guards admires ignores lifts covers washes counts "
    "trades hides copies finds greets answers"
)
HOLDING = _words("costs weighs shows holds uses keeps")  # verbs before a value in filler
VARIABLES = tuple(first + second for first in "bcdfghjk" for second in "lmnpqrst")
CODES = tuple(a + b + c for a in "kzvx" for b in "aeiou" for c in "bdgf")
FUNCTION = _words(
    "the a and of for to in on is are was near under with from by at this that it as all any each one two three "
    "four five ask number numbers code codes word words value values variable variables text list find remember "
    "read count label labels example examples pair pairs string strings complete most common frequent last first "
    "next repeat previous context exactly part starting following given above below answer question instruction "
    "story line lines same different not no yes true false has have be been there here when then if else what "
    "which who where how many less let set end name names item items after before between document system user "
    "assistant help you"
)
_NAMED = SPECIAL + DIGITS + PUNCTUATION + FUNCTION + LABELS + HOLDING + VERBS + ADJECTIVES + NOUNS + VARIABLES + CODES
SIZE = 512
WORDS: tuple[str, ...] = _NAMED
CLASSES = MappingProxyType(
    {
        "digit": DIGITS,
        "code": CODES,
        "noun": NOUNS,
        "adjective": ADJECTIVES,
        "verb": VERBS,
        "variable": VARIABLES,
        "label": LABELS,
        "other": SPECIAL + PUNCTUATION + FUNCTION + HOLDING,
    }
)
IDS = MappingProxyType({word: index for index, word in enumerate(WORDS)})
