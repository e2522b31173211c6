import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmopt.bench.vqa import CONTRACTIONS, accuracy, normalize


@pytest.mark.parametrize(
    "answer, normal",
    [
        ("Stop SIGN", "stop sign"),
        ("  padded\t words\n here ", "padded words here"),
        ("the quick a an fox", "quick fox"),
        ("theatre anthem", "theatre anthem"),
        ("The", ""),
    ],
)
def test_case_white_space_and_articles(answer, normal):
    assert normalize(answer) == normal


@pytest.mark.parametrize(
    "word, digit",
    [("none", "0"), ("zero", "0"), ("One", "1"), ("two", "2"), ("seven", "7"), ("TEN", "10"), ("eleven", "eleven")],
)
def test_number_words(word, digit):
    assert normalize(f"{word} cats") == f"{digit} cats"


@pytest.mark.parametrize(
    "answer, normal",
    [
        ("dont", "don't"),
        ("couldnt've", "couldn't've"),
        ("couldn'tve", "couldn't've"),
        ("yall'd've", "y'all'd've"),
        ("twas", "'twas"),
        ("5 oclock", "5 o'clock"),
        ("somebody'd", "somebodyd"),
        ("somebodyd've", "somebody'd've"),
        ("well", "well"),
        ("were", "were"),
        ("im", "im"),
    ],
)
def test_contractions(answer, normal):
    assert normalize(answer) == normal


def test_contraction_table_is_complete():
    assert len(CONTRACTIONS) == 114
    assert all(full.replace("'", "") == key.replace("'", "") for key, full in CONTRACTIONS.items())


@pytest.mark.parametrize(
    "answer, normal",
    [
        ("1,000", "1000"),
        ("a-b\n-c", "ab c"),  # a line's end and a tab are spaces before marks are looked at
        ("a-b\t-c", "ab c"),
        ("dallas, texas", "dallas texas"),
        ("red,blue", "redblue"),
        ("why?", "why"),
        ("mcdonald's", "mcdonald 's"),
        ("3.5", "3.5"),
        (".5", ".5"),
        ("5.", "5"),
        ("u.s.a.", "usa"),
        ("v2.0 beta.", "v2.0 beta"),
        ("www.site.com", "wwwsitecom"),
    ],
)
def test_commas_periods_and_possessives(answer, normal):
    assert normalize(answer) == normal


@pytest.mark.parametrize(
    "answer, normal",
    [
        ("coca-cola", "coca cola"),
        ("coca - cola", "coca cola"),
        ("a-b c- d", "ab c d"),  # one dash beside a space removes all dashes
        ("12/25", "12 25"),
        ("(hello)", "hello"),
        ('"quoted" text', "quoted text"),
        ("me@mail", "me mail"),
        ("50%", "50%"),  # not in the published list
        ("stop!", "stop"),
        ("it's", "it 's"),
        ("the-end", "end"),  # the article appears once the dash is a space
    ],
)
def test_punctuation(answer, normal):
    assert normalize(answer) == normal


def test_at_most_32_periods_are_dropped():
    assert normalize("." * 40 + "x") == "." * 8 + "x"


@given(st.text(alphabet="abtheone1,.'- \t", max_size=20))
def test_normal_form_has_no_outer_or_double_spaces_and_no_capitals(text):
    normal = normalize(text.upper())
    assert normal == " ".join(normal.split()) == normal.lower()


@pytest.mark.parametrize("matches, expected", [(0, 0.0), (1, 0.3), (2, 0.6), (3, 0.9), (4, 1.0), (10, 1.0)])
def test_leave_one_out_mean_over_ten_answers(matches, expected):
    answers = ["stop"] * matches + [f"other {i}" for i in range(10 - matches)]
    assert accuracy("Stop.", answers) == pytest.approx(expected)


def test_disagreeing_answers_score_each_by_its_own_count():
    answers = ["Two", "2", "two ", "three", "3", "the 4", "5", "6", "7", "8"]
    assert accuracy("2", answers) == pytest.approx(0.9)
    assert accuracy("three", answers) == pytest.approx(0.6)
    assert accuracy("four", answers) == pytest.approx(0.3)
    assert accuracy("nine", answers) == 0.0


def test_other_numbers_of_answers():
    assert accuracy("x", ["x"]) == 0.0  # nothing is left when the only answer is left out
    assert accuracy("x", ["x"] * 3) == pytest.approx(2 / 3)


def test_empty_prediction_scores_nothing_on_real_answers():
    assert accuracy("", ["stop"] * 10) == 0.0


def test_no_answers_is_an_error():
    with pytest.raises(ValueError, match="at least one"):
        accuracy("x", [])
