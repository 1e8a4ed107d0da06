"""Catalogs of units: digests of layouts, and the merged one of a pipeline's stages."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch

from evermoe.state.catalog import UnitCatalog
from evermoe.state.unit import TensorSpec, Unit


@dataclass
class StageUnits:
    stage: int
    layout: str
    units: list[tuple[str, int]]
    own: list[str] = field(default_factory=list)


def catalog_of(stage, widths, dtype=torch.float32):
    return UnitCatalog(
        Unit(f"stage{stage}.{number}", (TensorSpec("weight", (width,), dtype),)) for number, width in enumerate(widths)
    )


def units_of(stage, catalog):
    return StageUnits(stage, catalog.layout, catalog.sizes())


def test_layout_distinguishes_names_shapes_and_types():
    layouts = [
        catalog_of(0, [2, 4]).layout,
        catalog_of(1, [2, 4]).layout,
        catalog_of(0, [4, 2]).layout,
        catalog_of(0, [2, 4], torch.int32).layout,
    ]
    assert len(set(layouts)) == 4
    assert layouts[0] == catalog_of(0, [2, 4]).layout


def test_merged_catalog_has_all_stages_in_order_and_equals_that_of_the_other_stages():
    first, second = catalog_of(0, [2, 4]), catalog_of(1, [8])
    layout = [units_of(1, second), units_of(0, first), units_of(0, first)]
    merged = [each.merged(layout) for each in (first, second)]
    for each in merged:
        assert each.sizes() == [("stage0.0", 8), ("stage0.1", 16), ("stage1.0", 32)]
    assert merged[0].layout == merged[1].layout != first.layout
    assert merged[0].by_name["stage0.1"].specs == first.units[1].specs
    assert [spec.name for spec in merged[0].by_name["stage1.0"].specs] == ["all"]
    assert first.sizes() == [("stage0.0", 8), ("stage0.1", 16)]


def test_what_one_rank_alone_holds_is_an_expert_in_the_catalogs_of_all():
    first, second = catalog_of(0, [2, 4]), catalog_of(1, [8, 8])
    layout = [units_of(0, first), units_of(1, second), replace(units_of(1, second), own=["stage1.1"])]
    assert first.merged(layout).experts() == ["stage1.1"]
    expert = first.merged(layout).by_name["stage1.1"]
    assert (expert.layer, expert.expert) == ("stage1", 1)


def test_ranks_of_one_stage_that_differ_are_refused():
    layout = [units_of(0, catalog_of(0, [2])), units_of(1, catalog_of(1, [2])), units_of(1, catalog_of(1, [3]))]
    with pytest.raises(ValueError, match="ranks of stage 1 have units with different names"):
        catalog_of(0, [2]).merged(layout)
