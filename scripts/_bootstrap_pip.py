"""Installs pip into the interpreter that runs this file, for distributions that ship Python without ensurepip.

A wheel of pip can install itself. It comes from the package index that pip would use (PIP_INDEX_URL or pypi.org), and
its hash is checked against the index's. Uses the standard library alone; knows nothing about what is installed
afterwards.
"""

import hashlib
import html.parser
import os
import re
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request
from pathlib import Path

INDEX_TIMEOUT_S = 60
WHEEL = re.compile(r"pip-(\d+(?:\.\d+)*)-py3-none-any\.whl$")


class _Links(html.parser.HTMLParser):
    """Collects the targets of the index page's links."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.targets += [value for name, value in attrs if tag == "a" and name == "href" and value]


def newest_wheel(page_url: str, page: str) -> tuple[str, str, str]:
    """(url, file name, sha256) of the newest final pip on an index page. Raises LookupError when there is none."""
    links = _Links()
    links.feed(page)
    found: list[tuple[tuple[int, ...], str, str, str]] = []
    for target in links.targets:
        url, fragment = urllib.parse.urldefrag(urllib.parse.urljoin(page_url, target))
        name = urllib.parse.unquote(url.rsplit("/", 1)[-1])
        version, digest = WHEEL.fullmatch(name), fragment.removeprefix("sha256=")
        if version and fragment.startswith("sha256="):
            found.append((tuple(int(part) for part in version[1].split(".")), url, name, digest))
    if not found:
        raise LookupError(f"{page_url} lists no wheel of pip with a sha256")
    return max(found)[1:]


def fetch(url: str) -> bytes:
    """The body of an http(s) URL."""
    with urllib.request.urlopen(url, timeout=INDEX_TIMEOUT_S) as response:
        body: bytes = response.read()
    return body


def main() -> None:
    index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/") + "/pip/"
    url, name, digest = newest_wheel(index, fetch(index).decode())
    wheel = fetch(url)
    if hashlib.sha256(wheel).hexdigest() != digest:
        sys.exit(f"{url} does not have the hash that the index names")
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / name
        path.write_bytes(wheel)
        subprocess.run([sys.executable, f"{path}/pip", "install", "--quiet", str(path)], check=True)


if __name__ == "__main__":
    main()
