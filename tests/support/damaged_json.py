"""Damage to JSON documents, for files that anybody may have written."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st

#: Values that no reader expects in a place, and that JSON can hold.
odd_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.integers(-1, 3), max_size=3),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
)


@st.composite
def damaged(draw: st.DrawFn, document: Any, most: int = 3) -> Any:
    """Draws a copy of a document in which values anywhere are replaced or gone."""
    made = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, most))):
        at, holder, key = made, None, None
        while isinstance(at, dict | list) and at and (holder is None or draw(st.booleans())):
            holder = at
            keys = list(at) if isinstance(at, dict) else range(len(at))
            key = keys[draw(st.integers(0, len(at) - 1))]
            at = at[key]
        if holder is None:
            return draw(odd_values)
        if draw(st.booleans()):
            holder[key] = draw(odd_values)
        else:
            del holder[key]
    return made
