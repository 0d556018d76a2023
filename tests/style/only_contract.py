"""An import contract that says what a part may import, and refuses the rest.

The contracts that come with the linter name what is forbidden, so a new module is open to everybody until
somebody thinks of forbidding it. Our table is the other way round: a part lists what it may know of the
project, and a new module is closed until it is listed. Only imports written in the part itself count; what an
allowed module imports in turn is the business of its own contract. A listed module that does not exist (yet,
or any more) is ignored.
"""

from typing import Any, cast

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


class OnlyContract(Contract):
    """`source_modules` and everything below them may import `allowed_modules` and everything below those."""

    type_name = "only"

    source_modules = fields.ListField(subfield=fields.StringField())
    allowed_modules = fields.ListField(subfield=fields.StringField(), required=False)

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Collects each import of a part that its row of the table does not name."""
        sources = [str(name) for name in cast("list[str]", self.source_modules)]
        allowed = [str(name) for name in cast("list[str]", self.allowed_modules)]
        breaches = [
            (source, imported)
            for source in sorted(_with_descendants(graph, sources))
            for imported in sorted(graph.find_modules_directly_imported_by(source))
            if _is_ours(imported) and not _is_allowed(imported, [*allowed, source])
        ]
        return ContractCheck(kept=not breaches, metadata={"breaches": breaches})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """One line per breach."""
        breaches: list[Any] = check.metadata["breaches"]
        for source, imported in breaches:
            output.print_error(f"{source} must not import {imported}")


def _with_descendants(graph: ImportGraph, modules: list[str]) -> set[str]:
    found: set[str] = set()
    for module in modules:
        if module in graph.modules:
            found |= {module, *graph.find_descendants(module)}
    return found


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in {"qim", "workers"}


def _is_allowed(module: str, allowed: list[str]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in allowed)
