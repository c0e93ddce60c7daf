"""How much "right" is said of: the roles of cases, and the page of their caches if all have one."""

from collections.abc import Iterable
from functools import lru_cache

from mla_conformance.cases.cached import CachedCase
from mla_conformance.cases.case import Case

OTHER_ROLE = "other"
"""Of an id that an older suite wrote in another way, or that names no case, nothing is known."""


def scope_of(cases: Iterable[str]) -> str:
    """In words; empty where nothing is known."""
    found = dict.fromkeys(map(_role_and_page, cases))
    roles = dict.fromkeys(role for role, _ in found if role != OTHER_ROLE)
    pages = {page for _, page in found if page}
    return ", ".join([*roles, *(f"page {page}" for page in pages if len(pages) == 1)])


def role_of(case: str) -> str:
    """The role of a case."""
    return _role_and_page(case)[0]


@lru_cache(8192)
def _role_and_page(case: str) -> tuple[str, int]:
    """With the tokens of a page of its cache, 0 without one."""
    try:
        parsed = Case.parse(case)
    except ValueError:
        return OTHER_ROLE, 0
    return str(parsed.role), parsed.page if isinstance(parsed, CachedCase) else 0
