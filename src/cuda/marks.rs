//! Points in streams that the device reports in the host's memory.
//!
//! A question to the driver may block: a launch on a full stream holds up other calls of the process until a work has run.
//! So the stream itself writes a number to page-locked memory, which the host reads like any other.

use super::device::{Device, driver};
use super::pinned::PinnedBuffer;
use crate::error::Result;
use cudarc::driver::{result, sys};
use std::ffi::c_void;
use std::slice;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Marks of one user whose numbers the memory holds: streams may pass as many in another order.
const RING: usize = 64;
/// Users that have memory of their own. A later one gets that of the first, whose streams have passed its marks long before.
const USERS: usize = 64;

/// Page-locked words of all users: never given back, as a stream may still write to them.
static WORDS: Mutex<Option<&[AtomicU32]>> = Mutex::new(None);
/// Users so far.
static COUNT: AtomicUsize = AtomicUsize::new(0);
/// Number of the latest mark of this process.
static NUMBER: AtomicU32 = AtomicU32::new(0);

/// Marks that one user puts into streams of a device.
#[derive(Debug)]
pub struct Marks {
    device: Arc<Device>,
    words: &'static [AtomicU32],
    next: AtomicUsize,
}

/// A point in a stream.
#[derive(Debug, Clone, Copy)]
pub struct Mark {
    slot: usize,
    number: u32,
}

impl Marks {
    /// Creates marks for the streams of a device. The first call of a process page-locks memory, for which the driver may wait
    /// for the device.
    ///
    /// # Errors
    /// If the device cannot be opened, or has no page-locked memory left.
    pub fn new(device: usize) -> Result<Self> {
        let all = words(device)?;
        let first = COUNT.fetch_add(1, Ordering::Relaxed) % USERS * RING;
        let words = &all[first..first + RING];
        Ok(Self { device: Device::get(device)?, words, next: AtomicUsize::new(0) })
    }

    /// Puts a mark at the end of a stream; None if the stream is being captured into a graph, which would repeat the mark.
    ///
    /// # Safety
    /// `stream` is a live stream of the device, or null for the default stream.
    ///
    /// # Errors
    /// If the driver refuses.
    pub unsafe fn put(&self, stream: *mut c_void) -> Result<Option<Mark>> {
        let _current = self.device.make_current()?;
        // SAFETY: a live stream.
        let capture = driver(unsafe { result::stream::is_capturing(stream.cast()) }, "cuStreamIsCapturing")?;
        if capture != sys::CUstreamCaptureStatus_enum::CU_STREAM_CAPTURE_STATUS_NONE {
            return Ok(None);
        }
        let number = NUMBER.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        let slot = self.next.fetch_add(1, Ordering::Relaxed) % RING;
        let word = self.words[slot].as_ptr() as sys::CUdeviceptr; // page-locked memory has the same address on the device
        let flags = sys::CUstreamWriteValue_flags::CU_STREAM_WRITE_VALUE_DEFAULT as u32;
        // SAFETY: a live stream, and a word that is never freed.
        let status = unsafe { sys::cuStreamWriteValue32_v2(stream.cast(), word, number, flags) };
        driver(status.result(), "cuStreamWriteValue32")?;
        Ok(Some(Mark { slot, number }))
    }

    /// Whether the stream has passed a mark that is one of the latest 64. It calls no driver, and does not wait.
    pub fn is_passed(&self, mark: Mark) -> bool {
        self.words[mark.slot].load(Ordering::Acquire) == mark.number
    }
}

/// Returns the words of all users.
fn words(device: usize) -> Result<&'static [AtomicU32]> {
    let mut words = WORDS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(words) = *words {
        return Ok(words);
    }
    let memory = PinnedBuffer::new(device, USERS * RING * size_of::<AtomicU32>())?;
    let start = Box::leak(Box::new(memory)).as_ptr().cast::<AtomicU32>();
    // SAFETY: zeroed memory of this size that is never freed; the device writes complete words, which are read as atomics.
    let found: &'static [AtomicU32] = unsafe { slice::from_raw_parts(start, USERS * RING) };
    *words = Some(found);
    Ok(found)
}
