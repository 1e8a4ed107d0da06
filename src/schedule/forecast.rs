//! What plans of a job assume that has no profile yet: windows of a synthetic step, and memory for chunks.

use super::request::Memory;
use super::span::{Kind, Resource, Span, StepProfile};
use super::windows::{WindowOptions, Windows, find_windows};
use crate::error::Result;

/// Windows of a synthetic step, at most.
const MAX_WINDOWS: usize = 256;
/// Factor by which a collective is prolonged, so that rounding leaves no gap behind it.
const OVERLAP: f64 = 1.0 + 1e-9;
/// Buffers through which chunks pass, and bytes of each.
const BUFFERS: u64 = 4;
const BUFFER_BYTES: u64 = 32 << 20;
/// Chunks of a node, at most: larger ones take the place of more.
const MAX_CHUNKS: u64 = 1 << 12;

/// The windows of a step in which computing and collectives take turns, as in the forward and backward pass of each layer.
///
/// `network_idle` is the part of the step in which the network is idle.
///
/// ```
/// let windows = evermoe::schedule::synthetic_windows(2, 4.0, 0.25)?;
/// let network = windows.windows.iter().filter(|window| window.resource == evermoe::schedule::Resource::Network);
/// let seconds: f64 = network.map(|window| window.seconds).sum();
/// assert!((seconds - 1.0).abs() < 1e-6);
/// # Ok::<(), evermoe::Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) for a step that takes no time, or times that are none.
pub fn synthetic_windows(layers: usize, step_seconds: f64, network_idle: f64) -> Result<Windows> {
    let count = (2 * layers).clamp(1, MAX_WINDOWS);
    let each = step_seconds / count as f64;
    let idle = network_idle * each;
    let busy = (each - idle) * OVERLAP;
    let mut spans = Vec::new();
    let mut add = |name: &str, kind, resource, start, seconds: f64| {
        if seconds > 0.0 {
            spans.push(Span {
                name: name.into(),
                kind,
                resource,
                start,
                seconds,
                bytes: 0,
                peers: Vec::new(),
            });
        }
    };
    for number in 0..count {
        let start = number as f64 * each;
        add("compute", Kind::Forward, Resource::Compute, start, idle);
        add("all-to-all", Kind::Collective, Resource::Network, start + idle, busy);
    }
    let options = WindowOptions { gamma: 1.0, ..WindowOptions::default() };
    find_windows(&[StepProfile { seconds: step_seconds, spans }], &options)
}

/// The memory through which the chunks of a node pass that sends and receives `bytes` in a step.
pub fn forecast_memory(bytes: u64) -> Memory {
    let buffer = BUFFER_BYTES.max(bytes.div_ceil(MAX_CHUNKS));
    Memory { bytes: BUFFERS * buffer, buffers: BUFFERS, drain: None }
}
