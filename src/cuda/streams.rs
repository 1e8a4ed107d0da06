//! Streams and events of our own, and their order with torch's.

use super::device::{BesideCaptures, Device, Launcher, driver};
use crate::error::Result;
use cudarc::driver::{DriverError, result, sys};
use std::ffi::c_void;
use std::sync::Arc;

/// A stream that runs beside torch's, and has no precedence over it.
#[derive(Debug)]
pub(super) struct CopyStream {
    device: Arc<Device>,
    stream: sys::CUstream,
    /// What was queued when somebody waits.
    end: Event,
}

// SAFETY: the driver's calls on a stream may come from any thread.
unsafe impl Send for CopyStream {}
// SAFETY: as above.
unsafe impl Sync for CopyStream {}

impl CopyStream {
    /// A stream of the lowest priority that does not wait for the default stream. That is 0, torch's own: CUDA has none that
    /// is lower.
    pub(super) fn new(device: &Arc<Device>) -> Result<Self> {
        let _current = device.make_current()?;
        let (lowest, _) = driver(result::stream::get_priority_range(), "cuCtxGetStreamPriorityRange")?;
        let kind = result::stream::StreamKind::NonBlocking;
        let stream =
            driver(result::stream::create_with_priority(kind, lowest), "cuStreamCreateWithPriority")?;
        match Event::new(device) {
            Ok(end) => Ok(Self { device: device.clone(), stream, end }),
            Err(error) => {
                // SAFETY: just made, destroyed once, and not used.
                let _ = unsafe { result::stream::destroy(stream) };
                Err(error)
            }
        }
    }

    /// A launcher on this stream, which must not outlive it.
    pub(super) fn launcher(&self) -> Launcher {
        // SAFETY: a live stream of this device; the launcher is used at once by the callers, which own the stream.
        unsafe { Launcher::of(self.device.clone(), self.stream.cast()) }
    }

    pub(super) fn raw(&self) -> *mut c_void {
        self.stream.cast()
    }

    /// Blocks the calling thread until what is queued now is over; the processor is left to others.
    pub(super) fn wait(&self) -> Result<()> {
        // SAFETY: a live stream of this device.
        unsafe { self.end.record(self.stream.cast())? };
        self.end.wait()
    }
}

impl Drop for CopyStream {
    /// Waits for what is queued: it uses memory that is freed after this.
    fn drop(&mut self) {
        let _ = self.wait();
        if let Ok(_current) = self.device.make_current() {
            // SAFETY: owned, destroyed once. A driver that has ended refuses, which is as good.
            let _ = unsafe { result::stream::destroy(self.stream) };
        }
    }
}

/// A point in a stream. Before the first record it counts as passed.
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
    /// One whose waits leave the processor to others.
    pub(super) fn new(device: &Arc<Device>) -> Result<Self> {
        const FLAGS: u32 = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32
            | sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC as u32;
        let _current = device.make_current()?;
        let mut event = std::ptr::null_mut();
        // SAFETY: writes the event's handle.
        driver(unsafe { sys::cuEventCreate(&raw mut event, FLAGS) }.result(), "cuEventCreate")?;
        Ok(Self { device: device.clone(), event })
    }

    /// Moves the event to the end of what a stream has queued.
    ///
    /// # Safety
    /// A live stream of this device, or null for the default stream.
    pub(super) unsafe fn record(&self, stream: *mut c_void) -> Result<()> {
        let _current = self.device.make_current()?;
        // SAFETY: a live event, and the caller's promise.
        driver(unsafe { result::event::record(self.event, stream.cast()) }, "cuEventRecord")
    }

    /// Makes work that a stream gets from now on wait for the event as recorded last. The host does not wait.
    ///
    /// # Safety
    /// Those of [`Event::record`].
    pub(super) unsafe fn before(&self, stream: *mut c_void) -> Result<()> {
        let _current = self.device.make_current()?;
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: a live event, and the caller's promise.
        driver(unsafe { result::stream::wait_event(stream.cast(), self.event, flags) }, "cuStreamWaitEvent")
    }

    pub(super) fn is_done(&self) -> Result<bool> {
        let _current = self.device.make_current()?;
        let _beside = BesideCaptures::new()?;
        // SAFETY: a live event.
        match unsafe { result::event::query(self.event) } {
            Ok(()) => Ok(true),
            Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            Err(error) => driver(Err(error), "cuEventQuery"),
        }
    }

    /// Blocks the calling thread.
    pub(super) fn wait(&self) -> Result<()> {
        let _current = self.device.make_current()?;
        let _beside = BesideCaptures::new()?;
        // SAFETY: a live event.
        driver(unsafe { result::event::synchronize(self.event) }, "cuEventSynchronize")
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(_current) = self.device.make_current() {
            // SAFETY: owned, destroyed once; the driver keeps it until what waits for it has gone on.
            let _ = unsafe { result::event::destroy(self.event) };
        }
    }
}
