"""Fixtures of the inspection tests; none of the folders may be written into.

`full`   Inspection of a checkpoint with every fact, and weights
`older`  Inspection of one whose quantkit.json is of the first version, without weights
"""

from __future__ import annotations

import pytest

from quantkit.inspection import Inspection, inspect
from tests.inspection.documents import document, older_document, write_folder


@pytest.fixture(scope="session")
def full(tmp_path_factory: pytest.TempPathFactory) -> Inspection:
    return inspect(write_folder(tmp_path_factory.mktemp("full"), document(), weights=True))


@pytest.fixture(scope="session")
def older(tmp_path_factory: pytest.TempPathFactory) -> Inspection:
    return inspect(write_folder(tmp_path_factory.mktemp("older"), older_document()))
