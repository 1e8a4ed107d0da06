//! Detection of changes that invalidate the windows.

use super::pace::total;
use super::span::{Resource, StepProfile, check};
use super::windows::{Aligned, Anchor, Window, Windows, measure};
use crate::ensure;
use crate::error::Result;
use std::collections::BTreeMap;
use std::fmt;

/// Reason to plan again.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    /// Half of the steps or more have other spans, or the same in another order.
    Sequence {
        /// Number of steps that differ.
        different: usize,
        /// Number of all steps.
        steps: usize,
        /// Resource on which the latest of them differs.
        resource: Resource,
        /// The expected span; none at the end.
        expected: Option<String>,
        /// The span found; none at the end.
        found: Option<String>,
    },
    /// A window is shorter or longer by more than its jitter and the tolerance.
    Window {
        /// The idle resource.
        resource: Resource,
        /// Start of the window.
        anchor: Anchor,
        /// Expected seconds.
        before: f64,
        /// Current seconds.
        now: f64,
    },
    /// All windows of a resource together are shorter or longer by more than their jitters and the tolerance.
    Total {
        /// The idle resource.
        resource: Resource,
        /// Expected seconds.
        before: f64,
        /// Current seconds.
        now: f64,
    },
}

impl fmt::Display for Change {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |name: &Option<String>| name.as_ref().map_or("the end".into(), |name| format!("{name:?}"));
        match self {
            Self::Sequence { different, steps, resource, expected, found } => {
                let (expected, found) = (name(expected), name(found));
                write!(
                    out,
                    "{different} of {steps} steps have other spans: {found} on {resource}, not {expected}"
                )
            }
            Self::Window { resource, anchor, before, now } => {
                write!(out, "the {resource} window after {anchor} is {now:.6} s, not {before:.6} s")
            }
            Self::Total { resource, before, now } => {
                write!(out, "all {resource} windows together are {now:.6} s, not {before:.6} s")
            }
        }
    }
}

/// Returns the change since the windows were found, if any.
///
/// A change counts if half of the steps or more have another order of spans. It also counts if a window, or all windows
/// of a resource together, became shorter or longer by more than its jitter plus `tolerance` × the step's seconds. The
/// largest such change is returned.
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) without steps, for invalid times, and for a `tolerance` below 0.
pub fn has_changed(windows: &Windows, steps: &[StepProfile], tolerance: f64) -> Result<Option<Change>> {
    check(steps)?;
    ensure!(!steps.is_empty(), "steps: expected at least 1, got none");
    ensure!(
        tolerance.is_finite() && tolerance >= 0.0,
        "tolerance: expected a finite part of a step, 0 or more, got {tolerance}"
    );
    let aligned: Vec<Aligned<'_>> = steps.iter().map(|step| Aligned::new(step, &windows.options)).collect();
    let (like, other): (Vec<_>, Vec<_>) =
        aligned.iter().partition(|step| step.sequence().iter().zip(&windows.sequence).all(|(a, b)| a == b));
    if 2 * other.len() >= steps.len() {
        return Ok(other.last().and_then(|step| difference(windows, step, other.len(), steps.len())));
    }
    let allowed = tolerance * windows.step_seconds;
    Ok(resized(&windows.windows, &measure(&like, &windows.options), allowed))
}

fn difference(windows: &Windows, step: &Aligned<'_>, different: usize, steps: usize) -> Option<Change> {
    let sequence = step.sequence();
    let at = |resource: Resource| {
        let (before, now) = (&windows.sequence[resource as usize], &sequence[resource as usize]);
        let place = (0..before.len().max(now.len()))
            .find(|&place| before.get(place).map(String::as_str) != now.get(place).copied())?;
        let found = now.get(place).map(|&name| name.to_owned());
        Some(Change::Sequence { different, steps, resource, expected: before.get(place).cloned(), found })
    };
    Resource::ALL.into_iter().find_map(at)
}

/// The change that exceeds its tolerance the most.
fn resized(before: &[Window], now: &[Window], allowed: f64) -> Option<Change> {
    let mut worst: Option<(f64, Change)> = None;
    let mut see = |beyond: f64, change: Change| {
        if beyond > 0.0 && worst.as_ref().is_none_or(|(most, _)| beyond > *most) {
            worst = Some((beyond, change));
        }
    };
    for resource in Resource::ALL {
        let (old, new) = (by_anchor(before, resource), by_anchor(now, resource));
        let in_order = before.iter().chain(now.iter().filter(|window| !old.contains_key(&window.anchor)));
        let anchors = in_order.filter(|window| window.resource == resource).map(|window| &window.anchor);
        for anchor in anchors {
            let [was, is] =
                [&old, &new].map(|windows| windows.get(anchor).map_or(0.0, |found| found.expected));
            let jitter = old.get(anchor).map_or(0.0, |found| found.jitter);
            let change = Change::Window { resource, anchor: anchor.clone(), before: was, now: is };
            see((is - was).abs() - jitter - allowed, change);
        }
        let [was, is] = [&old, &new].map(|windows| total(windows.values().map(|window| window.expected)));
        let jitter: f64 = old.values().map(|window| window.jitter).sum();
        see((is - was).abs() - jitter - allowed, Change::Total { resource, before: was, now: is });
    }
    worst.map(|(_, change)| change)
}

fn by_anchor(windows: &[Window], resource: Resource) -> BTreeMap<&Anchor, &Window> {
    let of = windows.iter().filter(|window| window.resource == resource);
    of.map(|window| (&window.anchor, window)).collect()
}
