"""Digests of sources: they change with what the code says, and with nothing else."""

from pathlib import Path

import pytest

from mla_conformance.files.installed import meaning, meaning_digest

CODE = 'def f(x):\n    """It adds."""\n    return x + 1  # one\n'


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ('"""A module."""\ndef f(x):\n\n    return (x+1)\n\n"""Of no use."""\n', True),
        ("def f(x):\n    return x + 2\n", False),
        ("def f(x):\n    return x + 1.0\n", False),
        ("def f(x, y=None):\n    return x + 1\n", False),
    ],
)
def test_what_decides_is_the_code_without_its_comments(text: str, same: bool) -> None:
    assert (repr(meaning(text)) == repr(meaning(CODE))) is same
    assert meaning("a = 1  # why\n", ".toml") == {"a": 1}


def test_a_digest_is_of_all_files_and_texts(tmp_path: Path) -> None:
    one, two = tmp_path / "a.py", tmp_path / "b.py"
    one.write_text("x = 1\n")
    two.write_text("y = 1\n")
    found = {meaning_digest(paths, *texts) for paths, texts in [((one, two), ()), ((one,), ()), ((one, two), ("t",))]}
    assert len(found) == 3 and meaning_digest((two, one)) in found
