//! Idle windows: the gaps between busy spans of a resource, over several steps that differ slightly.

use super::span::{Resource, Span, StepProfile, check};
use crate::ensure;
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::fmt;

/// Options that determine how conservative the windows are.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct WindowOptions {
    /// Quantile of a window's length over the steps: 0 takes the shortest, 0.5 the median.
    pub quantile: f64,
    /// Usable share of that length, above 0 and up to 1; below 1 because steps differ.
    pub gamma: f64,
    /// Names of spans to ignore: those of the copies that are being planned.
    pub ignore: Vec<String>,
}

impl Default for WindowOptions {
    fn default() -> Self {
        Self { quantile: 0.1, gamma: 0.9, ignore: Vec::new() }
    }
}

impl WindowOptions {
    fn check(&self) -> Result<()> {
        ensure!(
            (0.0..=0.5).contains(&self.quantile),
            "quantile: expected a number from 0 to 0.5, got {}",
            self.quantile
        );
        ensure!(
            self.gamma > 0.0 && self.gamma <= 1.0,
            "gamma: expected a number above 0, up to 1, got {}",
            self.gamma
        );
        Ok(())
    }
}

/// Event that opens a window.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Anchor {
    /// The step's start.
    Start,
    /// The end of a span.
    After {
        /// The span's name.
        name: String,
        /// Index among the spans of that name on the resource in the step, from 0.
        occurrence: usize,
    },
}

impl fmt::Display for Anchor {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Start => write!(out, "the step's start"),
            Self::After { name, occurrence: 0 } => write!(out, "{name:?}"),
            Self::After { name, occurrence } => write!(out, "{name:?} ({})", occurrence + 1),
        }
    }
}

/// An idle time of a resource in every step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Window {
    /// The idle resource.
    pub resource: Resource,
    /// Event that opens it.
    pub anchor: Anchor,
    /// Seconds from the anchor to the opening: 0 unless a span that overlaps the anchor sometimes ends later.
    pub offset: f64,
    /// Opening, in seconds from the step's start: the median.
    pub start: f64,
    /// Usable seconds: `gamma` × `expected`.
    pub seconds: f64,
    /// Length in all but the shortest `quantile` of the steps.
    pub expected: f64,
    /// Difference between the lowest and the highest `quantile` of the length.
    pub jitter: f64,
}

impl Window {
    /// End of the usable time, in seconds from the step's start.
    pub fn end(&self) -> f64 {
        self.start + self.seconds
    }
}

/// Basis of the windows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Evidence {
    /// All steps had the same spans in the same order.
    Steady {
        /// Number of steps.
        steps: usize,
    },
    /// Most steps had the same spans; the others are left out.
    MostlySteady {
        /// Number of steps that count.
        steps: usize,
        /// Number of steps that are left out.
        left_out: usize,
    },
    /// No majority of the steps had the same spans in the same order, so there are no windows.
    Unsteady {
        /// Number of all steps.
        steps: usize,
        /// Size of the largest group of equal steps.
        largest: usize,
    },
}

impl fmt::Display for Evidence {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Steady { steps } => write!(out, "all {steps} steps have the same spans"),
            Self::MostlySteady { steps, left_out } => {
                write!(out, "{steps} steps have the same spans, {left_out} others are left out")
            }
            Self::Unsteady { steps, largest } => {
                write!(out, "no windows: of {steps} steps no more than {largest} have the same spans")
            }
        }
    }
}

/// The names of the spans on each resource by their start, in the order of [`Resource::ALL`].
pub(super) type Sequence = [Vec<String>; 3];

/// The idle windows of a rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Windows {
    /// Median duration of the steps.
    pub step_seconds: f64,
    /// By resource, then by start; those of a resource do not overlap.
    pub windows: Vec<Window>,
    /// Basis of these windows.
    pub evidence: Evidence,
    pub(super) options: WindowOptions,
    pub(super) sequence: Sequence,
}

impl Windows {
    /// Positions in `windows` and the windows of one resource, by start.
    pub fn of(&self, resource: Resource) -> impl Iterator<Item = (usize, &Window)> {
        self.windows.iter().enumerate().filter(move |(_, window)| window.resource == resource)
    }

    /// Returns the windows as JSON, for another rank or a file.
    pub fn to_json(&self) -> String {
        serde_json::json!(self).to_string()
    }

    /// Reads the JSON of [`to_json`](Self::to_json).
    ///
    /// # Errors
    /// [`Error::Invalid`] for other text, or windows out of order.
    pub fn from_json(text: &str) -> Result<Self> {
        let found: Self = serde_json::from_str(text)
            .map_err(|error| Error::invalid(format!("text: expected the JSON of windows: {error}")))?;
        found.options.check().map_err(|error| Error::invalid(format!("text: {error}")))?;
        ensure!(
            found.step_seconds.is_finite() && found.step_seconds > 0.0,
            "text: step_seconds: expected a finite number above 0, got {}",
            found.step_seconds
        );
        for (number, window) in found.windows.iter().enumerate() {
            let Window { offset, start, seconds, expected, jitter, .. } = *window;
            ensure!(
                [offset, start, seconds, expected, jitter]
                    .iter()
                    .all(|time| time.is_finite() && *time >= 0.0),
                "text: window {number}: expected finite numbers, 0 or more, got {window:?}"
            );
        }
        for (number, pair) in found.windows.windows(2).enumerate() {
            let fine = match pair[0].resource.cmp(&pair[1].resource) {
                std::cmp::Ordering::Equal => pair[0].end() <= pair[1].start,
                order => order.is_lt(),
            };
            ensure!(fine, "text: windows {number} and {} overlap or are out of order", number + 1);
        }
        Ok(found)
    }
}

/// Finds the windows of a profile.
///
/// A window lies between the end of the busy spans so far (they may overlap and nest) and the start of the next span on
/// the same resource. Steps are aligned by the order of their spans. Steps whose order differs from that of the largest
/// group are left out; without a majority there are no windows.
///
/// ```
/// use evermoe::schedule::{Anchor, Kind, Resource, Span, StepProfile, WindowOptions, find_windows};
/// let send = |start, seconds| Span {
///     name: "send".into(), kind: Kind::Send, resource: Resource::Network, start, seconds, bytes: 64, peers: vec![1],
/// };
/// // Idle for 3 or 4 seconds after the first send, for 2 after the second.
/// let steps = [3.0, 4.0].map(|idle| StepProfile { seconds: idle + 4.0, spans: vec![send(0.0, 1.0), send(1.0 + idle, 1.0)] });
/// let found = find_windows(&steps, &WindowOptions { quantile: 0.0, gamma: 0.5, ..Default::default() })?;
/// let network: Vec<_> = found.of(Resource::Network).map(|(_, window)| window).collect();
/// assert_eq!(network[0].anchor, Anchor::After { name: "send".into(), occurrence: 0 });
/// assert_eq!((network[0].start, network[0].expected, network[0].jitter, network[0].seconds), (1.0, 3.0, 1.0, 1.5));
/// assert_eq!((network[1].expected, network[1].jitter), (2.0, 0.0));
/// # Ok::<(), evermoe::Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`] without steps, and for invalid times or options.
pub fn find_windows(steps: &[StepProfile], options: &WindowOptions) -> Result<Windows> {
    options.check()?;
    check(steps)?;
    ensure!(!steps.is_empty(), "steps: expected at least 1, better 20, got none");
    let aligned: Vec<Aligned<'_>> = steps.iter().map(|step| Aligned::new(step, options)).collect();
    let (like, sequence) = majority(&aligned);
    let [all, equal] = [steps.len(), like.len()];
    let step_seconds = middle(like.iter().map(|step| step.seconds).collect());
    let steady = 2 * equal > all;
    let evidence = match all - equal {
        0 => Evidence::Steady { steps: all },
        left_out if steady => Evidence::MostlySteady { steps: equal, left_out },
        _ => Evidence::Unsteady { steps: all, largest: equal },
    };
    let windows = if steady { measure(&like, options) } else { Vec::new() };
    Ok(Windows { step_seconds, windows, evidence, options: options.clone(), sequence })
}

/// A step with the spans of each resource by start.
pub(super) struct Aligned<'a> {
    seconds: f64,
    spans: [Vec<&'a Span>; 3],
}

impl<'a> Aligned<'a> {
    pub(super) fn new(step: &'a StepProfile, options: &WindowOptions) -> Self {
        let mut spans = [const { Vec::new() }; 3];
        for span in step.spans.iter().filter(|span| !options.ignore.contains(&span.name)) {
            spans[span.resource as usize].push(span);
        }
        for spans in &mut spans {
            // Of nested spans with the same start the outer comes first.
            spans.sort_by(|a: &&Span, b: &&Span| {
                a.start
                    .total_cmp(&b.start)
                    .then(b.seconds.total_cmp(&a.seconds))
                    .then_with(|| a.name.cmp(&b.name))
            });
        }
        Self { seconds: step.seconds, spans }
    }

    pub(super) fn sequence(&self) -> [Vec<&'a str>; 3] {
        [0, 1, 2].map(|resource| self.spans[resource].iter().map(|span| span.name.as_str()).collect())
    }
}

/// The largest group of steps with the same sequence; of equally large ones that of the latest step.
fn majority<'a, 'b>(steps: &'b [Aligned<'a>]) -> (Vec<&'b Aligned<'a>>, Sequence) {
    let sequences: Vec<_> = steps.iter().map(Aligned::sequence).collect();
    let mut groups: HashMap<&[Vec<&str>; 3], (usize, usize)> = HashMap::new();
    for (number, sequence) in sequences.iter().enumerate() {
        let (count, last) = groups.entry(sequence).or_default();
        *count += 1;
        *last = number;
    }
    let largest = groups.values().max().map_or(0, |(_, last)| *last);
    let like = steps.iter().zip(&sequences).filter(|(_, sequence)| **sequence == sequences[largest]);
    let names = |names: &Vec<&str>| names.iter().map(|&name| name.to_owned()).collect();
    let [compute, network, host_link] = &sequences[largest];
    (like.map(|(step, _)| step).collect(), [names(compute), names(network), names(host_link)])
}

/// The windows of steps with the same sequence.
pub(super) fn measure(steps: &[&Aligned<'_>], options: &WindowOptions) -> Vec<Window> {
    let mut found = Vec::new();
    for resource in Resource::ALL {
        let first = found.len();
        let spans: Vec<&[&Span]> =
            steps.iter().map(|step| step.spans[resource as usize].as_slice()).collect();
        let gaps = gaps(steps, &spans);
        let mut times: HashMap<&str, usize> = HashMap::new();
        // occurrence[i]: index of span i among those of its name.
        let occurrence: Vec<usize> = spans[0]
            .iter()
            .map(|span| {
                let time = times.entry(&span.name).or_default();
                *time += 1;
                *time - 1
            })
            .collect();
        for gap in gaps {
            let anchor = match gap.anchor {
                0 => Anchor::Start,
                next => {
                    Anchor::After { name: spans[0][next - 1].name.clone(), occurrence: occurrence[next - 1] }
                }
            };
            found.extend(gap.window(resource, anchor, options));
        }
        for next in first + 1..found.len() {
            // Median starts and low quantiles of lengths come from different steps, so they may overlap.
            let close = found[next].start;
            let before: &mut Window = &mut found[next - 1];
            if before.end() > close {
                before.seconds = (close - before.start).max(0.0);
                while before.seconds > 0.0 && before.end() > close {
                    before.seconds = before.seconds.next_down();
                }
            }
        }
    }
    found.retain(|window| window.seconds > 0.0);
    found
}

/// The gap before one span, or before the step's end, in each step.
struct Gap {
    /// 0 for the step's start, or 1 + the position of the span that most often ends last.
    anchor: usize,
    offset: f64,
    starts: Vec<f64>,
    lengths: Vec<f64>,
}

impl Gap {
    fn window(mut self, resource: Resource, anchor: Anchor, options: &WindowOptions) -> Option<Window> {
        self.lengths.sort_by(f64::total_cmp);
        let last = self.lengths.len() - 1;
        let below = (options.quantile * last as f64).floor() as usize;
        let expected = self.lengths[below];
        let window = Window {
            resource,
            anchor,
            offset: self.offset,
            start: middle(self.starts),
            seconds: options.gamma * expected,
            expected,
            jitter: self.lengths[last - below] - expected,
        };
        (expected > 0.0).then_some(window)
    }
}

fn gaps(steps: &[&Aligned<'_>], spans: &[&[&Span]]) -> Vec<Gap> {
    let count = spans[0].len();
    // ends[step]: ends of the step's start and of each span. A span that continues from the previous step ends after
    // the start.
    let ends: Vec<Vec<f64>> = steps
        .iter()
        .zip(spans)
        .map(|(step, spans)| {
            [0.0].into_iter().chain(spans.iter().map(|span| span.end().min(step.seconds))).collect()
        })
        .collect();
    let over: Vec<f64> = steps
        .iter()
        .zip(spans)
        .map(|(step, spans)| spans.iter().map(|span| span.end() - step.seconds).fold(0.0, f64::max))
        .collect();
    let mut latest = vec![0; steps.len()];
    (0..=count)
        .map(|next| {
            if next > 0 {
                for (latest, ends) in latest.iter_mut().zip(&ends) {
                    *latest = if ends[next] >= ends[*latest] { next } else { *latest };
                }
            }
            let anchor = most_frequent(&latest);
            let busy = |step: usize| ends[step][latest[step]].max(over[step]);
            let offset = (0..steps.len()).map(|step| busy(step) - ends[step][anchor]).fold(0.0, f64::max);
            let close = |step: usize| spans[step].get(next).map_or(steps[step].seconds, |span| span.start);
            let starts: Vec<f64> = (0..steps.len()).map(|step| ends[step][anchor] + offset).collect();
            let lengths = (0..steps.len()).map(|step| (close(step) - starts[step]).max(0.0)).collect();
            Gap { anchor, offset, starts, lengths }
        })
        .collect()
}

/// The most frequent value; the largest of equally frequent ones.
fn most_frequent(values: &[usize]) -> usize {
    let mut sorted = values.to_vec();
    sorted.sort_unstable();
    let runs = sorted.chunk_by(|a, b| a == b).map(|run| (run.len(), run[0]));
    runs.max().map_or(0, |(_, value)| value)
}

/// The lower median.
fn middle(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[(values.len() - 1) / 2]
}
