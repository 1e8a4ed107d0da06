//! Ranges of the numbers that a scenario is given.

use crate::ensure;
use crate::error::Result;

pub(super) fn not_negative(name: &str, value: f64) -> Result<()> {
    ensure!(value.is_finite() && value >= 0.0, "{name}: expected a finite number, 0 or more, got {value}");
    Ok(())
}

pub(super) fn positive(name: &str, value: f64) -> Result<()> {
    ensure!(value.is_finite() && value > 0.0, "{name}: expected a finite number above 0, got {value}");
    Ok(())
}
