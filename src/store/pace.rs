//! A limit on bytes per second, shared by all writers or all readers of a store.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tokio::time::{Instant, sleep_until};

/// Releases bytes one request after the other at a rate; without a rate, all at once.
#[derive(Debug)]
pub(super) struct Pace {
    bytes_per_second: Option<f64>,
    /// Time at which the next bytes may be sent.
    next: Mutex<Option<Instant>>,
}

impl Pace {
    pub(super) fn new(bytes_per_second: Option<f64>) -> Self {
        Self { bytes_per_second, next: Mutex::new(None) }
    }

    /// Waits until `bytes` may be sent.
    pub(super) async fn wait(&self, bytes: usize) {
        let Some(rate) = self.bytes_per_second else { return };
        let start = {
            let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
            let now = Instant::now();
            let start = next.map_or(now, |next| next.max(now));
            *next = Some(start + Duration::from_secs_f64(bytes as f64 / rate));
            start
        };
        sleep_until(start).await;
    }
}
