"""Finds words that our pages, docstrings, comments and messages do not use, and says what to write instead.

    python tests/prose.py [PATH ...]

Without paths it reads every text file of the repository; a hook of `pre-commit` gives it the changed ones. Its exit
code is 1 if it found any.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SUFFIXES = {".md", ".py", ".pyi", ".rs", ".cu", ".cuh", ".h", ".sh", ".toml", ".yml", ".yaml"}
NOT_READ = ("tests/prose.py", "Cargo.lock", "benches/results/")
"""This file, what cargo writes, and the records of past runs, which stay as they were written."""

_BE = "is|are|was|were|be|been|exists?|may|must|can|might|will|would|should|has|have"

WORDS = {
    r"beside": "concurrently with; in the background; next to",
    r"anew": "again; rebuilt; reconnected",
    r"alike": "the same way; both; equal",
    r"so many": "the number; n",
    r"of before|the one before|those before": "previous",
    r"(?:is|are|was|were|be|been) told|tells?": "is notified, learns; reports, sends, shows",
    r"go(?:es)? on|went on|going on": "continues, resumes",
    r"comes? to be|came to be": "is created",
    r"whole(?! numbers?\b)": "complete, entire, all",
    r"likewise": "say it again in full",
    r"(?:is|are|was|were|be) due|if due": "when scheduled",
    r"whose turn": "selected next",
    r"lets? one join": "admits a new worker",
    r"what is not there|not there": "missing",
    rf"there(?!(?: \w+)? (?:{_BE})\b|'s\b|fore\b)": "name the place; 'there' only as in 'there is'",
}
"""Regular expressions of words that are gone, and what is used in their place."""

OPENING = r'"""(?:What|Which|How|Of which|That of|Is told)\b'
"""Beginnings of docstrings that do not name the thing or say what it does."""

_FOUND = re.compile("|".join(rf"\b(?:{word})\b" for word in WORDS) + rf"|{OPENING}", re.IGNORECASE)


def advice(found: str) -> str:
    """Return what to write in place of the words that were found."""
    if found.startswith('"""'):
        return "a verb, or a noun phrase that names the thing"
    return next(use for word, use in WORDS.items() if re.match(rf"(?:{word})\b", found, re.IGNORECASE))


def files(paths: list[str]) -> list[Path]:
    """Return the text files that git tracks under the paths, or all of them."""
    listed = subprocess.check_output(["git", "ls-files", "--", *paths], cwd=ROOT, text=True).splitlines()
    return [ROOT / each for each in listed if Path(each).suffix in SUFFIXES and not each.startswith(NOT_READ)]


def main() -> int:
    number = 0
    for path in files(sys.argv[1:]):
        for line, text in enumerate(path.read_text().splitlines(), 1):
            for found in _FOUND.finditer(text):
                number += 1
                print(f"{path.relative_to(ROOT)}:{line}: {found[0]!r}: write {advice(text[found.start() :])}")
    print(f"{number} words that are gone" if number else "no word that is gone", file=sys.stderr)
    return int(number > 0)


if __name__ == "__main__":
    sys.exit(main())
