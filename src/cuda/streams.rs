//! Streams and events of the copier, and their order with torch's.

use super::device::{Device, Launcher, RelaxedCapture, driver};
use crate::error::Result;
use cudarc::driver::{DriverError, result, sys};
use std::ffi::c_void;
use std::sync::Arc;

/// A stream that runs concurrently with torch's, without precedence over it.
#[derive(Debug)]
pub(super) struct CopyStream {
    device: Arc<Device>,
    stream: sys::CUstream,
    /// Recorded at the end of the queue when a thread waits.
    end: Event,
}

// SAFETY: the driver's calls on a stream may come from any thread.
unsafe impl Send for CopyStream {}
// SAFETY: as above.
unsafe impl Sync for CopyStream {}

impl CopyStream {
    /// Creates a stream of the lowest priority that does not wait for the default stream. That is priority 0, the same
    /// as torch's: CUDA has none that is lower.
    pub(super) fn new(device: &Arc<Device>) -> Result<Self> {
        let _current = device.make_current()?;
        let (lowest, _) = driver(result::stream::get_priority_range(), "cuCtxGetStreamPriorityRange")?;
        let kind = result::stream::StreamKind::NonBlocking;
        let stream =
            driver(result::stream::create_with_priority(kind, lowest), "cuStreamCreateWithPriority")?;
        match Event::new(device) {
            Ok(end) => Ok(Self { device: device.clone(), stream, end }),
            Err(error) => {
                // SAFETY: just created, unused, and destroyed once.
                let _ = unsafe { result::stream::destroy(stream) };
                Err(error)
            }
        }
    }

    /// Returns a launcher on this stream, which must not outlive it.
    pub(super) fn launcher(&self) -> Launcher {
        // SAFETY: a live stream of this device; the callers own the stream and use the launcher immediately.
        unsafe { Launcher::of(self.device.clone(), self.stream.cast()) }
    }

    pub(super) fn raw(&self) -> *mut c_void {
        self.stream.cast()
    }

    /// Blocks the calling thread until the queued work is over, without spinning.
    pub(super) fn wait(&self) -> Result<()> {
        // SAFETY: a live stream of this device.
        unsafe { self.end.record(self.stream.cast())? };
        self.end.wait()
    }
}

impl Drop for CopyStream {
    /// Waits for queued work: it uses memory that is freed afterwards.
    fn drop(&mut self) {
        let _ = self.wait();
        if let Ok(_current) = self.device.make_current() {
            // SAFETY: owned, destroyed once. A driver that has shut down refuses, which is harmless.
            let _ = unsafe { result::stream::destroy(self.stream) };
        }
    }
}

/// A point in a stream. Before it is first recorded it counts as passed.
#[derive(Debug)]
pub(super) struct Event {
    device: Arc<Device>,
    event: sys::CUevent,
}

// SAFETY: the driver's calls on an event may come from any thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// Creates an event whose waits do not spin.
    pub(super) fn new(device: &Arc<Device>) -> Result<Self> {
        const FLAGS: u32 = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32
            | sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC as u32;
        let _current = device.make_current()?;
        let mut event = std::ptr::null_mut();
        // SAFETY: writes the event's handle.
        driver(unsafe { sys::cuEventCreate(&raw mut event, FLAGS) }.result(), "cuEventCreate")?;
        Ok(Self { device: device.clone(), event })
    }

    /// Moves the event to the end of a stream's queue.
    ///
    /// # Safety
    /// `stream` must be a live stream of this device, or null for the default stream.
    pub(super) unsafe fn record(&self, stream: *mut c_void) -> Result<()> {
        let _current = self.device.make_current()?;
        // SAFETY: a live event, and the caller's promise.
        driver(unsafe { result::event::record(self.event, stream.cast()) }, "cuEventRecord")
    }

    /// Makes later work of a stream wait for the last recorded position of the event. The host does not wait.
    ///
    /// # Safety
    /// As [`Event::record`].
    pub(super) unsafe fn before(&self, stream: *mut c_void) -> Result<()> {
        let _current = self.device.make_current()?;
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: a live event, and the caller's promise.
        driver(unsafe { result::stream::wait_event(stream.cast(), self.event, flags) }, "cuStreamWaitEvent")
    }

    pub(super) fn is_done(&self) -> Result<bool> {
        let _current = self.device.make_current()?;
        let _relaxed = RelaxedCapture::new()?;
        // SAFETY: a live event.
        match unsafe { result::event::query(self.event) } {
            Ok(()) => Ok(true),
            Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            Err(error) => driver(Err(error), "cuEventQuery"),
        }
    }

    /// Blocks the calling thread until the event has passed.
    pub(super) fn wait(&self) -> Result<()> {
        let _current = self.device.make_current()?;
        let _relaxed = RelaxedCapture::new()?;
        // SAFETY: a live event.
        driver(unsafe { result::event::synchronize(self.event) }, "cuEventSynchronize")
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(_current) = self.device.make_current() {
            // SAFETY: owned, destroyed once; the driver keeps it until all waits for it are over.
            let _ = unsafe { result::event::destroy(self.event) };
        }
    }
}
