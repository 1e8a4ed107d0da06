//! Threads that hash arrived units: a GPU delivers bytes several times as fast as one thread reads them.

use crate::background::{lower_priority, processors};
use crate::error::{Error, Result};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use xxhash_rust::xxh3::Xxh3Default;

/// Maximum number of threads: together they read memory about as fast as a GPU's link fills it.
const MAX_THREADS: usize = 8;
/// Minimum bytes of a capture per thread: fewer are read before a thread has started.
const BYTES_PER_THREAD: usize = 32 << 20;
/// Bytes that a thread hashes before it checks whether it should stop.
const SLICE_BYTES: usize = 1 << 20;

/// Number of threads for a capture of `bytes` whose largest unit has `largest`: those that have enough work, at most
/// half of this process's processors.
pub(super) fn num_threads(bytes: usize, largest: usize) -> usize {
    let useful = (bytes / BYTES_PER_THREAD).min(bytes / largest.max(1));
    (processors() / 2).min(useful).min(MAX_THREADS)
}

/// A unit whose bytes have all arrived.
struct Job {
    unit: usize,
    address: usize,
    bytes: usize,
}

/// Threads that hash the units of one capture. Once it is dropped, none of them reads any more.
pub(super) struct Hashing {
    /// None once all units were added.
    jobs: Option<Sender<Job>>,
    found: Receiver<(usize, u64)>,
    waiting: usize,
    is_over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Hashing {
    /// Starts threads for a capture of `bytes` whose largest unit has `largest`. None if one thread is enough or the
    /// system cannot start more; half of the processors are left to training.
    pub(super) fn begin(bytes: usize, largest: usize) -> Option<Self> {
        Self::with_threads(num_threads(bytes, largest))
    }

    /// Starts `count` threads, or none for fewer than two.
    pub(super) fn with_threads(count: usize) -> Option<Self> {
        if count < 2 {
            return None;
        }
        let (jobs, waiting) = channel();
        let (report, found) = channel();
        let (waiting, is_over) = (Arc::new(Mutex::new(waiting)), Arc::new(AtomicBool::new(false)));
        let threads = (0..count).map_while(|_| {
            let (waiting, report, is_over) = (waiting.clone(), report.clone(), is_over.clone());
            let builder = thread::Builder::new().name("evermoe-hash".into());
            builder.spawn(move || hash_all(&waiting, &report, &is_over)).ok()
        });
        let threads: Vec<_> = threads.collect();
        (!threads.is_empty()).then_some(Self { jobs: Some(jobs), found, waiting: 0, is_over, threads })
    }

    /// Adds a unit to be hashed.
    ///
    /// # Safety
    /// Its bytes must stay at this address until it is hashed or this is dropped, and no other code may write them.
    pub(super) unsafe fn add(&mut self, unit: usize, address: usize, bytes: usize) {
        self.waiting += 1;
        if let Some(jobs) = &self.jobs {
            // Without a thread to take it, `finish` finds that its digest is missing.
            let _taken = jobs.send(Job { unit, address, bytes });
        }
    }

    /// Waits for all units and stores their digests.
    ///
    /// # Errors
    /// [`Error::Invalid`] if a thread has ended early.
    pub(super) fn finish(&mut self, digests: &mut [u64]) -> Result<()> {
        self.jobs = None;
        while self.waiting > 0 {
            let Ok((unit, digest)) = self.found.recv() else {
                return Err(Error::invalid(format!("digests: {} units were not hashed", self.waiting)));
            };
            digests[unit] = digest;
            self.waiting -= 1;
        }
        Ok(())
    }
}

impl Drop for Hashing {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        self.jobs = None;
        for thread in self.threads.drain(..) {
            // A panicked thread has printed its message; `finish` reports the missing digest.
            let _ended = thread.join();
        }
    }
}

fn hash_all(jobs: &Mutex<Receiver<Job>>, report: &Sender<(usize, u64)>, is_over: &AtomicBool) {
    lower_priority();
    loop {
        let job = jobs.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(Job { unit, address, bytes }) = job else { return };
        let mut hash = Xxh3Default::new();
        for start in (0..bytes).step_by(SLICE_BYTES) {
            if is_over.load(Ordering::Relaxed) {
                return;
            }
            let size = SLICE_BYTES.min(bytes - start);
            // SAFETY: by the promise of `add`; `drop` waits for the threads.
            hash.update(unsafe {
                std::slice::from_raw_parts(std::ptr::with_exposed_provenance(address + start), size)
            });
        }
        if report.send((unit, hash.digest())).is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::digest;

    #[test]
    fn units_have_the_digests_of_their_bytes_whoever_hashes_them() {
        let bytes: Vec<u8> =
            (0..6_000_000_u32).map(|value| (value.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        let address = bytes.as_ptr().expose_provenance();
        let units: Vec<_> = (0..40).map(|unit| (unit * 100_000, unit * 30_011)).collect();
        let mut hashing = Hashing::with_threads(3).unwrap();
        for (unit, &(start, size)) in units.iter().enumerate() {
            // SAFETY: `bytes` lives longer.
            unsafe { hashing.add(unit, address + start, size) };
        }
        let mut digests = vec![0; units.len()];
        hashing.finish(&mut digests).unwrap();
        let expected = units.iter().map(|&(start, size)| digest(&bytes[start..start + size]));
        assert_eq!(digests, expected.collect::<Vec<_>>());
    }

    #[test]
    fn dropping_it_ends_the_threads_before_all_is_hashed() {
        let bytes = vec![7_u8; 64 << 20];
        let mut hashing = Hashing::with_threads(2).unwrap();
        for unit in 0..1000 {
            // SAFETY: `bytes` lives longer.
            unsafe { hashing.add(unit, bytes.as_ptr().expose_provenance(), bytes.len()) };
        }
        drop(hashing); // hashing all of it would take a minute
    }

    #[test]
    fn a_unit_that_nobody_hashes_is_an_error() {
        let mut hashing = Hashing::with_threads(2).unwrap();
        hashing.is_over.store(true, Ordering::Relaxed);
        let byte = [1_u8];
        for unit in 0..3 {
            // SAFETY: `byte` lives longer.
            unsafe { hashing.add(unit, byte.as_ptr().expose_provenance(), 1) };
        }
        let error = hashing.finish(&mut [0; 3]).unwrap_err();
        assert_eq!(error.to_string(), "digests: 3 units were not hashed");
    }

    #[test]
    fn small_captures_and_those_of_one_unit_need_no_threads() {
        assert!(Hashing::begin(BYTES_PER_THREAD, 1).is_none());
        assert!(Hashing::begin(usize::MAX, usize::MAX).is_none());
    }
}
