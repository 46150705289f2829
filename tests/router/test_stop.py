"""Stop strings. Goal: the same result however the text is cut, and never more held back than needed.

Method: random texts over a small alphabet, cut anywhere, against a reference that looks at every prefix of the text.
"""

from hypothesis import given, settings
from hypothesis import strategies as st

from router.stop import StopMatcher

words = st.text(alphabet="ab", min_size=1, max_size=4)


def reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            longest = max(matches, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(max_examples=100)
@given(pieces=st.lists(st.text(alphabet="abc", max_size=4), max_size=10), stops=st.lists(words, max_size=3))
def test_result_equals_the_reference_when_text_comes_in_pieces(pieces: list[str], stops: list[str]) -> None:
    matcher, emitted, stop, fed = StopMatcher(stops), "", None, ""
    for piece in pieces:
        result = matcher.push(piece)
        emitted, stop, fed = emitted + result.text, result.stop, fed + piece
        if stop is not None:
            break
        held = fed[len(emitted) :]
        assert not held or any(word.startswith(held) and word != held for word in stops), "held back without a reason"
    if stop is None:
        emitted += matcher.finish()
    assert (emitted, stop) == reference("".join(pieces), stops)


def test_first_to_complete_wins_when_strings_overlap() -> None:
    result = StopMatcher(["abcd", "bc"]).push("xabcd")
    assert (result.text, result.stop) == ("xa", "bc")
