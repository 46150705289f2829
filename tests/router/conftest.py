"""Fixtures of the router's tests."""

from pathlib import Path

import pytest

from router.text import TextProcessor
from tests.router.scripted import write_model


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def text(model_directory: Path) -> TextProcessor:
    return TextProcessor(model_directory)
