//! Interval between copies if the idle windows of a step are too short for a version: Gemini's wasted time.

use super::plan::Reason;
use super::request::Link;
use crate::error::{Error, Result};

/// Maximum number of steps between two versions.
const MAX_STEPS: usize = 4096;

/// Costs of copying at some interval; times are in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Period {
    /// Steps between two versions, over whose windows one version is spread.
    pub steps: usize,
    /// Time that a version delays training, beyond the windows of its steps.
    pub delay: f64,
    /// Training time that a failure wastes on average: Gemini's Eq. 1, the time of a checkpoint, half of the time
    /// between two, and the time to retrieve one.
    pub wasted: f64,
}

/// Returns the interval of 1 to `most` steps between two versions that loses the least time to delays and failures
/// together.
///
/// With n steps between versions, a version may use the windows of n steps. So it takes n steps and delays training by
/// the bytes that do not fit into them. Per step that loses `delay / n + failures · wasted`, where `wasted = n · step +
/// n · step / 2 + retrieve`. Of two equal intervals the shorter one is taken. The paper's constraint holds for each n:
/// the next version begins when the previous one is complete.
///
/// A step takes 1 s and has 0.3 s of windows, a version takes 1 s to send, and there is one failure in 10,000 steps:
/// ```
/// use evermoe::schedule::copy_period;
/// let period = copy_period(1.0, 0.3, 1.0, 1.0, 1e-4, 64)?;
/// assert_eq!((period.steps, period.delay, period.wasted), (4, 0.0, 7.0));
/// # Ok::<(), evermoe::Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`]: a time is negative, infinite or no number, a step takes none, or `most` is not 1 to 4096.
pub fn copy_period(
    step: f64,
    windows: f64,
    copy: f64,
    retrieve: f64,
    failures: f64,
    most: usize,
) -> Result<Period> {
    let times = [
        ("step_seconds", step),
        ("window_seconds", windows),
        ("copy_seconds", copy),
        ("retrieve_seconds", retrieve),
        ("failures_per_step", failures),
    ];
    for (name, value) in times {
        if !value.is_finite() || value < 0.0 {
            return Err(Error::invalid(format!("{name}: expected a number >= 0, got {value}")));
        }
    }
    if step == 0.0 || !(1..=MAX_STEPS).contains(&most) {
        return Err(Error::invalid(format!(
            "expected step_seconds > 0 and most of 1 to {MAX_STEPS}, got {step} and {most}"
        )));
    }
    let cost = |period: &Period| period.delay / period.steps as f64 + failures * period.wasted;
    let mut best = at(1, step, windows, copy, retrieve);
    for steps in 2..=most {
        if best.delay == 0.0 {
            break; // a longer interval wastes more and saves nothing
        }
        let next = at(steps, step, windows, copy, retrieve);
        if cost(&next) < cost(&best) {
            best = next;
        }
        if next.delay == 0.0 {
            break;
        }
    }
    Ok(best)
}

impl Reason {
    /// Returns the interval of versions that loses the least time; none if the plan delays nothing.
    ///
    /// Windows that are too short for a version are used as far as its messages fit into them. A step of zero length
    /// gives no information.
    ///
    /// # Errors
    /// As [`copy_period`].
    pub fn pace(&self, step: f64, link: Link, failures: f64, most: usize) -> Result<Option<Period>> {
        if self.delay_seconds == 0.0 || step == 0.0 {
            return Ok(None);
        }
        let steps = self.steps_per_version as f64;
        let (windows, copy) = (self.used_seconds / steps, self.used_seconds + self.delay_seconds * steps);
        copy_period(step, windows, copy, self.bytes as f64 / link.beta, failures, most).map(Some)
    }
}

fn at(steps: usize, step: f64, windows: f64, copy: f64, retrieve: f64) -> Period {
    let between = steps as f64 * step;
    Period {
        steps,
        delay: (copy - steps as f64 * windows).max(0.0),
        wasted: between + between / 2.0 + retrieve,
    }
}
