"""Questions of users: each has its answer in one section of a page, which a search for a few words finds."""

import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"
QUESTIONS = tomllib.loads(Path(__file__).with_name("docs_questions.toml").read_text("utf-8"))["question"]
#: Pages that may have the words of a question; a reader looks at the first results of a search.
FIRST = 4


@cache
def sections(page: Path) -> list[str]:
    """The sections of a page, in lower case and with single spaces."""
    parts = re.split(r"^#+ ", page.read_text("utf-8"), flags=re.MULTILINE)
    return [" ".join(part.lower().split()) for part in parts]


def pages_with(words: list[str]) -> list[str]:
    """The pages with a section that has all words."""
    wanted = [word.lower() for word in words]
    return [
        page.name for page in DOCS.glob("*.md") if any(all(word in text for word in wanted) for text in sections(page))
    ]


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question["text"])
def test_a_search_finds_the_answer(question):
    found = pages_with(question["words"])
    assert question["page"] in found
    assert len(found) <= FIRST, found


def test_questions_cover_the_pages():
    assert len({question["text"] for question in QUESTIONS}) == len(QUESTIONS) >= 60
    generated = {"api.md", "command-line.md", "diffusion-models.md", "index.md", "models.md"}
    assert {page.name for page in DOCS.glob("*.md")} - generated == {question["page"] for question in QUESTIONS}
