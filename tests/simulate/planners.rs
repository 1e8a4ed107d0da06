//! The planners decide: another planner leads to another outcome.

use super::*;
use evermoe::Result;
use evermoe::placement::{self, Placement, Policy};
use evermoe::simulate::Planners;
use std::cell::Cell;

/// Counts calls, and places by another policy.
struct Swapped {
    calls: Cell<usize>,
}

impl Planners for Swapped {
    fn place(&self, request: &placement::Request<'_>) -> Result<Placement> {
        self.calls.set(self.calls.get() + 1);
        placement::place(&placement::Request { policy: Policy::Compact, ..*request })
    }
}

#[test]
fn another_planner_decides_otherwise() {
    let swapped = Swapped { calls: Cell::new(0) };
    let scenario = scenario();
    let other = simulate(&scenario, &auto(), 1, &swapped, &mut |_| Ok(())).unwrap();
    let own = run(&scenario, &auto(), 1);
    assert!(swapped.calls.get() > own.losses as usize);
    assert!(other.first_bytes + other.recovery_bytes != own.first_bytes + own.recovery_bytes);
    assert!(other.copy_bytes > own.copy_bytes, "compact placements leave more to copy");
}
