"""Links for catalogs that have only names: catalogs of version 1, and those over files of other libraries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..core.catalog.model import Catalog, TensorKind, ValueEntry
from ..core.catalog.names import link_columns, links_from_names, optimizer_of
from ..core.catalog.param_groups import are_groups
from ..core.catalog.specs import ValueKind, ValueSpec
from ..errors import CorruptError
from .values import decode_value


def linked(catalog: Catalog) -> Catalog:
    """Add the links that follow from the names of a catalog; links that the catalog has stay as they are."""
    table, values = catalog.tensors_table, catalog.values_table
    known = catalog.links()
    found = links_from_names((*catalog.names, *catalog.value_names), listed_parameters(values)) | known
    tensors = {name: i for i, name in enumerate(table.names) if table.kind[i] == TensorKind.TENSOR}
    columns = link_columns(table.names, [found.get(name) if name in tensors else None for name in table.names], tensors)
    linked_values = tuple(
        replace(value, link=found[value.name]) if value.name in found and value.link is None else value for value in values
    )
    return replace(
        catalog,
        tensors_table=replace(table, optimizer=columns["optimizer"], key=columns["key"], parameter=columns["parameter"]),
        values_table=linked_values,
    )


def listed_parameters(values: Sequence[ValueEntry | ValueSpec]) -> dict[str, list[str]]:
    """Return the parameters in the groups of each optimizer, by its name; without names, parameters are listed by number."""
    listed: dict[str, list[str]] = {}
    for value in values:
        optimizer = optimizer_of(value.name)
        if optimizer is not None and value.data is not None and value.kind is not ValueKind.PER_RANK:
            try:
                groups = decode_value(value.data, name=value.name)
            except CorruptError:
                continue  # a load that wants the value gets the error
            if are_groups(groups):
                listed[optimizer] = [str(param) for group in groups for param in group["params"]]
    return listed
