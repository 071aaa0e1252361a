"""Which tiers of outlier and error treatment a recipe uses: the values, not the methods.

The methods: `scale_search` (range), `compensation`, `smoothing`, `outliers`, all tried by
`weight_tiers`; `sensitivity` chooses what is kept under a budget.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quantkit.errors import RecipeError, nearest
from quantkit.numerics import FORMATS


@dataclass(frozen=True, slots=True)
class Tiers:
    """What a recipe does about outliers and rounding errors; the keys of its [tiers] table.

    All off is plain rounding with scales from amax. `formats` and `outlier_columns` make a
    checkpoint that only quantkit itself runs.
    """

    range: bool = True  # scales that minimize the output error
    compensation: bool = True  # rounding that makes up for errors in other columns
    smoothing: bool = False  # factors moved between modules; changes norms, biases and KV scales
    formats: tuple[str, ...] = ()  # tried beside weights.format, by module group
    outlier_columns: float = 0.0  # share of the input channels that may stay bfloat16
    # Bytes a weight, on average over the targets, up to which the most sensitive modules stay as
    # they are; 0 keeps none.
    budget: float = 0.0

    def __post_init__(self) -> None:
        """Raise RecipeError for values that mean nothing."""
        for name in self.formats:
            if name not in FORMATS:
                hint = nearest(name, FORMATS)
                raise RecipeError(f"tiers.formats has {name!r}{hint}; known: {', '.join(FORMATS)}")
        if not 0 <= self.outlier_columns <= 0.5:
            raise RecipeError(
                f"tiers.outlier_columns is a share of 0 to 0.5, got {self.outlier_columns}"
            )
        if self.budget and not 1 <= self.budget <= 2:
            raise RecipeError(f"tiers.budget is 1 to 2 bytes a weight, or 0, got {self.budget}")

    @property
    def needs_data(self) -> bool:
        """True if any tier is on: all of them look at inputs."""
        return self != NO_TIERS

    @property
    def is_portable(self) -> bool:
        """True if every engine can load what comes out."""
        return not self.formats and not self.outlier_columns


NO_TIERS = Tiers(range=False, compensation=False)


TIER_FIELDS = {
    "range": "range",
    "compensation": "compensation",
    "smoothing": "smoothing",
    "formats": "formats",
    "outliers": "outlier_columns",
    "keep": "budget",
}
"""The names of tiers on the command line and in reports, and their keys in [tiers]."""


def only_tiers(tiers: Tiers, names: str) -> Tiers:
    """Return `tiers` with all switched off that `names` (commas between, or "none") lacks."""
    wanted = [] if names == "none" else [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in TIER_FIELDS:
            known = ", ".join(("none", *TIER_FIELDS))
            raise RecipeError(f"unknown tier {name!r}{nearest(name, TIER_FIELDS)}; known: {known}")
    off = {
        field: getattr(NO_TIERS, field) for name, field in TIER_FIELDS.items() if name not in wanted
    }
    return replace(tiers, **off)
