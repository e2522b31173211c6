"""TextVQA soft accuracy: the EvalAI answer normalisation and the leave-one-out score over ten human answers.

Source: the algorithm of the TextVQA challenge's published evaluator (Singh et al., 2019, "Towards VQA Models That Can
Read"; the rules go back to the VQA challenge, Antol et al., 2015). It is followed to the letter, quirks included: a
score is only comparable when both sides are normalised alike.
"""

import re
from collections.abc import Sequence

ARTICLES = frozenset({"a", "an", "the"})

NUMBER_WORDS = {
    "none": "0",
    "zero": "0",
    "one": "1",
    "two": "2",
    "three": "3",
    "four": "4",
    "five": "5",
    "six": "6",
    "seven": "7",
    "eight": "8",
    "nine": "9",
    "ten": "10",
}

# The published table maps a contraction that lost one apostrophe to its full form. Entries of the table that begin with
# a capital I can never match, since the text is in lower case by then, and are left out.
FULL_CONTRACTIONS = """
ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't he'd he'd've
he's how'd how'll how's isn't it'd it'd've it'll ma'am might've mightn't mightn't've must've mustn't needn't not've
o'clock oughtn't 'ow's'at shan't she'd've should've shouldn't shouldn't've somebody'd've somebody'll somebody's
someone'd someone'd've someone'll someone's something'd something'd've something'll that's there'd there'd've
there're there's they'd they'd've they'll they're they've 'twas wasn't we'd've we've weren't what'll what're what's
what've when's where'd where's where've who'd who'd've who'll who's who've why'll why're why's won't would've
wouldn't wouldn't've y'all y'all'll y'all'd've you'd you'd've you'll you're you've
"""


def _contractions() -> dict[str, str]:
    table = {"somebody'd": "somebodyd"}  # the one entry of the published table that goes the other way
    for full in FULL_CONTRACTIONS.split():
        for position, character in enumerate(full):
            if character == "'":
                table[full[:position] + full[position + 1 :]] = full
    return table


CONTRACTIONS = _contractions()

# The comma and the question mark of the published list are gone before punctuation is looked at.
PUNCTUATION = ';/[]"{}()=+\\_-><@`!'

# A period is dropped unless a digit follows it ("3.5", ".5" keep theirs). The published pattern means to look at the
# digit before it too, but spells the look-behind wrongly, so only the following character counts; and it hands the
# flag re.UNICODE (32) to a parameter that is the number of replacements.
PERIOD = re.compile(r"\.(?!\d)")
MOST_PERIODS = 32


def normalize(answer: str) -> str:
    """The EvalAI normal form of one answer, prediction or human alike.

    Lower case; commas and question marks removed ("1,000" becomes "1000"); "'s" split off; newlines and tabs become
    spaces; punctuation removed, or replaced by a space where it joins two words; periods dropped unless a digit
    follows; number words from none to ten as digits; articles dropped; contractions with their apostrophe.
    """
    text = answer.lower().replace(",", "").replace("?", "").replace("'s", " 's").strip()
    text = text.replace("\n", " ").replace("\t", " ").strip()
    return _words(_punctuation(text))


def _punctuation(text: str) -> str:
    """Whether a mark touches a space anywhere in the *whole* answer decides for all its occurrences."""
    result = text
    for mark in PUNCTUATION:
        beside_space = f"{mark} " in text or f" {mark}" in text
        result = result.replace(mark, "" if beside_space else " ")
    return PERIOD.sub("", result, count=MOST_PERIODS)


def _words(text: str) -> str:
    words = (NUMBER_WORDS.get(word, word) for word in text.split())
    return " ".join(CONTRACTIONS.get(word, word) for word in words if word not in ARTICLES)


def accuracy(prediction: str, answers: Sequence[str]) -> float:
    """Soft accuracy in [0, 1]: the mean, over the sets that leave one answer out, of min(1, matches / 3).

    Of ten answers one match gives 0.3, two 0.6, three 0.9 and four or more 1.0.

    Raises:
        ValueError: `answers` is empty.
    """
    if not answers:
        raise ValueError("accuracy needs at least one human answer")
    matching = [normalize(answer) == normalize(prediction) for answer in answers]
    matches = sum(matching)
    return sum(min(1.0, (matches - left_out) / 3) for left_out in matching) / len(answers)
