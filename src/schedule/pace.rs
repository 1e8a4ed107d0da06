//! Pace of chunks on one link through a bounded number of sub-buffers.
//!
//! A sub-buffer is free again when its transfer and then its drain (d seconds) are over. So with b sub-buffers a chunk
//! may start when the chunk b positions earlier is drained. Two paces guarantee that without a look back at other
//! chunks:
//!
//! ```text
//! pipelined, b ≥ 2   a chunk takes max(f(s), d(most) ÷ (b − 1)) seconds: the b − 1 that follow one outlast its drain
//! serial             a chunk takes f(s) + d(s) seconds: one sub-buffer is enough
//! ```
//!
//! With both, the bytes that fit grow with the seconds, from every position on: see `stream`.

use super::request::{Link, Memory};

/// Tolerance for sums of seconds, which are rounded: an excess below a picosecond fits.
pub(super) const ROUNDING: f64 = 1e-12;

/// Returns the sum; 0 for no terms, where `sum` returns −0.
pub(super) fn total(seconds: impl Iterator<Item = f64>) -> f64 {
    seconds.fold(0.0, |sum, next| sum + next)
}

/// Size of chunks, and the minimum time between the starts of two.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    link: Link,
    /// Maximum bytes of a chunk.
    pub(super) most: u64,
    /// Minimum seconds of a chunk.
    least: f64,
    /// Link by which each chunk is drained before the next starts, if any.
    serial: Option<Link>,
}

impl Pace {
    /// Full sub-buffers, pipelined if there are two of them, as in the papers.
    pub(super) fn full(link: Link, memory: Memory) -> Self {
        Self::pipelined(link, memory, memory.bytes / memory.buffers)
    }

    fn pipelined(link: Link, memory: Memory, most: u64) -> Self {
        let Some(drain) = memory.drain else {
            return Self { link, most, least: 0.0, serial: None };
        };
        if memory.buffers == 1 {
            return Self { link, most, least: 0.0, serial: Some(drain) };
        }
        let least = drain.seconds(most) / (memory.buffers - 1) as f64;
        Self { link, most, least, serial: None }
    }

    /// Additional paces for `auto`: if drains count, small chunks and a serial pace use windows that are too short for
    /// the pipelined pace of full chunks.
    pub(super) fn smaller(link: Link, memory: Memory) -> Vec<Self> {
        if memory.drain.is_none() || memory.buffers == 1 {
            return Vec::new();
        }
        let full = memory.bytes / memory.buffers;
        let sizes = (1..=4).map(|halvings| full >> halvings).filter(|&most| most > 0);
        let mut paces: Vec<Self> = sizes.map(|most| Self::pipelined(link, memory, most)).collect();
        paces.push(Self { link, most: full, least: 0.0, serial: memory.drain });
        paces
    }

    /// Seconds of the transfer alone.
    pub(super) fn transfer(&self, bytes: u64) -> f64 {
        self.link.seconds(bytes)
    }

    /// Seconds that one chunk takes from the link.
    pub(super) fn cost(&self, bytes: u64) -> f64 {
        let drain = self.serial.map_or(0.0, |drain| drain.seconds(bytes));
        (self.link.seconds(bytes) + drain).max(self.least)
    }

    /// Seconds for `bytes` of one unit, cut into chunks.
    pub(super) fn seconds(&self, bytes: u64) -> f64 {
        let tail = bytes % self.most;
        let full = (bytes / self.most) as f64 * self.cost(self.most);
        if tail > 0 { full + self.cost(tail) } else { full }
    }

    /// Number of chunks of `bytes`.
    pub(super) fn chunks(&self, bytes: u64) -> u64 {
        bytes.div_ceil(self.most)
    }

    /// Maximum number of the `rest` bytes of one unit that can be sent in `seconds`.
    pub(super) fn fit(&self, rest: u64, seconds: f64) -> u64 {
        let seconds = seconds + ROUNDING;
        let mut full = ((seconds / self.cost(self.most)) as u64).min(rest / self.most);
        // The division is rounded, too.
        while full > 0 && full as f64 * self.cost(self.most) > seconds {
            full -= 1;
        }
        let left = seconds - full as f64 * self.cost(self.most);
        full * self.most + self.cut((rest - full * self.most).min(self.most), left)
    }

    /// The largest single chunk, up to `most` bytes.
    fn cut(&self, most: u64, seconds: f64) -> u64 {
        let (alpha, second) = match self.serial {
            None => (self.link.alpha, 1.0 / self.link.beta),
            Some(drain) => (self.link.alpha + drain.alpha, 1.0 / self.link.beta + 1.0 / drain.beta),
        };
        let mut bytes = (((seconds - alpha) / second) as u64).min(most);
        while bytes > 0 && self.cost(bytes) > seconds {
            bytes -= 1;
        }
        bytes
    }
}
