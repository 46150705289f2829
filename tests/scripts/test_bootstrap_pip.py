"""Which wheel of pip the bootstrap takes from an index page."""

import pytest

from scripts._bootstrap_pip import newest_wheel

PAGE_URL = "https://index.test/simple/pip/"
PAGE = """
<a href="../../files/pip-9.0.3-py2.py3-none-any.whl#sha256=aa">old</a>
<a href="../../files/pip-25.3-py3-none-any.whl#sha256=bb">older</a>
<a href="../../files/pip-26.10-py3-none-any.whl#sha256=cc" data-requires-python="&gt;=3.9">newest</a>
<a href="../../files/pip-26.9-py3-none-any.whl#sha256=dd">newer</a>
<a href="../../files/pip-27.0b1-py3-none-any.whl#sha256=ee">not final</a>
<a href="../../files/pip-28.0-py3-none-any.whl">without hash</a>
<a href="../../files/pip-28.1.tar.gz#sha256=ff">not a wheel</a>
"""


def test_newest_final_wheel_is_taken_when_page_lists_several() -> None:
    assert newest_wheel(PAGE_URL, PAGE) == (
        "https://index.test/files/pip-26.10-py3-none-any.whl",
        "pip-26.10-py3-none-any.whl",
        "cc",
    )


def test_page_is_refused_when_no_wheel_has_a_hash() -> None:
    with pytest.raises(LookupError, match="no wheel of pip"):
        newest_wheel(PAGE_URL, '<a href="pip-28.0-py3-none-any.whl">x</a>')
