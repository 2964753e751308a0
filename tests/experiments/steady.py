"""Times that no other process can disturb, so that the solver decides the same in every run of the tests."""

from dataclasses import replace

from hilore_cli.tables.profile_table import NO_CODEC, Profile, ProfileRow

OVERHEAD_US, PLAIN_US = 5.0, 30_000.0


def steady(profile: Profile) -> Profile:
    """The profile with times that follow from bytes and FLOPs alone: compressing is cheap, products are dear."""
    rows = tuple(replace(row, **_times(row)) for row in profile.rows)
    recompute = sum(row.recompute_us for row in rows)
    timing = replace(
        profile.meta.timing,
        plain_us=PLAIN_US,
        plain_fastest_us=PLAIN_US,
        gc_us=PLAIN_US + recompute,
        gc_fastest_us=PLAIN_US + recompute,
        checkpoint_us=OVERHEAD_US,
        mode_us=OVERHEAD_US,
    )
    return replace(profile, rows=rows, meta=replace(profile.meta, timing=timing))


def _times(row: ProfileRow) -> dict[str, float]:
    if row.codec != NO_CODEC:
        return {"codec_us": row.bytes / 1e4}
    return {"recompute_us": (row.bytes / 1e3 + row.flops / 1e4) * (row.leaf == 0)}
