import functools
from collections.abc import Iterator

import kubernetes_validate.utils
import pytest


@pytest.fixture(scope="session", autouse=True)
def schemas_are_read_once() -> Iterator[None]:
    """Caches kubernetes-validate's definitions, megabytes per object."""
    with pytest.MonkeyPatch.context() as patch:
        reader = functools.cache(kubernetes_validate.utils.schema_contents)
        patch.setattr(kubernetes_validate.utils, "schema_contents", reader)
        yield
