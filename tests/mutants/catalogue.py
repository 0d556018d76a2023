"""All mutants, and the ids of `REQUIRED_IDS` that no mutant can break, each with its reason.

The table at the end of `make test` shows the names from here beside each id; `make mutants` proves them.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from tests.ids_table import REQUIRED_IDS
from tests.mutants.model import Mutant, names_by_id
from tests.mutants.of_client import OF_CLIENT
from tests.mutants.of_edges import OF_EDGES
from tests.mutants.of_fanout import OF_FANOUT
from tests.mutants.of_faults import OF_FAULTS
from tests.mutants.of_field import OF_FIELD
from tests.mutants.of_group_writer import OF_GROUP_WRITER
from tests.mutants.of_groups import OF_GROUPS
from tests.mutants.of_mailbox import OF_MAILBOX
from tests.mutants.of_one_step import OF_ONE_STEP
from tests.mutants.of_writer import OF_WRITER

ALL: Final[tuple[Mutant, ...]] = (
    *OF_WRITER, *OF_ONE_STEP, *OF_FANOUT, *OF_MAILBOX, *OF_CLIENT, *OF_EDGES, *OF_FAULTS, *OF_FIELD,
    *OF_GROUPS, *OF_GROUP_WRITER,
)  # fmt: skip

WITHOUT_MUTANT: Final[Mapping[str, str]] = {}
"""Id → why no small change of the code can break it."""


def unproved_ids(mutants: Iterable[Mutant]) -> list[str]:
    """Required ids that none of these turns red and that have no reason to stand alone."""
    turned = names_by_id(mutants)
    return [
        proof_id for proof_id in REQUIRED_IDS if proof_id not in turned and proof_id not in WITHOUT_MUTANT
    ]
