"""Which units of a layer are worth compressing, so that their gains are worth measuring."""

from collections.abc import Sequence
from dataclasses import dataclass

from hilore_cli.measuring.units import UnitRecord
from hilore_cli.tables.profile_table import INPUT_UNIT

SMALL = 32
"""A unit by this factor smaller than the layer's largest saves little when compressed, and costs little to store."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A unit that may be compressed: its place in the stream."""

    unit: int
    op_index: int


def compressible(units: Sequence[UnitRecord]) -> list[Candidate]:
    """Units worth compressing: of a size that matters, made from the layer's input, and dear to rebuild.

    First outputs only: later ones are statistics, such as attention's log-sum-exp. What is made without FLOPs from
    units that replay has anyway costs less to rebuild than to pack and unpack. A unit that is neither saved nor a
    product is as well served by compressing what it was made from, and so is one better kept one op later.
    """
    derived = depends_on_input(units)
    largest = max((unit.bytes for unit in units), default=0)
    return [
        Candidate(unit=index, op_index=unit.op_index)
        for index, unit in enumerate(units)
        if unit.floating
        and unit.keepable
        and unit.leaf == 0
        and unit.bytes * SMALL >= largest
        and index in derived
        and (unit.flops > 0 or (unit.saved and not _cheap_to_rebuild(unit, units)))
        and not _better_kept_later(index, units)
    ]


def statistics(units: Sequence[UnitRecord]) -> frozenset[tuple[int, int]]:
    """(op index, leaf) of small outputs made from the layer's input, such as a norm's scale or attention's log-sum-exp.

    Most plans store them. Stored, they stay exact where what they were made from is compressed, and no longer fit it.
    """
    derived = depends_on_input(units)
    largest = max((unit.bytes for unit in units), default=0)
    return frozenset(
        (unit.op_index, unit.leaf)
        for index, unit in enumerate(units)
        if unit.floating and unit.keepable and unit.bytes * SMALL < largest and index in derived
    )


def _cheap_to_rebuild(unit: UnitRecord, units: Sequence[UnitRecord]) -> bool:
    """Made from saved units and the layer's input alone, or a copy that is larger than its source."""
    if all(read == INPUT_UNIT or units[read].saved for read in unit.reads):
        return True
    return len(unit.reads) == 1 and units[unit.reads[0]].bytes < unit.bytes


def depends_on_input(units: Sequence[UnitRecord]) -> set[int]:
    """Units that the layer's input reaches: not masks or tables made from arguments alone."""
    derived = {INPUT_UNIT}
    for index, unit in enumerate(units):
        if derived.intersection(unit.reads):
            derived.add(index)
    return derived - {INPUT_UNIT}


def _better_kept_later(index: int, units: Sequence[UnitRecord]) -> bool:
    """Not saved, and read by one op only, whose only output is no larger: keeping that serves as well. Or unread."""
    if units[index].saved:
        return False
    readers = {unit.op_index for unit in units if index in unit.reads}
    if len(readers) != 1:
        return not readers
    outputs = [unit for unit in units if unit.op_index in readers]
    return len(outputs) == 1 and outputs[0].keepable and outputs[0].bytes <= units[index].bytes
